"""Every layer on exactly one stage, however it is said."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.pipeline.partition import (
    PartitionError,
    Split,
    from_list,
    from_text,
    partition,
    table,
    to_text,
    uniform,
)


def counts(split: Split) -> list[int]:
    return [len(stage.layers) for stage in split]


def assert_whole(split: Split, num_layers: int) -> None:
    assert [layer for stage in split for layer in stage.layers] == list(range(num_layers))
    assert [stage.embedding for stage in split] == [True] + [False] * (len(split) - 1)
    assert [stage.head for stage in split] == [False] * (len(split) - 1) + [True]


@settings(max_examples=200, deadline=None)
@given(stages=st.integers(1, 64), more=st.integers(0, 200))
def test_uniform_split_is_whole_even_and_spares_the_ends(stages: int, more: int) -> None:
    num_layers = stages + more
    split = uniform(num_layers, stages)
    assert_whole(split, num_layers)
    sizes = counts(split)
    assert max(sizes) - min(sizes) <= 1
    longer = [stage for stage, size in enumerate(sizes) if size > num_layers // stages]
    # The stage with the head is longer never, the one with the embedding only when all between are.
    assert stages - 1 not in longer
    assert 0 not in longer or longer == list(range(stages - 1))


def test_uniform_split_of_known_models() -> None:
    assert counts(uniform(126, 16)) == [7, *[8] * 14, 7]
    assert counts(uniform(30, 4)) == [7, 8, 8, 7]
    assert counts(uniform(3, 2)) == [2, 1]
    assert counts(uniform(80, 3)) == [27, 27, 26]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_text_and_list_say_the_same_split(sizes: list[int]) -> None:
    split = from_list(sizes, sum(sizes), len(sizes))
    assert counts(split) == sizes
    assert_whole(split, sum(sizes))
    assert from_text(to_text(split), sum(sizes), len(sizes)) == split
    assert partition(sizes, sum(sizes), len(sizes)) == split


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("E t*7 | t*8 | t*8 | t*7 L", [7, 8, 8, 7]),
        ("Et*7|t*8|t * 8|t*7L", [7, 8, 8, 7]),
        ("ttt|tt t*2", [3, 4]),
        ("E | t*4 | L", [0, 4, 0]),
        ("t*4||", [4, 0, 0]),
    ],
)
def test_compact_text_is_read_with_and_without_blanks_and_ends(text: str, sizes: list[int]) -> None:
    split = partition(text, sum(sizes), len(sizes))
    assert counts(split) == sizes
    assert_whole(split, sum(sizes))


@pytest.mark.parametrize(
    ("layout", "num_layers", "stages", "words"),
    [
        (None, 3, 4, ["3 layers", "4 stages"]),
        ([3, 5], 9, 2, ["[3, 5]", "8 layers", "9"]),
        ([3, 5], 8, 3, ["[3, 5]", "2 stages", "3"]),
        ([9, -1], 8, 2, ["stage 1", "-1 layers"]),
        ("t*3|t*5", 9, 2, ["'t*3|t*5'", "8 layers", "9"]),
        ("t*3|t*5", 8, 3, ["2 stages", "3"]),
        ("t*3|x*5", 8, 2, ["'x*5'", "stage 1", "E t*7"]),
        ("t*3|t*", 4, 2, ["'*'", "stage 1"]),
        ("t*3|t*-1", 4, 2, ["'*-1'", "stage 1"]),
        ("t E|t", 2, 2, ["E on stage 0 must begin"]),
        ("t|E t", 2, 2, ["E on stage 1 must begin"]),
        ("t L|t", 2, 2, ["L on stage 0 must end"]),
        ("t|L t", 2, 2, ["L on stage 1 must end"]),
        ("t*9999999|t", 2, 2, ["'9'"]),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_both_numbers(
    layout: list[int] | str | None, num_layers: int, stages: int, words: list[str]
) -> None:
    with pytest.raises(PartitionError) as caught:
        partition(layout, num_layers, stages)
    for word in words:
        assert word in str(caught.value)


def test_table_says_which_layers_lie_where_and_adds_up() -> None:
    lines = table(from_list([2, 0, 1], 3, 3)).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0", "2", "embedding,", "0–1"],
        ["1", "0", "(nothing)"],
        ["2", "1", "2,", "head"],
        ["all", "3"],
    ]
