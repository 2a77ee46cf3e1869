"""Which parameter is updated how: the first group that matches, over `optimizer.*`; and what is refused, with the
nearest fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from small import BASE, assembled, config_of
from ultrascale.config.collect import check
from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError
from ultrascale.optim.check import BFLOAT16_DECAY
from ultrascale.optim.groups import Rule

ADAMW = {"optimizer.name": "adamw", "optimizer.weight_decay": 0.1, "optimizer.eps": 1e-6}
MUON = {**ADAMW, "optimizer.name": "muon"}


def rules(overrides: dict[str, Any]) -> dict[str, Rule]:
    """Logical name → the rule of the segment that holds it, of a model in one process."""
    assembly = assembled(config_of(overrides))
    return {
        span.layout.name: segment.rule
        for segment in assembly.optimizer.segments
        for span in segment.bucket.spans
        if segment.holds(span)
    }


def test_without_groups_every_parameter_has_what_the_section_says() -> None:
    for name, rule in rules(ADAMW).items():
        assert rule == Rule("adamw", 1.0, 0.0 if "norm" in name else 0.1, betas=(0.9, 0.95), eps=1e-6), name


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    found = rules(MUON)
    muon = {name for name, rule in found.items() if rule.optimizer == "muon"}
    assert muon == {name for name in found if name.endswith("_proj.weight")}
    assert len(muon) == 2 * 7
    assert {found[name] for name in muon} == {Rule("muon", 1.0, 0.1, momentum=0.95)}
    assert {found[name].optimizer for name in found.keys() - muon} == {"adamw"}


def test_the_first_group_that_matches_holds_and_what_it_leaves_out_is_the_sections() -> None:
    groups = (
        {"match": "layers.1.attention.*", "lr_scale": 0.5},
        {"match": "layers.*.attention.*", "betas": (0.5, 0.6), "eps": 1e-3},
        {"match": "layers.0.mlp.gate_proj.*", "weight_decay": 0.0},
        {"kind": "norm", "weight_decay": 0.3},
        {"kind": "matrix", "optimizer": "sgd", "momentum": 0.7},
        {"kind": "head", "optimizer": "muon", "lr_scale": 0.0},
    )
    found = rules({**ADAMW, "optimizer.groups": groups})
    plain = {"betas": (0.9, 0.95), "eps": 1e-6}
    assert found["layers.1.attention.q_proj.weight"] == Rule("adamw", 0.5, 0.1, **plain)
    assert found["layers.0.attention.q_proj.weight"] == Rule("adamw", 1.0, 0.1, betas=(0.5, 0.6), eps=1e-3)
    assert found["layers.0.mlp.gate_proj.weight"] == Rule("adamw", 1.0, 0.0, **plain)
    assert found["layers.0.attention_norm.weight"] == found["norm.weight"] == Rule("adamw", 1.0, 0.3, **plain)
    assert found["layers.1.mlp.up_proj.weight"] == Rule("sgd", 1.0, 0.1, momentum=0.7)
    assert found["lm_head.weight"] == Rule("muon", 0.0, 0.1, momentum=0.95)
    assert found["embed_tokens.weight"] == Rule("adamw", 1.0, 0.1, **plain)


def test_a_tied_parameter_is_found_by_each_of_its_names() -> None:
    tied = {**ADAMW, "model.tie_word_embeddings": True}
    for group in ({"match": "lm_head.*"}, {"match": "embed_tokens.*"}, {"kind": "embedding"}):
        assert rules({**tied, "optimizer.groups": ({**group, "lr_scale": 3.0},)})["embed_tokens.weight"].lr_scale == 3.0


REFUSED_BY_THE_MODEL = [
    (
        {},
        [{"match": "layer.*.atention.*", "lr_scale": 0.5}],
        r"groups\[0\]\.match=layer\.\*\.atention\.\* matches no parameter; the nearest are layers\.\*\.attention",
    ),
    ({}, [{"match": "layers.7.*", "lr_scale": 0.5}], r"groups\[0\]\.match=layers\.7\.\* matches no parameter; the nea"),
    (
        {},
        [{"match": "layers.*", "lr_scale": 0.5}, {"match": "layers.0.*", "lr_scale": 0.1}],
        r"groups\[1\]\.match=layers\.0\.\* holds for no parameter: optimizer\.groups\[0\] comes first for layers\.0\."
        r"\S+; put the narrower group first",
    ),
    (
        {"model.tie_word_embeddings": True},
        [{"kind": "head", "lr_scale": 0.5}],
        r"groups\[0\]\.kind=head: this model has no such parameter; use embedding, matrix or norm",
    ),
    (
        {},
        [{"kind": "norm", "optimizer": "muon"}],
        r"optimizer=muon takes matrices \[out, in\] or stacks of them, and \S*norm\.weight has the shape \[16\]",
    ),
]


@pytest.mark.parametrize(("more", "groups", "said"), REFUSED_BY_THE_MODEL, ids=lambda value: str(value)[:40])
def test_a_group_that_the_model_has_no_use_for_is_refused(
    more: dict[str, Any], groups: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        assembled(config_of({**ADAMW, **more, "optimizer.groups": groups}))


def written(folder: Path, overrides: dict[str, Any]) -> Path:
    tree: dict[str, dict[str, Any]] = {}
    for key, value in {**BASE, **ADAMW, **overrides}.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


REFUSED_BEFORE = [
    ("optimizer.groups=[{lr_scale: 2}]", {}, "optimizer.groups[0] has neither match nor kind; use one of them"),
    ("optimizer.groups=[{match: a, kind: norm, lr_scale: 2}]", {}, "optimizer.groups[0] has match and kind; use one"),
    ("optimizer.groups=[{kind: norm}]", {}, "optimizer.groups[0] sets nothing; give it one of optimizer, lr_scale"),
    (
        "optimizer.groups=[{kind: norms, eps: 1}]",
        {},
        "must be matrix, norm, embedding, head or null; did you mean norm?",
    ),
    ("optimizer.groups=[{kind: norm, lr: 1}]", {}, "optimizer.groups[0].lr is not a key of a config"),
    (
        "optimizer.groups=[{kind: norm, momentum: 0.5}]",
        {},
        "optimizer.groups[0].momentum has no effect under optimizer adamw",
    ),
    (
        "optimizer.groups=[{kind: matrix, optimizer: muon, eps: 0.5}]",
        {},
        "optimizer.groups[0].eps has no effect under optimizer muon",
    ),
    ("optimizer.momentum=0.9", {}, "optimizer.momentum has no effect under optimizer.name=adamw"),
    ("optimizer.betas=[0.5,0.5]", {"optimizer.name": "sgd"}, "optimizer.betas has no effect under optimizer.name=sgd"),
    ("optimizer.newton_schulz_dtype=bfloat16", {}, "optimizer.newton_schulz_dtype has no effect under optimizer.name"),
    (
        "optimizer.newton_schulz_dtype=bfloat16",
        {"optimizer.name": "muon"},
        "optimizer.newton_schulz_dtype has no effect under precision.compute=float64 (matrices stay float64)",
    ),
    (
        "optimizer.state_dtype=bfloat16",
        {"optimizer.name": "sgd"},
        "optimizer.state_dtype has no effect under optimizer",
    ),
    ("optimizer.offload=true", {"optimizer.name": "sgd"}, "optimizer.offload has no effect under optimizer.name=sgd"),
    (
        "optimizer.betas=[0.9,0.999]",
        {"optimizer.state_dtype": "bfloat16"},
        "optimizer.betas: a moment in bfloat16 that decays by 0.999 is rounded back to what it was and never shrinks; "
        "use at most 0.996, or optimizer.state_dtype=float32",
    ),
]


@pytest.mark.parametrize(("override", "more", "said"), REFUSED_BEFORE, ids=lambda value: str(value)[:60])
def test_keys_that_do_not_fit_are_refused_without_torch(
    override: str, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(load(written(tmp_path, more), [override]), 1)


@pytest.mark.parametrize(
    ("override", "more"),
    [
        ("optimizer.betas=[0.5,0.5]", {"optimizer.name": "muon"}),  # of the embedding, the head and the norms
        ("optimizer.momentum=0.9", {"optimizer.name": "muon"}),
        ("optimizer.momentum=0.9", {"optimizer.groups": [{"kind": "head", "optimizer": "sgd"}]}),
        ("optimizer.eps=0.1", {"optimizer.name": "sgd", "optimizer.groups": [{"kind": "head", "optimizer": "adamw"}]}),
        ("optimizer.groups=[{match: 'layers.*', betas: [0.5, 0.5]}]", {"optimizer.name": "muon"}),
        ("optimizer.state_dtype=bfloat16", {"optimizer.betas": [0.9, 0.99]}),
        ("optimizer.state_dtype=bfloat16", {"optimizer.name": "sgd", "optimizer.momentum": 0.9}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_keys_that_some_parameter_reads_are_accepted(override: str, more: dict[str, Any], tmp_path: Path) -> None:
    check(load(written(tmp_path, more), [override]), 1)


def test_largest_decay_of_a_bfloat16_moment_shrinks_every_number() -> None:
    """Of two octaves, which stand for all: a step at the bound makes every number smaller, one at 0.999 none."""
    held = torch.arange(0x3F80, 0x4080, dtype=torch.int16).view(torch.bfloat16)
    assert ((held.float() * BFLOAT16_DECAY).bfloat16() < held).all()
    assert ((held.float() * 0.999).bfloat16() == held).all()
