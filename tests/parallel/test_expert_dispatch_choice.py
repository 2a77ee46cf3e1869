"""Which way tokens take on which machine, and what is said of one that cannot be gone."""

from __future__ import annotations

from typing import Any

import pytest

from small import config_of
from ultrascale.parallel.check import check_device
from ultrascale.parallel.experts import choice

GPU: dict[str, Any] = {
    "model.family": "qwen3_moe", "model.num_experts": 8, "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 8, "parallel.ep": 2, "precision.compute": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("further", "world", "device", "version", "expected"),
    [
        ({}, 2, "cuda", "1.2.1", "deep_ep"),
        ({}, 2, "cpu", "1.2.1", "all_to_all"),
        ({}, 2, "cuda", None, "all_to_all"),
        ({"precision.compute": "float32"}, 2, "cuda", "1.2.1", "all_to_all"),
        ({"parallel.tp": 2}, 4, "cuda", "1.2.1", "all_to_all"),  # experts are cut inside
        ({"parallel.tp": 2, "parallel.expert_tensor_axes": ()}, 4, "cuda", "1.2.1", "deep_ep"),
        ({"parallel.ep": 1}, 1, "cuda", "1.2.1", "all_to_all"),
        ({"model.hidden_size": 12, "model.head_dim": 4}, 2, "cuda", "1.2.1", "all_to_all"),
        ({"parallel.expert_dispatch": "all_gather"}, 2, "cuda", "1.2.1", "all_gather"),
        ({"parallel.expert_dispatch": "all_to_all"}, 2, "cuda", "1.2.1", "all_to_all"),
    ],
)
def test_deep_ep_is_taken_where_it_can_run(
    further: dict[str, Any],
    world: int,
    device: str,
    version: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "installed", lambda package: version)
    assert choice.expert_dispatch(config_of({**GPU, **further}, world), device) == expected


def test_deep_ep_by_name_is_refused_on_a_cpu() -> None:
    (problem,) = check_device(config_of({**GPU, "parallel.expert_dispatch": "deep_ep"}, 2), "cpu")
    assert problem.key == "parallel.expert_dispatch"
    assert "deep_ep runs on GPUs alone, and this run is on cpu; use parallel.expert_dispatch=auto" in problem.message
