"""The deterministic reduction does not see how a buffer is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm_collectives import tensor_group

from pool import Context, pool
from ultrascale.comm.collectives import DeterministicSum, deterministic_all_reduce
from ultrascale.comm.ledger import ring_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def _buffer(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * numel + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    scales = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)  # so that the order of a sum shows
    return (values * scales).to(dtype)


def _whole_and_cut(
    context: Context, numel: int, cuts: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, int]:
    group = tensor_group(context)
    whole = _buffer(context.rank, numel, dtype)
    cut = whole.clone()
    deterministic_all_reduce(whole, group).wait()
    sent = sum(row.bytes for row in context.ledger.rows)
    edges = [0, *sorted(cut_at % (numel + 1) for cut_at in cuts), numel]
    pending = [deterministic_all_reduce(cut[start:stop], group) for start, stop in pairwise(edges)]
    for one in pending:
        one.wait()
    return whole, cut, sent


@pytest.mark.parametrize("size", [2, 4])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    numel=st.integers(1, 9) | st.integers(10, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=4),
    dtype=st.sampled_from(DTYPES),
)
def test_the_sum_is_bitwise_the_same_however_the_buffer_is_cut(
    size: int, numel: int, cuts: list[int], dtype: torch.dtype
) -> None:
    expected = _buffer(0, numel, dtype)
    for rank in range(1, size):
        expected = expected + _buffer(rank, numel, dtype)
    padded = -(-numel // size) * size
    for whole, cut, sent in pool(size).run(_whole_and_cut, numel, cuts, dtype):
        assert torch.equal(whole, expected), "not the sum in rank order"
        assert torch.equal(cut, expected), "depends on the cuts"
        assert sent == ring_bytes("all_reduce", padded * dtype.itemsize, size)


def _phases(context: Context) -> list[tuple[str, str]]:
    group = tensor_group(context)
    buffers = [torch.ones(7), torch.ones(8)]
    with context.ledger.during("issue"):
        pending = [deterministic_all_reduce(buffer, group) for buffer in buffers]
    with context.ledger.during("advance"):
        for one in pending:
            assert isinstance(one, DeterministicSum)
            one.advance()
    with context.ledger.during("wait"):
        for one, buffer in zip(pending, buffers, strict=True):
            assert one.wait() is buffer
            assert buffer.tolist() == [2.0] * buffer.numel()
    return [(row.op, row.phase) for row in context.ledger.rows]


def test_the_first_exchange_is_issued_at_once_and_the_second_on_demand() -> None:
    rows = pool(2).run(_phases)[0]
    assert rows == [("all_to_all", "issue")] * 2 + [("all_gather", "advance")] * 2
