"""What a run says of its experts: figures in metrics.jsonl, all counts in a file of their own, the same in every
layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from trainer_cases import codes, lines, metrics, numbers, train

from ultrascale.observe.expert_load import balance_figures

RATE = 0.01
MOE: dict[str, Any] = {
    "run.steps": 5,
    "model.family": "qwen3_moe",
    "model.tie_word_embeddings": False,
    "model.num_hidden_layers": 4,
    "model.mlp_only_layers": (2, 3),
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 16,
    "model.router_bias_update_rate": RATE,
    "model.router_aux_loss_coef": 0.01,
    "model.router_aux_loss_scope": "global_batch",
    "model.router_jitter_noise": 0.1,
    "model.expert_capacity_factor": 1.0,
    "precision.compute": "float64",
    "observe.console_every": 2,
}


def test_figures_are_those_of_the_counts_and_biases_those_of_earlier_counts(tmp_path: Path) -> None:
    assert codes(train(1, tmp_path, {**MOE, "observe.console_every": 1})) == {0}
    counts = lines(tmp_path / "expert_load.jsonl")
    records = metrics(tmp_path)
    assert [line["step"] for line in counts] == [record["step"] for record in records] == [1, 2, 3, 4, 5]
    biases, mean = [[0.0] * 4 for _ in range(2)], 4 * 8 * 2 / 4
    for line, record in zip(counts, records, strict=True):
        assert line["layers"] == [0, 1]
        assert [sum(row) for row in line["tokens"]] == [2 * 4 * 8] * 2
        assert record["expert_load"] == balance_figures(line["tokens"])["expert_load"]
        assert record["expert_entropy"] == balance_figures(line["tokens"])["expert_entropy"]
        assert record["aux_balance"] > 0
        found = [bias for layer in biases for bias in layer]
        assert record["router_bias_range"] == pytest.approx([min(found), max(found)], abs=1e-12)
        for layer, row in enumerate(line["tokens"]):
            for expert, tokens in enumerate(row):
                biases[layer][expert] += RATE * ((tokens < mean) - (tokens > mean))
    assert records[-1]["router_bias_range"][0] < 0 < records[-1]["router_bias_range"][1]


def test_other_layouts_say_the_same_and_a_rank_may_have_no_router(tmp_path: Path) -> None:
    """Under pp = 2 the second rank has dense layers only."""
    train(1, tmp_path / "one", MOE)
    for name, axes in (("pp", {"parallel.pp": 2}), ("ep", {"parallel.ep": 2})):
        assert codes(train(2, tmp_path / name, {**MOE, **axes})) == {0}
        keys = ("expert_load", "expert_entropy", "router_bias_range", "expert_dropped", "expert_dropped_share")
        expected = [{key: line[key] for key in keys} for line in metrics(tmp_path / "one")]
        assert [{key: line[key] for key in keys} for line in metrics(tmp_path / name)] == expected
        assert lines(tmp_path / name / "expert_load.jsonl") == lines(tmp_path / "one" / "expert_load.jsonl")
    assert [line["step"] for line in lines(tmp_path / "one" / "expert_load.jsonl")] == [2, 4, 5]


def test_a_resumed_run_has_the_figures_and_counts_of_one_that_went_through(tmp_path: Path) -> None:
    train(1, tmp_path / "whole", MOE)
    train(1, tmp_path / "parts", {**MOE, "run.steps": 4, "checkpoint.every": 3})
    assert len(lines(tmp_path / "parts" / "expert_load.jsonl")) == 2
    for newest in (tmp_path / "parts" / "checkpoints").glob("step-00000004"):
        newest.rename(tmp_path / "away")  # it goes on from step 3, and step 4 comes again
    shutil.copytree(tmp_path / "parts", tmp_path / "cut")
    train(2, tmp_path / "cut", {**MOE, "parallel.ep": 2})
    for record, expected in zip(metrics(tmp_path / "cut"), metrics(tmp_path / "whole"), strict=True):
        assert record["expert_load"] == expected["expert_load"]
        for name in ("loss", "aux_balance", "grad_norm"):
            assert record[name] == pytest.approx(expected[name], rel=1e-9)
    train(1, tmp_path / "parts", MOE)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert lines(tmp_path / "parts" / "expert_load.jsonl") == lines(tmp_path / "whole" / "expert_load.jsonl")


def test_what_experts_had_no_room_for_is_said(tmp_path: Path) -> None:
    """With room for an even share alone, something is dropped, and with room for all nothing."""
    train(1, tmp_path / "even", {**MOE, "run.steps": 2})
    for record in metrics(tmp_path / "even"):
        assert all(0 < count < 4 * 8 * 2 for count in record["expert_dropped"])
        assert record["expert_dropped_share"] == [count / (4 * 8 * 2) for count in record["expert_dropped"]]
    train(1, tmp_path / "most", {**MOE, "run.steps": 1, "model.expert_capacity_factor": 1.9})
    assert metrics(tmp_path / "most")[0]["expert_dropped"] == [0, 0]
    train(1, tmp_path / "free", {**MOE, "run.steps": 1, "model.expert_capacity_factor": None})
    assert not {"expert_dropped", "expert_dropped_share"} & metrics(tmp_path / "free")[0].keys()


def test_without_biases_or_experts_nothing_is_said_of_them(tmp_path: Path) -> None:
    train(1, tmp_path / "free", {**MOE, "run.steps": 1, "model.router_bias_update_rate": None})
    assert "router_bias_range" not in metrics(tmp_path / "free")[0]
    assert "expert_load" in metrics(tmp_path / "free")[0]
    train(1, tmp_path / "dense", {"run.steps": 1})
    assert not {"expert_load", "expert_entropy", "router_bias_range"} & metrics(tmp_path / "dense")[0].keys()
    assert not (tmp_path / "dense" / "expert_load.jsonl").exists()
