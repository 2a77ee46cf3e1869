"""The optimizers over flat buckets are torch's over single tensors, parameter class by parameter class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from small import assembled, box_of, boxes, config_of
from ultrascale.assembly import Assembly
from ultrascale.models import transformer
from ultrascale.optim.groups import rule_of
from ultrascale.optim.optimizer import clip_coefficient
from ultrascale.parallel import store as store_module
from ultrascale.parallel.buckets import ALIGNMENT, Span

LR = [0.03, 0.02, 0.05, 0.0, 0.01]
ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": (0.8, 0.95),
    "optimizer.eps": 1e-6,
}
SGD = {"optimizer.name": "sgd", "optimizer.weight_decay": 0.1}
MUON = {**ADAMW, "optimizer.name": "muon"}


def spans(assembly: Assembly) -> dict[str, tuple[Span, torch.Tensor, torch.Tensor]]:
    """Logical name → its span, and its masters and gradients as views without padding."""
    store = assembly.store
    return {
        span.layout.name: (
            span,
            box_of(store, bucket, span, bucket.masters),
            box_of(store, bucket, span, bucket.gradients),
        )
        for bucket in store.buckets
        for span in bucket.spans
    }


def draw_gradients(assembly: Assembly, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for _, _, gradient in spans(assembly).values():
        gradient.copy_(torch.randn(gradient.shape, dtype=torch.float64, generator=generator))


def compared_with_torch(
    overrides: dict[str, Any], make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], coefficient: float = 1.0
) -> None:
    """Five steps of both, with the same gradients and learning rates; every parameter to 1e-12."""
    assembly = assembled(config_of(overrides))
    held = spans(assembly)
    twins = {name: torch.nn.Parameter(master.detach().clone()) for name, (_, master, _) in held.items()}
    decay = overrides["optimizer.weight_decay"]
    theirs = make(
        [
            {"params": [twin], "weight_decay": 0.0 if "norm" in name else decay, "name": name}
            for name, twin in twins.items()
        ]
    )
    for step, lr in enumerate(LR, start=1):
        draw_gradients(assembly, step)
        for name, (_, _, gradient) in held.items():
            twins[name].grad = gradient.clone() * coefficient
        for group in theirs.param_groups:
            group["lr"] = lr * held[group["name"]][0].layout.lr_scale
        theirs.step()
        assembly.optimizer.step(step, lr, coefficient)
        for name, (_, master, _) in held.items():
            torch.testing.assert_close(master, twins[name].data, rtol=1e-12, atol=1e-14, msg=f"{name} at step {step}")


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6)


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_adamw_is_torchs_with_decay_on_matrices_only(coefficient: float) -> None:
    compared_with_torch(ADAMW, adamw, coefficient)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs_with_decay_on_matrices_only(momentum: float) -> None:
    compared_with_torch(
        {**SGD, "optimizer.momentum": momentum}, lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=momentum)
    )


def test_learning_rate_factors_of_the_layout_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = transformer.matrix

    def scaled(name: str, *args: Any) -> Any:
        return replace(plain(name, *args), lr_scale=0.25 if "down_proj" in name else 2.0 if "o_proj" in name else 1.0)

    monkeypatch.setattr(transformer, "matrix", scaled)
    compared_with_torch(ADAMW, adamw)
    layouts = [span.layout for span, _, _ in spans(assembled(config_of(ADAMW))).values()]
    assert {layout.lr_scale for layout in layouts} == {0.25, 1.0, 2.0}


@pytest.mark.parametrize(
    "groups",
    [(), ({"match": "*.k_proj.weight", "lr_scale": 0.5}, {"match": "layers.0.*_proj.*", "optimizer": "muon"})],
    ids=["plain", "groups"],
)
def test_every_element_is_in_one_segment_of_its_own_rule(groups: Any) -> None:
    config = config_of({**ADAMW, "parallel.bucket_bytes": 10_000, "optimizer.groups": groups})
    assembly = assembled(config)
    assert len(assembly.gradients.buckets) > 1
    covered = {id(bucket): torch.zeros(bucket.numel, dtype=torch.int64) for bucket in assembly.gradients.buckets}
    for segment in assembly.optimizer.segments:
        covered[id(segment.bucket)][segment.start : segment.stop] += 1
        for span in segment.bucket.spans:
            # Up to an aligned place, or to where the next tensor begins: which elements a kernel ends with is then the
            # same in every bucket.
            assert segment.stop % ALIGNMENT == 0 or segment.stop in [span.start for span in segment.bucket.spans]
            if span.start < segment.stop and segment.start < span.stop:
                assert rule_of(span.layout, config.optimizer) == segment.rule, span.layout.name
                assert segment.holds(span)
    for bucket in assembly.gradients.buckets:
        for span in bucket.spans:
            assert (covered[id(bucket)][span.start : span.stop] == 1).all(), span.layout.name


MUON_FOR_ALL_MATRICES = {
    **MUON,
    "optimizer.groups": tuple({"kind": kind, "optimizer": "muon"} for kind in ("embedding", "head")),
}


@pytest.mark.parametrize("overrides", [ADAMW, MUON_FOR_ALL_MATRICES], ids=["adamw", "muon"])
def test_padding_stays_zero(overrides: dict[str, Any]) -> None:
    """Rows of the vocabulary that do not exist, and gaps between tensors: they would come into norms and messages."""
    assembly = assembled(config_of(overrides))
    for step in range(1, 4):
        draw_gradients(assembly, step)
        assembly.optimizer.step(step, 0.1, 1.0)
    checked = 0
    for bucket in assembly.gradients.buckets:
        padding = torch.ones(bucket.numel, dtype=torch.bool)
        for span in bucket.spans:
            box_of(assembly.store, bucket, span, padding).fill_(False)
        assert (bucket.masters[padding] == 0).all()
        checked += int(padding.sum())
    assert checked > 0


@pytest.mark.parametrize("overrides", [ADAMW, {**SGD, "optimizer.momentum": 0.9}, MUON], ids=["adamw", "sgd", "muon"])
@pytest.mark.parametrize("compute", ["float64", "bfloat16"])
def test_building_an_optimizer_changes_no_parameter(
    overrides: dict[str, Any], compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it make a step: its state is zeros, and a first step with no gradient and no decay moves nothing."""
    seen: list[torch.Tensor] = []
    materialise = store_module.Store.materialise

    def watched(self: Any, *args: Any) -> None:
        materialise(self, *args)
        seen.extend(bucket.masters.clone() for bucket in self.buckets)
        seen.extend(bucket.weights.clone() for bucket in self.buckets)

    monkeypatch.setattr(store_module.Store, "materialise", watched)
    assembly = assembled(config_of({**overrides, "precision.compute": compute, "optimizer.weight_decay": 0.0}))
    buckets = assembly.gradients.buckets

    def now() -> list[torch.Tensor]:
        return [bucket.masters for bucket in buckets] + [bucket.weights for bucket in buckets]

    assert all(torch.equal(before, after) for before, after in zip(seen, now(), strict=True))
    assert all((tensor == 0).all() for state in assembly.optimizer.state for tensor in state.values())
    assert any(state for state in assembly.optimizer.state)
    assembly.optimizer.step(1, 0.1, 1.0)
    assert all(torch.equal(before, after) for before, after in zip(seen, now(), strict=True))


@pytest.mark.parametrize(
    "overrides", [ADAMW, {**SGD, "optimizer.momentum": 0.9}, SGD, MUON], ids=["adamw", "sgdm", "sgd", "muon"]
)
@pytest.mark.parametrize("coefficient", [1.0, 0.5])
def test_a_step_leaves_the_gradients_alone(overrides: dict[str, Any], coefficient: float) -> None:
    assembly = assembled(config_of(overrides))
    draw_gradients(assembly, 1)
    before = boxes(assembly, "gradients")
    assembly.optimizer.step(1, 0.1, coefficient)
    for (name, _, _, values), (_, _, _, after) in zip(before, boxes(assembly, "gradients"), strict=True):
        assert (values == after).all(), name


def test_clipping_scales_a_gradient_down_to_the_bound_and_never_up() -> None:
    assert clip_coefficient(123.0, None) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(4.0, 2.0) == pytest.approx(0.5, rel=1e-6)
    assert 4.0 * clip_coefficient(4.0, 1.0) <= 1.0
    twin = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    for norm in (0.5, 0.999999, 1.0, 1.5, 1e6):
        twin.grad = torch.tensor([norm, 0.0], dtype=torch.float64)
        torch.nn.utils.clip_grad_norm_([twin], 1.0)
        assert twin.grad[0].item() == pytest.approx(norm * clip_coefficient(norm, 1.0), rel=1e-12)
