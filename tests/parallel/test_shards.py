"""Flat ranges of a tensor as boxes: each element once, in order, in as few boxes as a range can need."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.layout import BATCH_AXES
from ultrascale.parallel.shards import Sharding, boxes_of_range

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.data())
def test_a_range_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = np.arange(numel).reshape(shape)
    boxes = list(boxes_of_range(shape, start, stop))
    found = [whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].ravel() for offset, size in boxes]
    assert [value for values in found for value in values] == list(range(start, stop))
    assert all(len(offset) == len(size) == len(shape) for offset, size in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(1, 7))
def test_equal_shards_cover_a_tensor(shape: tuple[int, ...], shards: int) -> None:
    numel = prod(shape)
    size = -(-numel // shards)
    cuts = [(min(numel, size * k), min(numel, size * (k + 1))) for k in range(shards)]
    elements = sum(prod(box) for start, stop in cuts for _, box in boxes_of_range(shape, start, stop))
    assert elements == numel


@pytest.mark.parametrize(
    ("range_", "boxes"),
    [
        ((0, 12), [((0, 0), (3, 4))]),
        ((2, 11), [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]),
        ((5, 7), [((1, 1), (1, 2))]),
        ((4, 8), [((1, 0), (1, 4))]),
        ((3, 3), []),
    ],
)
def test_a_matrix_of_three_rows(range_: tuple[int, int], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    assert list(boxes_of_range((3, 4), *range_)) == boxes


def test_shards_lie_over_what_replicates_a_parameter() -> None:
    hybrid = Mesh(sizes={"dp": 4, "ep": 2}, factors={"dp": (("dp_replicate", 2), ("dp_shard", 2))})
    dense = hybrid.expand(BATCH_AXES)
    assert Sharding.on(hybrid, 3, BATCH_AXES).of(dense) == ("dp_shard", "ep", "cp")
    assert Sharding.on(hybrid, 0, BATCH_AXES).of(dense) == ()
    # An expert that is cut over ep is shared out over the rest.
    assert Sharding.on(hybrid, 1, BATCH_AXES).of(("dp_replicate", "dp_shard", "cp")) == ("dp_shard", "cp")
