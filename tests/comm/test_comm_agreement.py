"""Long work of one rank: the others wait in calls that are each short, and what goes wrong goes wrong for all."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest

from pool import Context, pool
from small import config_of
from ultrascale.assembly import planned_groups
from ultrascale.comm import agreement
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.mesh.axes import Mesh

MINUTE = 60.0


class Refused(Exception):
    pass


def test_work_that_takes_long_is_waited_for_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, enough = [], Event()
    original = agreement.gather_json

    def counted(value: Any, group: Group) -> list[Any]:
        calls.append(value)
        if len(calls) == 3:
            enough.set()
        return original(value, group)

    monkeypatch.setattr(agreement, "gather_json", counted)
    agreement.alone(lambda: enough.wait(MINUTE), Group((), (0,), 0, None, Ledger()), Refused, seconds=0.001)
    assert enough.is_set()
    assert len(calls) >= 4


def fails_on_rank_0(context: Context, worked: str) -> str:
    config = config_of({"parallel.dp": 2}, 2)
    mesh = Mesh.of(config)
    groups = context.groups(mesh, planned_groups(config, mesh))
    done: list[int] = []

    def work() -> None:
        done.append(context.rank)
        if worked == "no":
            raise ValueError("the disk is full")

    try:
        agreement.alone(work, groups.world, Refused, seconds=MINUTE)
    except Refused as error:
        return f"{done}: {error}"
    return f"{done}"


def test_the_first_rank_works_alone_and_its_failure_is_everybody_s() -> None:
    assert pool(2).run(fails_on_rank_0, "yes") == ["[0]", "[]"]
    assert pool(2).run(fails_on_rank_0, "no") == ["[0]: the disk is full", "[]: the disk is full"]
