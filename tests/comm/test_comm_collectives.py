"""What each collective returns, and the row it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pool import Context, pool
from ultrascale.comm import collectives, p2p
from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import group_plan

SIZES = [2, 4]


def tensor_group(context: Context) -> Group:
    mesh = Mesh(sizes={"tp": context.world_size})
    plan = group_plan(mesh)
    return context.groups(mesh, plan).of(["tp"])


def _values(context: Context) -> dict[str, Any]:
    group, rank, size = tensor_group(context), context.rank, context.world_size
    transposed = torch.arange(6.0).view(2, 3).t() + rank  # not contiguous
    largest = torch.tensor([rank, -rank])
    low = torch.full((3,), 1.5 + rank, dtype=torch.bfloat16)
    heard = torch.full((2, 2), float(rank)).t()
    uneven = [r + 1 for r in range(size)]  # member i gets i + 1 rows from everyone
    into = torch.zeros(size, 2)
    gathered = collectives.all_gather(torch.tensor([[rank, 1.0]]), group, into=into).wait()
    assert gathered is into
    return {
        "sum": collectives.all_reduce(transposed, group).wait() is transposed and transposed,
        "max": collectives.all_reduce(largest, group, op="max").wait(),
        "bf16": collectives.all_reduce(low, group).wait(),
        "scalar": collectives.all_reduce(torch.tensor(float(rank)), group).wait(),
        "gather": collectives.all_gather(torch.tensor([[rank, rank]]), group).wait(),
        "into": into,
        "scatter": collectives.reduce_scatter(torch.arange(2.0 * size) + 100 * rank, group).wait(),
        "scatter 2d": collectives.reduce_scatter(torch.ones(3, 2 * size).t() * rank, group).wait(),
        "scatter none": collectives.reduce_scatter(torch.ones(0, 3), group).wait(),
        "exchange": collectives.all_to_all(torch.arange(size) + 10 * rank, group).wait(),
        "uneven": collectives.all_to_all(torch.full((sum(uneven), 2), rank), group, uneven, [rank + 1] * size).wait(),
        "broadcast": collectives.broadcast(heard, group, source=1).wait() is heard and heard,
        "objects": collectives.gather_json({"rank": rank}, group),
    }


@pytest.mark.parametrize("size", SIZES)
def test_collectives_return_what_they_say(size: int) -> None:
    total = sum(range(size))
    for rank, got in enumerate(pool(size).run(_values)):
        expected = {
            "sum": torch.arange(6.0).view(2, 3).t() * size + total,
            "max": torch.tensor([size - 1, 0]),
            "bf16": torch.full((3,), 1.5 * size + total, dtype=torch.bfloat16),
            "scalar": torch.tensor(float(total)),
            "gather": torch.tensor([[r, r] for r in range(size)]),
            "into": torch.tensor([[r, 1.0] for r in range(size)]),
            "scatter": (torch.arange(2.0 * size) * size + 100 * total)[2 * rank : 2 * rank + 2],
            "scatter 2d": torch.full((2, 3), float(total)),
            "scatter none": torch.ones(0, 3),
            "exchange": torch.arange(size) * 10 + rank,
            "uneven": torch.tensor([[r, r] for r in range(size) for _ in range(rank + 1)]),
            "broadcast": torch.ones(2, 2),
        }
        assert got.pop("objects") == [{"rank": r} for r in range(size)]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), (name, rank, got[name])


def _rows(context: Context) -> list[Any]:
    group, size = tensor_group(context), context.world_size
    x = torch.ones(4 * size, 2, dtype=torch.float64)
    with context.ledger.during("forward"):
        pending = [collectives.all_reduce(x.clone(), group), collectives.all_gather(x, group)]
        context.ledger.mark("issued")
        for one in pending:
            one.wait()
    with context.ledger.during("backward"):
        collectives.reduce_scatter(x, group).wait()
        collectives.all_to_all(x, group).wait()
        collectives.broadcast(x, group, source=0).wait()
        collectives.barrier(group)
    return context.ledger.rows


@pytest.mark.parametrize("size", SIZES)
def test_each_call_leaves_one_row_when_it_is_issued(size: int) -> None:
    whole = 4 * size * 2 * 8
    for rows in pool(size).run(_rows):
        assert [(row.op, row.phase, row.bytes) for row in rows] == [
            ("all_reduce", "forward", 2 * whole * (size - 1) // size),
            ("all_gather", "forward", whole * (size - 1)),
            ("mark", "forward", 0),
            ("reduce_scatter", "backward", whole * (size - 1) // size),
            ("all_to_all", "backward", whole * (size - 1) // size),
            ("broadcast", "backward", whole),
            ("barrier", "backward", 0),
        ]
        assert [row.sequence for row in rows] == list(range(7))
        assert {row.axes for row in rows if row.op != "mark"} == {("tp",)}
        assert rows[0].shape == (4 * size, 2)
        assert rows[0].dtype == "float64"


def _refused(context: Context) -> list[str]:
    group = tensor_group(context)
    peer = 1 - context.rank
    calls = [
        lambda: collectives.reduce_scatter(torch.ones(5, 3), group),
        lambda: collectives.all_to_all(torch.ones(5), group),
        lambda: collectives.all_to_all(torch.ones(5), group, [3, 3]),
        lambda: collectives.all_gather(torch.tensor(1.0), group),
        lambda: collectives.all_gather(torch.ones(2), group, into=torch.ones(3)),
        lambda: collectives.broadcast(torch.ones(2), group, source=2),
        lambda: collectives.deterministic_all_reduce(torch.ones(2, 2), group),
        lambda: p2p.send(torch.ones(2), group, context.rank, tag=0),
        lambda: p2p.send(torch.ones(2), group, peer, tag=-1),
        lambda: p2p.receive(torch.ones(2, 3).t(), group, peer, tag=0),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    assert context.ledger.rows == []
    return messages


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    messages = pool(2).run(_refused)[0]
    assert "dim 0 of (5, 3) does not divide by the 2 members; use 4 or 6 rows" in messages[0]
    assert "use 4 or 6 rows" in messages[1]
    assert "[3, 3]" in messages[2]
    assert "tensor.view(1)" in messages[3]
    assert "(3,)" in messages[4]
    assert "source 2" in messages[5]
    assert "flat" in messages[6]
    assert "member 0" in messages[7]
    assert "tag -1" in messages[8]
    assert "not contiguous" in messages[9]


def _crossing(context: Context) -> tuple[list[float], list[Any]]:
    """Both ranks send 4 MB before either receives, and the receives are posted in the other order."""
    group, peer = tensor_group(context), 1 - context.rank
    large = torch.full((1 << 20,), 1.0 + context.rank)
    small = torch.full((3,), 10.0 + context.rank)
    sends = [p2p.send(large, group, peer, tag=5), p2p.send(small, group, peer, tag=6)]
    two, one = torch.empty(3), torch.empty(1 << 20)
    received = [p2p.receive(two, group, peer, tag=6), p2p.receive(one, group, peer, tag=5)]
    values = [pending.wait()[-1].item() for pending in received]
    for pending in sends:
        pending.wait()
    return values, context.ledger.rows


def test_messages_cross_without_deadlock_and_are_told_apart_by_their_tags() -> None:
    for rank, (values, rows) in enumerate(pool(2).run(_crossing)):
        assert values == [10.0 + (1 - rank), 1.0 + (1 - rank)]
        assert [(row.op, row.bytes) for row in rows] == [
            ("send", 4 << 20),
            ("send", 12),
            ("receive", 0),
            ("receive", 0),
        ]
        assert rows[0].note == f"to {1 - rank} tag 5"


def _waits_twice(context: Context) -> bool:
    pending = collectives.all_reduce(torch.ones(4), tensor_group(context))
    first = pending.wait()
    return pending.wait() is first and first[0].item() == context.world_size


def test_waiting_again_changes_nothing() -> None:
    assert pool(2).run(_waits_twice) == [True, True]


def test_groups_are_equal_by_axes_and_ranks() -> None:
    one = Group(("tp",), (0, 1), 0, None, ledger=None)  # type: ignore[arg-type]
    other = Group(("tp",), (0, 1), 1, None, ledger=None)  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)
    assert one != Group(("dp",), (0, 1), 0, None, ledger=None)  # type: ignore[arg-type]
    assert one.size == 2
