"""The head's loss over a vocabulary that is cut over tp: the unsharded cross entropy, whatever chunks it is made in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pool import Context, pool
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import group_plan
from ultrascale.parallel import cross_entropy
from ultrascale.parallel.cross_entropy import NO_TARGET, VocabularyShard, head_loss
from ultrascale.parallel.passes import Pass, WeightGradient

ALONE = Group((), (0,), 0, None, Ledger())
Z = 0.3
"""Weight of the z term in the objective that is differentiated here."""


class Sink:
    """Adds up the weight gradient; of a split backward it keeps the part that may wait."""

    def __init__(self, weight: torch.Tensor, split: bool = False) -> None:
        self.total = torch.zeros_like(weight)
        self.split = split
        self.queue: list[WeightGradient] = []

    def defers(self, *where: int) -> bool:
        return self.split

    def defer(self, work: WeightGradient, *where: int) -> None:
        self.queue.append(work)
        if not self.split:
            self.run()

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0).run()

    def accumulate_product(self, parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, *where: int) -> None:
        self.total[: dy.shape[1]] += dy.t().mm(x)


@dataclass(frozen=True)
class Case:
    vocabulary: int
    seq: int = 4
    batch: int = 3
    hidden: int = 6
    smoothing: float = 0.0
    without_target: float = 0.3
    pad_to: int = 8
    scale: float = 1.0
    rows: int | None = None
    """Tokens in a chunk; None: what the module chooses."""
    keep: bool = True
    split: bool = False
    sequence_parallel: bool = False

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [seq, batch, hidden], weight [vocabulary, hidden], labels [seq, batch]"""
        generator = torch.Generator().manual_seed(self.vocabulary)
        x = torch.randn(self.seq, self.batch, self.hidden, dtype=torch.float64, generator=generator)
        weight = torch.randn(self.vocabulary, self.hidden, dtype=torch.float64, generator=generator) * self.scale
        labels = torch.randint(self.vocabulary, (self.seq, self.batch), generator=generator)
        labels[torch.rand(labels.shape, generator=generator) < self.without_target] = NO_TARGET
        return x, weight, labels


@dataclass
class Result:
    loss: torch.Tensor
    z: torch.Tensor
    dx: torch.Tensor
    dweight: torch.Tensor = field(repr=False)


def expected(case: Case) -> Result:
    x, weight, labels = case.tensors()
    x.requires_grad_()
    weight.requires_grad_()
    logits = (x @ weight.t()).flatten(0, 1)
    target = labels.flatten()
    loss = F.cross_entropy(logits, target, ignore_index=NO_TARGET, label_smoothing=case.smoothing, reduction="sum")
    z = (torch.logsumexp(logits, dim=-1).square() * (target != NO_TARGET)).sum()
    (loss + Z * z).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return Result(loss.detach(), z.detach(), x.grad, weight.grad)


def found(case: Case, group: Group = ALONE) -> Result:
    """What this rank gets; its rows of the weight are padded with rubbish that must play no part."""
    x, weight, labels = case.tensors()
    padded = -(-case.vocabulary // case.pad_to) * case.pad_to
    piece = -(-padded // group.size)
    start = min(case.vocabulary, piece * group.index)
    valid = min(case.vocabulary, start + piece) - start
    own = torch.full((piece, case.hidden), 1e3, dtype=torch.float64)
    own[:valid] = weight[start : start + valid]
    sink = Sink(own, case.split)
    if case.sequence_parallel:
        x = x.chunk(group.size)[group.index].clone()
    x.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if case.rows is not None:
            patch.setattr(cross_entropy, "_chunk_rows", lambda weight: case.rows)
        if not case.keep:
            patch.setattr(cross_entropy, "KEEP_BYTES", -1)
        shard = VocabularyShard(start, valid, case.vocabulary)
        current = Pass(0, 0, sink)  # type: ignore[arg-type]
        loss, z = head_loss(x, own, labels, shard, case.smoothing, group, case.sequence_parallel, current)
        (loss + Z * z).backward()
        if case.split and case.keep:
            assert (sink.total == 0).all(), "a weight gradient did not wait"
        sink.run()
    assert x.grad is not None
    assert (sink.total[valid:] == 0).all()
    return Result(loss.detach(), z.detach(), x.grad, sink.total[:valid])


def same(got: Result, wanted: Result) -> None:
    for name in ("loss", "z", "dx", "dweight"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=1e-12, atol=1e-12, msg=name)


def bitwise(got: Result, wanted: Result) -> bool:
    return all(torch.equal(getattr(got, name), getattr(wanted, name)) for name in ("loss", "z", "dx", "dweight"))


# ---- one process ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(1, 41),
    seq=st.integers(1, 5),
    batch=st.integers(1, 4),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    without_target=st.sampled_from([0.0, 0.4, 1.0]),
    rows=st.sampled_from([1, 2, 3, 5, 100, None]),
    keep=st.booleans(),
    split=st.booleans(),
)
def test_it_is_the_cross_entropy(**fields: Any) -> None:
    case = Case(**fields)
    same(found(case), expected(case))


@pytest.mark.parametrize("rows", [1, 3, 4, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kept_and_recomputed_logits_give_the_same_bits(rows: int | None, smoothing: float) -> None:
    case = {"vocabulary": 37, "rows": rows, "smoothing": smoothing}
    assert bitwise(found(Case(**case, keep=True)), found(Case(**case, keep=False)))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rows", [1, 3, None])
def test_a_weight_gradient_that_waits_has_the_same_bits(rows: int | None, keep: bool) -> None:
    case = {"vocabulary": 37, "rows": rows, "smoothing": 0.1, "keep": keep}
    assert bitwise(found(Case(**case, split=True)), found(Case(**case, split=False)))


def test_logits_are_kept_up_to_the_stated_size_and_made_again_above(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = cross_entropy._logits

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append(x.shape[0])
        return original(x, *rest)

    monkeypatch.setattr(cross_entropy, "_logits", counted)
    case = Case(37, seq=10, batch=4)
    logits_bytes = 10 * 4 * 40 * 8  # 37 rows are padded to 40
    for limit, times in ((logits_bytes, 1), (logits_bytes - 1, 2)):
        made.clear()
        monkeypatch.setattr(cross_entropy, "KEEP_BYTES", limit)
        found(case)
        assert sum(made) == times * 40


def test_a_chunk_of_logits_is_no_larger_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = cross_entropy._logits

    def counted(*args: Any) -> torch.Tensor:
        logits = original(*args)
        made.append(logits.nbytes)
        return logits

    monkeypatch.setattr(cross_entropy, "_logits", counted)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 20 * 40 * 8})
    case = Case(37, seq=30, batch=4)  # 37 rows are padded to 40
    same(found(case), expected(case))
    assert len(made) == 6
    assert max(made) <= 20 * 40 * 8


def test_no_target_at_all_gives_nothing_and_no_gradient() -> None:
    result = found(Case(11, without_target=1.0, smoothing=0.1))
    assert result.loss == 0
    assert result.z == 0
    assert (result.dx == 0).all()
    assert (result.dweight == 0).all()


def test_large_logits_neither_overflow_nor_vanish() -> None:
    case = Case(17, scale=400.0, smoothing=0.1)
    result = found(case)
    assert result.loss.isfinite()
    assert result.loss > 1e3
    torch.testing.assert_close(result.loss, expected(case).loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.dx, expected(case).dx, rtol=1e-9, atol=1e-6)


def test_statistics_of_bfloat16_logits_are_float32() -> None:
    x, weight, labels = Case(37).tensors()
    x, weight = x.bfloat16().requires_grad_(), weight.bfloat16()
    sink = SimpleNamespace(
        dtypes=[],
        accumulate_product=lambda p, dy, x, *where: sink.dtypes.append((dy.dtype, x.dtype)),
        defers=lambda *where: False,
    )
    shard = VocabularyShard(0, 37, 37)
    loss, z = head_loss(x, weight, labels, shard, 0.1, ALONE, False, Pass(0, 0, sink))  # type: ignore[arg-type]
    assert (loss.dtype, z.dtype) == (torch.float32, torch.float32)
    exact = F.cross_entropy(
        (x.detach() @ weight.t()).double().flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum"
    )
    assert abs(loss.item() / exact.item() - 1) < 1e-6  # bfloat16 statistics would be off by 1e-3
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert sink.dtypes == [(torch.bfloat16, torch.bfloat16)]


# ---- cut over tp ------------------------------------------------------------------------------------------------


def _on_ranks(context: Context, cases: list[Case]) -> list[Result]:
    mesh = Mesh(sizes={"tp": context.world_size})
    plan = group_plan(mesh)
    group = context.groups(mesh, plan).of(["tp"])
    return [found(case, group) for case in cases]


def cut_cases() -> list[Case]:
    """Odd vocabularies, and in the last ones ranks that hold nothing but padding."""
    cases = []
    for vocabulary, pad_to in [(37, 1), (37, 8), (64, 8), (41, 64), (3, 16), (1, 4)]:
        for sequence_parallel in (False, True):
            settings = {"vocabulary": vocabulary, "pad_to": pad_to, "sequence_parallel": sequence_parallel}
            cases += [
                Case(**settings),
                Case(**settings, smoothing=0.1, rows=5),
                Case(**settings, smoothing=0.2, keep=False, rows=1),
                Case(**settings, without_target=1.0, smoothing=0.1),
                Case(**settings, smoothing=0.1, rows=5, split=True),
            ]
    return cases


@pytest.mark.parametrize("tp", [2, 4])
def test_cut_over_tp_it_is_the_cross_entropy_with_the_same_bits_on_all_ranks(tp: int) -> None:
    cases = cut_cases()
    ranks = pool(tp).run(_on_ranks, cases)
    empty = 0
    for number, case in enumerate(cases):
        results = [rank[number] for rank in ranks]
        assert all(torch.equal(result.loss, results[0].loss) for result in results), case
        assert all(torch.equal(result.z, results[0].z) for result in results), case
        dx = torch.cat([result.dx for result in results]) if case.sequence_parallel else results[0].dx
        assert case.sequence_parallel or all(torch.equal(result.dx, dx) for result in results), case
        joined = Result(results[0].loss, results[0].z, dx, torch.cat([result.dweight for result in results]))
        same(joined, expected(case))
        empty += any(result.dweight.shape[0] == 0 for result in results)
    assert empty > 0
