"""Mixtures of experts: tokens go where their router says and come back weighted, whatever the layout; what keeps the
load even is counted once and is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from trial_cases import TOLERANCE, Outcome, Tokens, compare, text

from pool import Context, pool
from small import assembled, boxes, config_of, whole
from ultrascale.assembly import Assembly
from ultrascale.data.loader import Data, MicroArrays
from ultrascale.models.batch import StepBatch
from ultrascale.models.moe import MixtureOfExperts
from ultrascale.parallel.experts.router import Router
from ultrascale.step import evaluate, micro_batch, step_batch, train_step, with_denominators

LENGTH, VOCABULARY, EXPERTS, K = 16, 64, 4, 2
MOE: dict[str, Any] = {
    "model.family": "mixtral",
    "model.hidden_size": 32,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.vocab_size": VOCABULARY,
    "model.num_experts": EXPERTS,
    "model.num_experts_per_tok": K,
    "model.moe_intermediate_size": 32,
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "batch.sequence_length": LENGTH,
}
AUX = {"model.router_aux_loss_coef": 0.1, "model.router_z_loss_coef": 0.01}
BIASED = {"model.router_bias_update_rate": 0.05}
SP, NO_SP = {"parallel.sequence_parallel": True}, {"parallel.sequence_parallel": False}
TP_INSIDE = {"parallel.tp": 2, "parallel.expert_tensor_axes": ("tp",)}
TP_OUTSIDE = {"parallel.tp": 2, "parallel.expert_tensor_axes": ()}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {"parallel.dp": 2}),
    "ep 2": (2, {"parallel.ep": 2}),
    "cp 2 on experts": (2, {"parallel.cp": 2, "parallel.expert_axes": ("cp",)}),
    "tp 2 in experts, sp": (2, {**TP_INSIDE, **SP}),
    "tp 2": (2, {**TP_OUTSIDE, **NO_SP}),
    "pp 2": (2, {"parallel.pp": 2}),
}


@dataclass
class Seen(Outcome):
    """What one rank saw, and what it knows of experts."""

    loads: list[list[list[int]]] = field(default_factory=list)
    """Of each step, [layers][experts]."""
    biases: dict[str, bytes] = field(default_factory=dict)
    """Of this rank's routers, after the last step."""
    ranges: list[tuple[float, float] | None] = field(default_factory=list)
    reports: list[dict[str, float]] = field(default_factory=list)


def batch_of(assembly: Assembly, tokens: Tokens, filled: Sequence[int] | None = None) -> StepBatch:
    """This rank's part of a global batch; `filled` says of each sequence how many tokens are text."""
    inputs, labels = (part.numpy() for part in tokens)
    config, axes = assembly.config, ["dp", "ep"]
    share = inputs.shape[1] // assembly.mesh.size(axes)
    first, size = share * assembly.mesh.index(assembly.rank, axes), config.batch.micro_size
    unfilled = LENGTH - np.array(filled if filled is not None else [LENGTH] * inputs.shape[1])
    made = []
    for start in range(first, first + share, size):
        part = slice(start, start + size)
        arrays = MicroArrays(
            inputs=inputs[:, part],
            labels=labels[:, part],
            positions=np.repeat(np.arange(LENGTH)[:, None], size, axis=1),
            further_labels=(),
            further_inputs=(),
            samples=np.arange(start, start + size),
            documents=None,
            padding=unfilled[part],
        )
        made.append(micro_batch(assembly, arrays))
    return with_denominators(assembly, made)


def on_this_rank(
    context: Context | None,
    overrides: Mapping[str, Any],
    batches: Sequence[Tokens],
    filled: Sequence[int] | None,
    favoured: bool,
    evaluates: bool,
) -> Seen:
    """A step for each batch.

    favoured    biases send every token to the first k experts
    evaluates   between steps, on the step's own batch
    """
    assembly = assembled(config_of({**MOE, **overrides}, context.world_size if context else 1), context)
    biases = {kept.layout.name: kept.tensor for kept in assembly.store.kept}
    if favoured:
        for bias in biases.values():
            bias[:K] = 10.0
    seen = Seen()
    for number, tokens in enumerate(batches, 1):
        result = train_step(assembly, batch_of(assembly, tokens, filled), number)
        assert result.load is not None
        if number == 1:
            seen.gradients = boxes(assembly, "gradients")
        if evaluates:
            evaluate(assembly, [batch_of(assembly, tokens, filled)])
        seen.losses.append(result.report["loss"])
        seen.norms.append(result.grad_norm)
        seen.reports.append(dict(result.report))
        seen.loads.append(result.load.tolist())
        seen.ranges.append(result.router_bias_range)
    seen.weights = boxes(assembly, "masters")
    seen.biases = {name: bias.numpy().tobytes() for name, bias in biases.items()}
    return seen


def steps(
    world: int,
    overrides: Mapping[str, Any],
    batches: Sequence[Tokens],
    filled: Sequence[int] | None = None,
    favoured: bool = False,
    evaluates: bool = False,
) -> list[Seen]:
    arguments = (dict(overrides), list(batches), filled, favoured, evaluates)
    return [on_this_rank(None, *arguments)] if world == 1 else pool(world).run(on_this_rank, *arguments)


def texts(count: int, kept: Sequence[int] = (LENGTH,) * 8) -> list[Tokens]:
    return [text(kept, LENGTH, VOCABULARY, seed) for seed in range(count)]


def gradients(found: list[Seen]) -> dict[str, np.ndarray]:
    return whole([seen.gradients for seen in found])


@contextmanager
def routers_watched(assembly: Assembly) -> Iterator[list[tuple[Router, torch.Tensor, torch.Tensor]]]:
    """Router, the tokens it saw [tokens, hidden] and what it chose [tokens, k], of each forward inside."""
    calls: list[tuple[Router, torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda m, given, out: calls.append((m, given[0].detach(), out.chosen)))
        for module in modules(assembly, Router)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def modules(assembly: Assembly, kind: type) -> list[Any]:
    return [
        module
        for stage in assembly.stages.values()
        for _, unit in stage.units()
        for module in unit.modules()
        if isinstance(module, kind)
    ]


# ---- tokens travel ------------------------------------------------------------------------------------------------


def weighted_sums(context: Context | None, overrides: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Of each layer with experts that hand back what they get: what came out, and Σ weight · x."""
    assembly = assembled(config_of({**MOE, **overrides}, context.world_size if context else 1), context)
    outputs: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    routings = []
    for mixture in modules(assembly, MixtureOfExperts):
        # Parts of one expert's output are added up: halves and quarters of x, without rounding.
        parts = assembly.mesh.size(assembly.config.parallel.expert_tensor_axes or ())
        mixture.experts.forward = lambda rows, counts, current, parts=parts: rows / parts
        mixture.router.register_forward_hook(lambda module, given, out: routings.append(out))
        mixture.register_forward_hook(lambda module, given, out: outputs.append((module, given[0], out[0])))
    with torch.no_grad():
        assembly.evaluation.run(batch_of(assembly, texts(1)[0]))
    found, parallel = [], assembly.config.parallel
    for (mixture, x, y), routing in zip(outputs, routings, strict=True):
        group, cut = mixture.build.tensor_group, not mixture.build.sequence_parallel
        own, came = (t.chunk(group.size, 0)[group.index] if cut else t for t in (x, y))
        wide = own.flatten(0, 1).to(routing.weights.dtype)
        # In the order that is promised: a rank's experts together (a token has two at most), rank by rank.
        shares, parts = (assembly.mesh.size(axes) for axes in (parallel.expert_axes, parallel.expert_tensor_axes or ()))
        total = torch.zeros_like(wide)
        for share in range(shares):
            weights = routing.weights * (routing.chosen // (EXPERTS // shares) == share)
            for _ in range(parts):
                total += (wide.unsqueeze(1) / parts * weights.unsqueeze(-1)).sum(1)
        expected = total.to(y.dtype)
        found.append(
            (came.flatten(0, 1).view(torch.uint8).numpy().tobytes(), expected.view(torch.uint8).numpy().tobytes())
        )
    return found


@pytest.mark.parametrize(
    "layout", ["one", *LAYOUTS, "ep 2, bfloat16", "ep 2, tp 2 in experts", "ep 4", "ep 2 and tp 2"]
)
def test_experts_that_change_nothing_give_the_weighted_sum_of_the_tokens_bit_for_bit(layout: str) -> None:
    further: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "ep 2, bfloat16": (2, {"parallel.ep": 2, "precision.compute": "bfloat16"}),
        "ep 2, tp 2 in experts": (4, {**TP_INSIDE, **SP, "parallel.ep": 2}),
        "ep 4": (4, {"parallel.ep": 4}),
        "ep 2 and tp 2": (4, {**TP_OUTSIDE, **NO_SP, "parallel.ep": 2, "parallel.expert_axes": ("ep", "tp")}),
    }
    world, overrides = (LAYOUTS | further)[layout]
    found = [weighted_sums(None, overrides)] if world == 1 else pool(world).run(weighted_sums, overrides)
    assert all(found)
    for rank, layers in enumerate(found):
        for number, (came, expected) in enumerate(layers):
            assert came == expected, f"rank {rank}: layer {number} of those here"


FILLED = [LENGTH, 3, 1, 2, 16, 5, 2, 1]
"""Tokens of text of each sequence."""


@pytest.fixture(scope="module")
def unevenly_filled() -> list[Seen]:
    return steps(1, AUX, texts(1, FILLED), FILLED)


@pytest.mark.parametrize("layout", ["one micro-batch", *LAYOUTS])
def test_counts_are_those_of_the_tokens_that_are_text(layout: str, unevenly_filled: list[Seen]) -> None:
    """Under cp a rank holds nothing but padding of some sequences."""
    world, axes = {"one micro-batch": (1, {"batch.micro_size": 8}), **LAYOUTS}[layout]
    contiguous = {"context.split": "contiguous"} if "cp" in layout else {}
    found = steps(world, {**axes, **AUX, **contiguous}, texts(1, FILLED), FILLED)
    for seen in found:
        assert seen.loads == unevenly_filled[0].loads
        assert [sum(layer) for layer in seen.loads[0]] == [K * sum(FILLED)] * 2
    compare(unevenly_filled, found)


@pytest.mark.parametrize("layout", ["ep 2", "cp 2 on experts", "tp 2 in experts, sp"])
def test_experts_and_ranks_without_a_token_train_like_one_process(layout: str) -> None:
    """Every token goes to the first two of four experts: those of the other rank have nothing to do."""
    world, axes = LAYOUTS[layout]
    frozen = {"model.router_bias_update_rate": 0.0, **AUX}
    expected = steps(1, frozen, texts(2), favoured=True)
    found = steps(world, {**axes, **frozen}, texts(2), favoured=True)
    everything = 8 * LENGTH
    assert expected[0].loads == [[[everything, everything, 0, 0]] * 2] * 2
    assert [seen.loads for seen in found] == [expected[0].loads] * world
    compare(expected, found)
    for name, gradient in gradients(found).items():
        assert not np.isnan(gradient).any(), name
        if ".experts." in name:
            assert not gradient[K:].any(), name
            assert gradient[:K].any(), name


# ---- gradients and norms ------------------------------------------------------------------------------------------


WAYS = {
    "tp 2, whole experts": {**TP_OUTSIDE, **SP, "parallel.dp": 2},
    "experts cut over cp 2": {"parallel.cp": 2, "parallel.dp": 2, "parallel.expert_tensor_axes": ("cp",)},
    "tp 2 and ep 2, whole experts": {**TP_OUTSIDE, **SP, "parallel.ep": 2},
    "ep 4": {"parallel.ep": 4},
}


CLIPPED = {"optimizer.max_norm": 0.1}


@pytest.fixture(scope="module")
def clipped() -> list[Seen]:
    return steps(1, CLIPPED, texts(2))


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_cut_experts_over_four_ranks_have_one_norm_and_one_update(way: str, clipped: list[Seen]) -> None:
    """Clipped, so that an expert that is missing from the norm, or counted twice, changes the step."""
    assert min(clipped[0].norms) > 0.2
    compare(clipped, steps(4, {**WAYS[way], **CLIPPED}, texts(2)))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_losses_of_many_steps_do_not_depend_on_how_experts_are_cut(optimizer: str) -> None:
    settings = {"optimizer.name": optimizer, "optimizer.lr": 0.01, "optimizer.max_norm": 1.0, **AUX}
    expected = steps(1, settings, texts(8))
    found = steps(2, {**settings, "parallel.ep": 2}, texts(8))
    for seen in found:
        np.testing.assert_allclose(seen.losses, expected[0].losses, rtol=1e-7)  # AdamW divides by small numbers
        np.testing.assert_allclose(seen.norms, expected[0].norms, rtol=1e-7)
        assert seen.losses[-1] != seen.losses[0]


def test_the_router_has_the_gradient_that_autograd_finds_in_the_auxiliary_terms() -> None:
    """One layer, no targets: what reaches its router is the balance and z terms alone, written down here again."""
    one_layer = {"model.num_hidden_layers": 1}
    (without,) = steps(1, one_layer, texts(1))
    (with_terms,) = steps(1, {**one_layer, **AUX}, texts(1))
    name = "layers.0.moe.router.weight"
    assert np.abs(gradients([without])[name] - gradients([with_terms])[name]).max() > 1e-4

    nothing = texts(1, [0] * 8)
    assembly = assembled(config_of({**MOE, **one_layer, **AUX}))
    with routers_watched(assembly) as calls:
        batch = batch_of(assembly, nothing[0])
        assembly.engine.run(batch)
    weight = calls[0][0].weight.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for _, x, chosen in calls:
        logits = x @ weight.T
        shares = logits.softmax(-1)
        for row in range(2):  # tokens lie as [places, rows of the micro-batch]
            taken = torch.nn.functional.one_hot(chosen[row::2], EXPERTS).sum((0, 1))
            mean_share = shares[row::2].mean(0)
            total = total + 0.1 / 8 * EXPERTS * (taken / (K * LENGTH) * mean_share).sum()
        total = total + 0.01 / (8 * LENGTH) * logits.logsumexp(-1).square().sum()
    total.backward()
    assert weight.grad is not None
    for world, axes in ((1, {}), *LAYOUTS.values()):
        if "parallel.pp" in axes:  # one layer is one stage
            continue
        found = gradients(steps(world, {**axes, **one_layer, **AUX}, nothing))[name]
        np.testing.assert_allclose(found, weight.grad.numpy(), rtol=TOLERANCE, atol=1e-15, err_msg=str(axes))
    assert float(weight.grad.abs().max()) > 1e-6


@pytest.fixture(scope="module")
def terms_alone() -> list[Seen]:
    return steps(1, {**AUX, "batch.micro_size": 8}, texts(1, [0] * 8))


@pytest.mark.parametrize("layout", ["four micro-batches", *LAYOUTS])
def test_auxiliary_gradients_alone_do_not_depend_on_the_layout(layout: str, terms_alone: list[Seen]) -> None:
    world, axes = {"four micro-batches": (1, {}), **LAYOUTS}[layout]
    assert terms_alone[0].reports[0]["lm_loss"] == 0.0
    found = steps(world, {**axes, **AUX}, texts(1, [0] * 8))
    compare(terms_alone, found)
    routers = [values for name, values in gradients(found).items() if "router" in name]
    assert len(routers) == 2
    assert all(np.abs(values).max() > 1e-6 for values in routers)


# ---- counts, biases, recomputation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["one micro-batch", "recomputed", "selective", *LAYOUTS, "pp 2, recomputed, evaluated between steps"]
)
def test_counts_biases_and_terms_are_exact_in_every_layout(layout: str) -> None:
    """Counts are what routers chose, counted here; each bias moves once a step, by the rate, towards the mean."""
    full = {"recompute.mode": "full"}
    further: dict[str, tuple[int, dict[str, Any]]] = {
        "one micro-batch": (1, {"batch.micro_size": 8}),
        "recomputed": (1, full),
        "selective": (1, {"recompute.mode": "selective"}),
        "pp 2, recomputed, evaluated between steps": (2, {"parallel.pp": 2, **full}),
    }
    world, axes = (LAYOUTS | further)[layout]
    loads, biases, ranges, reports = counted_by_hand()
    for seen in steps(world, {**axes, **BIASED, **AUX}, texts(3), evaluates="evaluated" in layout):
        assert seen.loads == loads
        assert seen.biases.items() <= biases.items()
        assert seen.biases
        assert seen.ranges == ranges
        for found, expected in zip(seen.reports, reports, strict=True):
            assert found == pytest.approx(expected, rel=TOLERANCE)


@cache
def counted_by_hand() -> tuple[Any, dict[str, bytes], Any, Any]:
    """Counts, biases after the last step, ranges of biases at each step and terms, of one process."""
    assembly = assembled(config_of({**MOE, **BIASED, **AUX}))
    routers = modules(assembly, Router)
    biases = {router: torch.zeros(EXPERTS, dtype=torch.float64) for router in routers}
    loads, ranges, reports = [], [], []
    for number, tokens in enumerate(texts(3), 1):
        ranges.append((min(float(b.min()) for b in biases.values()), max(float(b.max()) for b in biases.values())))
        with routers_watched(assembly) as calls:
            reports.append(dict(train_step(assembly, batch_of(assembly, tokens), number).report))
        counts = {router: [0] * EXPERTS for router in routers}
        for router, _, chosen in calls:
            for expert in chosen.flatten().tolist():
                counts[router][expert] += 1
        loads.append([counts[router] for router in routers])
        for router in routers:
            mean = 8 * LENGTH * K / EXPERTS
            biases[router] += 0.05 * torch.tensor([np.sign(mean - n) for n in counts[router]])
    names = [kept.layout.name for kept in assembly.store.kept]
    return loads, dict(zip(names, (b.numpy().tobytes() for b in biases.values()), strict=True)), ranges, reports


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_recomputation_routes_tied_scores_as_the_forward_did(noise: float) -> None:
    """Routers whose experts all score alike for every token, in bfloat16: zeros, or, under noise, one row for all. A
    choice that fell otherwise the second time would crash (rows of another number) or change the numbers."""

    def run(mode: str) -> list[Any]:
        narrow = {"precision.compute": "bfloat16", "recompute.mode": mode, "optimizer.lr": 0.01, **AUX}
        assembly = assembled(config_of({**MOE, **narrow, "model.router_jitter_noise": noise}))
        found: list[Any] = []
        for number, tokens in enumerate(texts(6), 1):
            for bucket in assembly.store.buckets:
                for span in bucket.spans:
                    if span.layout.name.endswith("router.weight"):
                        for flat in (bucket.masters, bucket.piece):
                            for _, values in assembly.store.pieces(bucket, span, flat):
                                values.copy_(values[:1].expand_as(values).clone() if noise else values * 0.0)
            result = train_step(assembly, batch_of(assembly, tokens), number)
            assert result.load is not None
            found += [result.report["loss"], result.grad_norm, result.load.tolist()]
        return found

    kept = run("none")
    assert noise or all(8 * LENGTH in layer for load in kept[2::3] for layer in load)  # ties fall one way
    assert run("full") == kept
    assert run("selective") == kept


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_dense_layer_between_and_a_layer_behind_the_last_are_counted_and_balanced(mode: str) -> None:
    """No layer without experts stops what comes after it, and the experts of a multi-token prediction layer are some
    like all others: each bias moves once a step, by the rate, towards the mean of a count by hand."""
    layers = {
        "model.num_hidden_layers": 3, "model.mlp_only_layers": (1,), "model.num_nextn_predict_layers": 1,
        "model.router_aux_loss_coef": 0.1, "model.router_aux_loss_scope": "global_batch",
    }  # fmt: skip
    assembly = assembled(config_of({**MOE, **layers, **BIASED, "recompute.mode": mode}))
    assert assembly.load is not None
    assert assembly.load.layers == (0, 2, 3)
    routers, data = modules(assembly, Router), Data(assembly.config)
    for number in (1, 2):
        before = [router.bias.clone() for router in routers]
        with routers_watched(assembly) as calls:
            result = train_step(assembly, step_batch(assembly, data.batch(number, 0, 1, 2)), number)
        assert result.load is not None
        for router, bias, found in zip(routers, before, result.load.tolist(), strict=True):
            # A forward that is computed again says the same again.
            seen = [chosen for of, _, chosen in calls if of is router][:: 2 if mode == "full" else 1]
            counts = torch.cat(seen).flatten().bincount(minlength=EXPERTS)
            assert found == counts.tolist()
            assert sum(found) == 8 * LENGTH * K
            moved = 0.05 * (counts.double().mean() - counts).sign()
            torch.testing.assert_close(router.bias, bias + moved, rtol=0, atol=1e-15)
            torch.testing.assert_close(router.load, counts.double() / counts.sum(), rtol=0, atol=0)
