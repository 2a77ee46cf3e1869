"""Rules of a start from other weights: which tensor comes from where, and everything that no rule covers is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from small import config_of
from ultrascale.checkpoint import check_init
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.weight_rules import Origin, origins
from ultrascale.config.schema import WeightRule

HERE = {
    "embed.weight": (9, 4),
    **{f"layers.{n}.{kind}.weight": (4, 4) for n in range(12) for kind in ("attention.q", "mlp.up")},
    "head.weight": (9, 4),
}
SMALLER = {name: shape for name, shape in HERE.items() if not name.startswith(("layers.1", "layers.8", "layers.9"))} | {
    f"layers.1.{kind}.weight": (4, 4) for kind in ("attention.q", "mlp.up")
}
"""Eight layers, 0 to 7."""


def rules(*given: tuple[str, ...]) -> list[WeightRule]:
    names = ("match", "action", "source")
    return [WeightRule.model_validate(dict(zip(names, one, strict=False))) for one in given]


def test_without_rules_every_tensor_comes_from_its_namesake() -> None:
    assert origins("there", [], HERE, HERE).of == {name: Origin(name) for name in HERE}


def test_layers_come_from_the_layers_that_a_range_names_number_by_number() -> None:
    found = origins("there", rules(("layers.8-11.*", "copy", "layers.2-5.*")), HERE, SMALLER)
    assert found.of["layers.10.mlp.up.weight"] == Origin("layers.4.mlp.up.weight")
    assert found.of["layers.7.mlp.up.weight"] == Origin("layers.7.mlp.up.weight")
    (applied,) = found.applied
    assert len(applied.names) == 8
    assert applied.text == "{match: layers.8-11.*, action: copy, source: layers.2-5.*}"
    one = origins("there", rules(("layers.8-11.*", "copy", "layers.7.*")), HERE, SMALLER)
    assert one.of["layers.10.attention.q.weight"] == Origin("layers.7.attention.q.weight")


def test_the_first_rule_that_matches_decides() -> None:
    found = origins("there", rules(("head.*", "fresh"), ("*.weight", "rows")), HERE, {**HERE, "embed.weight": (7, 4)})
    assert found.of["head.weight"] == Origin(None)
    assert found.of["embed.weight"] == Origin("embed.weight", 7)
    assert found.of["layers.0.mlp.up.weight"] == Origin("layers.0.mlp.up.weight", 4)


def test_more_rows_there_than_here_are_cut_off() -> None:
    found = origins("there", rules(("embed.weight", "rows")), HERE, {**HERE, "embed.weight": (20, 4)})
    assert found.of["embed.weight"] == Origin("embed.weight", 9)


REFUSED: dict[str, tuple[list[WeightRule], dict[str, Any], str]] = {
    "missing": ([], SMALLER, r"layers\.8\.mlp\.up\.weight is missing there; {match: layers\.8\.mlp\.up\.weight, act"),
    "left over": ([], {**HERE, "more": (3,)}, r"more has no place in this run; {match: more, action: ignore} leaves"),
    "other rows": ([], {**HERE, "embed.weight": (7, 4)}, r"has shape \[7, 4\].*{match: embed\.weight, action: rows}"),
    "other columns": ([], {**HERE, "embed.weight": (9, 5)}, r"{match: embed\.weight, action: fresh} draws it"),
    "rows of other columns": (
        rules(("embed.weight", "rows")), {**HERE, "embed.weight": (9, 5)},
        r"\[9, 5\].*action: rows} cannot make one of the other",
    ),
    "copied from nothing": (
        rules(("layers.8-11.*", "copy", "layers.20-23.*")), SMALLER,
        r"layers\.8\.mlp\.up\.weight is to come from layers\.20\.mlp\.up\.weight.*which is missing there",
    ),
    "replaced, and nowhere used": (
        rules(("layers.0.*", "copy", "layers.1.*")), HERE, r"layers\.0\.mlp\.up\.weight has no place in this run",
    ),
    "no such name": (rules(("haed.weight", "fresh")), HERE, r"rules\[0\].*no tensor of this run has such a name; did"),
    "too late": (rules(("*", "rows"), ("head.weight", "fresh")), HERE, r"rules\[1\].*decided by an earlier rule"),
    "in use": (rules(("head.weight", "ignore")), HERE, r"rules\[0\].*head\.weight is used; leave it out"),
    "nothing to ignore": (rules(("extra.*", "ignore")), HERE, r"rules\[0\].*no tensor there has such a name"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_rule_covers_is_refused_with_the_rule_that_would(case: str) -> None:
    given, found, named = REFUSED[case]
    with pytest.raises(CheckpointError, match=named):
        origins("there", given, HERE, found)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(CheckpointError) as raised:
        origins("there", [], HERE, {**SMALLER, "more": (3,)})
    assert str(raised.value).count("\n") == 8


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (("layers.5-2.*", "fresh"), "the range 5-2 is empty; use 2-5"),
        (("head.*", "copy"), "action: copy needs source"),
        (("head.*", "fresh", "embed.*"), "action: fresh reads nothing; leave source out"),
        (("layers.8-15.*", "copy", "layers.0-3.*"), "needs ranges as long as those of match"),
        (("layers.8.*", "copy", "layers.0-3.*"), "needs ranges as long"),
        (("layers.*", "copy", "layers.3"), r"needs as many \*"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_before_anything_is_read(rule: Any, named: str) -> None:
    (problem,) = check_init.check(config_of({"init.from_checkpoint": "runs/a", "init.rules": rules(rule)}))
    assert problem.message.startswith("init.rules[0]: ")
    assert re.search(named, problem.message)


def test_two_sources_and_rules_without_one_are_said() -> None:
    (problem,) = check_init.check(config_of({"init.from_checkpoint": "runs/a", "init.from_hf": "models/b"}))
    assert "are both set" in problem.message
    (problem,) = check_init.check(config_of({"init.rules": rules(("head.*", "fresh"))}))
    assert (problem.key, problem.kind) == ("init.rules", "idle")
