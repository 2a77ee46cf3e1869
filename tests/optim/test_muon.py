"""Muon is the published update of each logical matrix by itself, however matrices are stored, cut and stacked."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from small import assembled, box_of, config_of
from ultrascale.assembly import Assembly
from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.mesh.axes import Mesh
from ultrascale.optim.muon import newton_schulz
from ultrascale.optim.whole_matrices import WholeMatrices, share_out, tasks_of
from ultrascale.parallel.buckets import Bucket, Span
from ultrascale.parallel.layout import Kind, Layout, Normal, Use

MUON = {
    "optimizer.name": "muon",
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 0.1,
    "optimizer.betas": (0.8, 0.95),
    "optimizer.eps": 1e-6,
}
LR = [0.03, 0.02, 0.0, 0.01]


def orthogonalised(gradient: torch.Tensor) -> torch.Tensor:
    """Five quintic steps, as in the paper's formula: aX + b(XXᵀ)X + c(XXᵀ)²X."""
    x = gradient / gradient.pow(2).sum().sqrt()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


class PlainMuon:
    """One matrix, as the two papers have it."""

    def __init__(self, weight: torch.Tensor, momentum: float, decay: float) -> None:
        self.weight, self.momentum, self.decay = weight, momentum, decay
        self.velocity = torch.zeros_like(weight)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        self.velocity = self.momentum * self.velocity + gradient
        update = orthogonalised(gradient + self.momentum * self.velocity) * 0.2 * max(self.weight.shape) ** 0.5
        self.weight = self.weight - lr * (update + self.decay * self.weight)


def held(assembly: Assembly, buffer: str) -> dict[str, torch.Tensor]:
    """Logical name → views of one kind of buffer, without padding."""
    return {
        span.layout.name: box_of(assembly.store, bucket, span, getattr(bucket, buffer))
        for bucket in assembly.store.buckets
        for span in bucket.spans
    }


def draw_gradients(assembly: Assembly, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    gradients = held(assembly, "gradients")
    for gradient in gradients.values():
        gradient.copy_(torch.randn(gradient.shape, dtype=torch.float64, generator=generator))
    return gradients


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_newton_schulz_brings_singular_values_near_one_and_keeps_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(prod(shape)))
    found = newton_schulz(matrix)
    torch.testing.assert_close(found, orthogonalised(matrix), rtol=1e-10, atol=1e-12)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    values = u.T @ found @ vt.T
    # Small values grow 3.4445-fold a step, 485-fold in five: none of these matrices has one that stays below.
    assert ((values.diagonal() > 0.6) & (values.diagonal() < 1.25)).all()
    torch.testing.assert_close(values, torch.diag(values.diagonal()), rtol=0, atol=1e-12)


def test_a_gradient_of_zeros_stays_one() -> None:
    assert (newton_schulz(torch.zeros(3, 4)) == 0).all()


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
def test_muon_is_the_published_update_of_each_logical_matrix(coefficient: float) -> None:
    """q, k, v and gate, up lie in memory as one; the embedding, the head and norms are AdamW's."""
    assembly = assembled(config_of(MUON))
    masters = {name: master.clone() for name, master in held(assembly, "masters").items()}
    matrices = {n: PlainMuon(m, 0.9, 0.1) for n, m in masters.items() if n.endswith("_proj.weight")}
    rest = {n: torch.nn.Parameter(m) for n, m in masters.items() if n not in matrices}
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.0 if "norm" in n else 0.1} for n, p in rest.items()],
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    assert len(matrices) == 14
    for step, lr in enumerate(LR, start=1):
        gradients = {name: gradient * coefficient for name, gradient in draw_gradients(assembly, step).items()}
        for name, plain in matrices.items():
            plain.step(gradients[name], lr)
        for name, parameter in rest.items():
            parameter.grad = gradients[name]
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        assembly.optimizer.step(step, lr, coefficient)
        for name, master in held(assembly, "masters").items():
            expected = matrices[name].weight if name in matrices else rest[name].data
            torch.testing.assert_close(master, expected, rtol=1e-10, atol=1e-12, msg=f"{name} at step {step}")


def test_in_bfloat16_it_is_torchs_muon_within_its_rounding() -> None:
    """A second opinion. Both round every product to 2⁻⁹, of numbers that differ by a factor, as torch's velocity is a
    mean: some such roundings in five steps. Without Nesterov, or with another scale, it would be a third and more."""
    config = config_of({**MUON, "precision.compute": "float32", "optimizer.newton_schulz_dtype": "bfloat16"})
    assembly = assembled(config)
    name = "layers.0.mlp.gate_proj.weight"
    theirs = torch.nn.Parameter(held(assembly, "masters")[name].clone())
    optimizer = torch.optim.Muon(
        [theirs], lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in (1, 2):
        before, their_before = held(assembly, "masters")[name].clone(), theirs.data.clone()
        theirs.grad = draw_gradients(assembly, step)[name].clone()
        optimizer.step()
        assembly.optimizer.step(step, 0.05, 1.0)
        update, expected = held(assembly, "masters")[name] - before, theirs.data - their_before
        assert (update - expected).norm() < 0.05 * expected.norm()
        assert update.dtype == torch.float32


def test_moments_are_one_for_matrices_and_two_for_the_rest() -> None:
    assembly = assembled(config_of(MUON))
    elements = {"momentum": 0, "exp_avg": 0, "exp_avg_sq": 0}
    for bucket in assembly.store.buckets:
        for span in bucket.spans:
            for name, _, values in assembly.optimizer.state_pieces(bucket, span):
                elements[name] += values.numel()
    sizes = {name: master.numel() for name, master in held(assembly, "masters").items()}
    matrices = sum(size for name, size in sizes.items() if name.endswith("_proj.weight"))
    assert elements == {
        "momentum": matrices,
        "exp_avg": sum(sizes.values()) - matrices,
        "exp_avg_sq": sum(sizes.values()) - matrices,
    }


# ---- the exchange, on meshes of many ranks in this process --------------------------------------------------------


def layout(name: str, shape: tuple[int, ...], split: dict[int, tuple[str, ...]], pad_to: dict[int, int]) -> Layout:
    return Layout(
        name=name, shape=shape, split=split, used_in=Use.FEATURES, tie=None, init=Normal(1.0), decay=True,
        lr_scale=1.0, pad_to=pad_to, kind=Kind.MATRIX,
    )  # fmt: skip


SPLITS: list[tuple[tuple[int, ...], dict[int, tuple[str, ...]], dict[int, int]]] = [
    ((6, 5), {}, {}),
    ((6, 5), {0: ("tp",)}, {}),
    ((5, 8), {1: ("tp",)}, {}),
    ((4, 3), {0: ("kv_shard",)}, {}),  # with copies over kv_replica
    ((7, 3), {0: ("tp",)}, {0: 4}),  # uneven, and padded
    ((5, 6), {1: ("tp",)}, {1: 4}),  # every row padded
    ((4, 3, 5), {0: ("ep",)}, {}),  # experts
    ((4, 6, 2), {0: ("ep",), 1: ("tp",)}, {}),
    ((3, 2, 4), {}, {}),
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mesh, list[Layout], tuple[str, ...]]:
    shard, replica = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    sizes = {axis: draw(st.sampled_from([1, 2])) for axis in ("dp", "ep", "cp")}
    mesh = Mesh(sizes={**sizes, "tp": shard * replica}, factors={"tp": (("kv_shard", shard), ("kv_replica", replica))})
    chosen = draw(st.lists(st.sampled_from(SPLITS), min_size=1, max_size=4))
    layouts = [layout(f"w.{n}", *split) for n, split in enumerate(chosen)]
    # ZeRO cuts over what replicates: over axes that no tensor of the bucket is cut over.
    cut = frozenset().union(*(layout.split_axes(mesh) for layout in layouts))
    shards = draw(st.sampled_from([(), tuple(axis for axis in ("dp", "ep", "cp") if axis not in cut)]))
    return mesh, layouts, shards


def bucket_of(mesh: Mesh, rank: int, layouts: Sequence[Layout], shards: tuple[str, ...]) -> Bucket:
    """The layouts' tensors one after another with gaps; cut into unaligned shards, so that cuts fall inside rows."""
    bucket = Bucket(0, shards, shards, None, [], ())
    for one in layouts:
        shape = one.local_shape(mesh)
        bucket.spans.append(Span(one, bucket.numel, bucket.numel + prod(shape), shape))
        bucket.numel += prod(shape) + 3
    size = -(-bucket.numel // mesh.size(shards))
    bucket.lo = size * mesh.index(rank, shards)
    bucket.hi = bucket.lo + size
    return bucket


def values_of(one: Layout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int(one.name[2:]))
    return torch.randn(one.shape, generator=generator, dtype=torch.float64)


def box(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


@given(cases())
@settings(max_examples=40, deadline=None)
def test_every_matrix_is_whole_on_one_rank_and_comes_back_to_all_that_hold_it(
    case: tuple[Mesh, list[Layout], tuple[str, ...]],
) -> None:
    mesh, layouts, shards = case
    ranks = tuple(range(mesh.world_size))
    buckets = [bucket_of(mesh, rank, layouts, shards) for rank in ranks]
    groups = [Group(mesh.label(mesh.order), ranks, rank, None, Ledger()) for rank in ranks]
    plans = [
        WholeMatrices(mesh, group, [(bucket, span) for span in bucket.spans])
        for group, bucket in zip(groups, buckets, strict=True)
    ]
    like = torch.empty(0, dtype=torch.float64)

    # What each rank has of its tensors, as flat memory; the gaps would be seen.
    flats = []
    for rank, bucket in zip(ranks, buckets, strict=True):
        flat = torch.full((bucket.hi - bucket.lo,), torch.nan, dtype=torch.float64)
        for span in bucket.spans:
            for piece in bucket.held(span, mesh, rank):
                part = flat[piece.start : piece.start + prod(piece.memory)].view(piece.memory)
                box(part, [0] * part.dim(), piece.shape).copy_(box(values_of(span.layout), piece.offset, piece.shape))
        flats.append(flat)

    messages = exchanged([lambda r=r: plans[r].gather(lambda part: part.of(flats[r], 0), like) for r in ranks])
    made: dict[tuple[str, int | None], torch.Tensor] = {}
    wholes = []
    for rank in ranks:
        wholes.append(plans[rank].wholes(messages[rank]))
        for task, matrix in zip(plans[rank].own, wholes[rank], strict=True):
            name = task.span.layout.name, task.number
            assert name not in made, f"{name} is put together twice"
            made[name] = matrix
            expected = values_of(task.span.layout)
            assert torch.equal(matrix, expected if task.number is None else expected[task.number]), name
            matrix.mul_(-2)  # what becomes of it
    assert len(made) == len(list(tasks_of([(buckets[0], span) for span in buckets[0].spans])))

    messages = exchanged([lambda r=r: plans[r].scatter(wholes[r], like) for r in ranks])
    for rank in ranks:
        for part, values in plans[rank].pieces(messages[rank]):
            target = part.of(flats[rank], 0)
            assert torch.equal(values, target * -2)
            target.copy_(values)
        for span in buckets[rank].spans:
            for piece in buckets[rank].held(span, mesh, rank):
                part = flats[rank][piece.start : piece.start + prod(piece.memory)].view(piece.memory)
                expected = box(values_of(span.layout), piece.offset, piece.shape) * -2
                assert torch.equal(box(part, [0] * part.dim(), piece.shape), expected), span.layout.name


def exchanged(calls: Sequence[Any]) -> list[torch.Tensor]:
    """What each rank receives in one all-to-all, where the ranks call one after another."""
    sent: list[tuple[list[torch.Tensor], list[int]]] = []

    def all_to_all(message: torch.Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Pending:
        sent.append((list(message.split(list(send))), list(receive)))
        return Pending(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_to_all", all_to_all)
        for call in calls:
            call()
    received = []
    for rank, (_, sizes) in enumerate(sent):
        parts = [pieces[rank] for pieces, _ in sent]
        assert [part.numel() for part in parts] == sizes, "ranks do not agree on what is sent"
        received.append(torch.cat(parts))
    return received


def test_work_is_spread_over_the_ranks_by_size() -> None:
    mesh = Mesh(sizes={"dp": 4})
    shapes = [(64, 64), (64, 16), (64, 16), (64, 64), (172, 64), (172, 64), (64, 172)] * 4
    layouts = [layout(f"w.{n}", shape, {}, {}) for n, shape in enumerate(shapes)]
    bucket = bucket_of(mesh, 0, layouts, ())
    tasks = list(tasks_of([(bucket, span) for span in bucket.spans]))
    owners = share_out(tasks, mesh, range(4))
    loads = [sum(task.work for task, owner in zip(tasks, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_what_is_no_matrix_is_refused() -> None:
    bucket = bucket_of(Mesh(), 0, [layout("w.0", (2, 2, 2, 2), {}, {})], ())
    with pytest.raises(ValueError, match=r"w\.0 of shape \[2, 2, 2, 2\] is neither a matrix nor a stack of matrices"):
        list(tasks_of([(bucket, span) for span in bucket.spans]))
