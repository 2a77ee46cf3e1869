"""Two computations that take turns at their collectives."""

from __future__ import annotations

import pytest
import torch

from pool import Context, pool
from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.turns import take_turns
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import group_plan

MESH = Mesh(sizes={"tp": 2})


class Work:
    """A collective that is done at once."""

    def wait(self) -> None:
        pass


def waiting(ledger: Ledger, told: list[str], name: str, waits: int) -> None:
    with ledger.during(name):
        for number in range(waits):
            told.append(f"{name} issues {number}")
            Pending(torch.zeros(1), Work(), ledger=ledger).wait()  # type: ignore[arg-type]
            told.append(f"{name} has {number}")
            assert ledger.phase == name


def test_each_runs_on_while_the_other_waits() -> None:
    ledger, told = Ledger(), []
    take_turns(ledger, lambda: waiting(ledger, told, "f", 2), lambda: waiting(ledger, told, "b", 3))
    assert told == [
        "f issues 0",
        "b issues 0",
        *("f has 0", "f issues 1"),
        *("b has 0", "b issues 1"),
        "f has 1",
        *("b has 1", "b issues 2", "b has 2"),  # nothing is left to hide it behind
    ]
    assert ledger.phase == ""
    assert ledger.before_wait is None


@pytest.mark.parametrize("waits", [(0, 0), (0, 2), (2, 0)])
def test_one_that_never_waits_leaves_the_other_alone(waits: tuple[int, int]) -> None:
    ledger, told = Ledger(), []
    take_turns(ledger, lambda: waiting(ledger, told, "f", waits[0]), lambda: waiting(ledger, told, "b", waits[1]))
    assert len(told) == 2 * sum(waits)


@pytest.mark.parametrize(("failing", "told"), [("f", 3), ("b", 5)])
def test_what_one_raises_comes_out_and_the_other_waits_for_nothing_more(failing: str, told: int) -> None:
    ledger, said = Ledger(), []

    def run(name: str) -> None:
        waiting(ledger, said, name, 1)
        if name == failing:
            raise ValueError(name)
        waiting(ledger, said, name, 1)

    with pytest.raises(ValueError, match=failing):
        take_turns(ledger, lambda: run("f"), lambda: run("b"))
    assert len(said) == told, said
    assert ledger.before_wait is None
    take_turns(ledger, lambda: run("x"), lambda: run("y"))  # what failed leaves nothing behind


def test_both_may_wait_for_one_call() -> None:
    """As when a forward and a backward need the same gathered weights."""
    ledger = Ledger()
    pending = Pending(torch.ones(1), Work(), ledger=ledger)  # type: ignore[arg-type]
    got: list[torch.Tensor] = []
    take_turns(ledger, lambda: got.append(pending.wait()), lambda: got.append(pending.wait()))
    assert len(got) == 2
    assert got[0] is got[1]


def _reduce(group: Group, start: float, out: list[float]) -> None:
    for number in range(3):
        tensor = torch.full((4,), start + number + group.index, dtype=torch.float64)
        out.append(float(collectives.all_reduce(tensor, group).wait()[0]))


def _on_ranks(context: Context) -> tuple[list[float], list[float], list[tuple[str, str]]]:
    group = context.groups(MESH, group_plan(MESH)).of(["tp"])
    first: list[float] = []
    second: list[float] = []

    def phase(name: str, start: float, out: list[float]) -> None:
        with group.ledger.during(name):
            _reduce(group, start, out)

    take_turns(group.ledger, lambda: phase("f", 10, first), lambda: phase("b", 100, second))
    return first, second, [(row.phase, row.op) for row in group.ledger.rows]


def test_ranks_issue_in_one_order_and_get_their_own_results() -> None:
    for first, second, rows in pool(2).run(_on_ranks):
        assert first == [21.0, 23.0, 25.0]
        assert second == [201.0, 203.0, 205.0]
        assert rows == [("f", "all_reduce"), ("b", "all_reduce")] * 3
