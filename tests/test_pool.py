"""The worker pools that the parallel tests stand on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pool as pools
from pool import CellError, CellTimeout, Context, pool
from ultrascale.comm import collectives
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import group_plan


def _world(context: Context) -> Any:
    mesh = Mesh(sizes={"dp": context.world_size})
    plan = group_plan(mesh)
    return context.groups(mesh, plan).world


def _who(context: Context, *args: Any) -> tuple[Any, ...]:
    return context.rank, context.world_size, os.getpid(), torch.get_num_threads(), args


def test_results_come_back_by_rank_from_workers_that_live_on() -> None:
    first = pool(4).run(_who, "argument", torch.ones(2))
    assert [rank for rank, *_ in first] == [0, 1, 2, 3]
    assert all(size == 4 and threads == 1 for _, size, _, threads, _ in first)
    assert all(args[0] == "argument" and torch.equal(args[1], torch.ones(2)) for *_, args in first)
    assert [pid for _, _, pid, _, _ in pool(4).run(_who)] == [pid for _, _, pid, _, _ in first]


def test_workers_of_an_idle_pool_take_no_time() -> None:
    pids = [pid for _, _, pid, _, _ in pool(2).run(_who)]
    deadline = time.monotonic() + 10

    def states() -> set[str]:
        return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}

    while states() != {"T"} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert states() == {"T"}  # stopped
    assert [pid for _, _, pid, _, _ in pool(2).run(_who)] == pids


def _disturb(context: Context) -> int:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    collectives.all_reduce(torch.ones(1), _world(context)).wait()
    return len(context.ledger.rows)


def _undisturbed(context: Context) -> tuple[torch.dtype, bool, int, float]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), len(context.ledger.rows), torch.rand(1).item()


def test_a_cell_does_not_reach_the_next_one() -> None:
    assert pool(2).run(_disturb) == [1, 1]
    seen = pool(2).run(_undisturbed)
    assert [one[:3] for one in seen] == [(torch.float32, True, 0)] * 2
    assert pool(2).run(_undisturbed) == seen


def _one_fails(context: Context) -> None:
    if context.rank == 1:
        print("said before")
        raise RuntimeError("this rank is broken")
    collectives.all_reduce(torch.ones(3), _world(context)).wait()


def test_a_failure_names_its_rank_and_the_next_cell_has_a_new_pool() -> None:
    old = pool(2)
    with pytest.raises(CellError) as caught:
        old.run(_one_fails)
    rank, text = caught.value.failures[0]
    assert rank == 1
    assert "this rank is broken" in text
    assert "in _one_fails" in text
    assert "said before" in text
    assert not old.alive
    assert len(pool(2).run(_who)) == 2


def _one_sleeps(context: Context) -> None:
    world = _world(context)
    if context.rank == 1:
        time.sleep(60)
    collectives.all_reduce(torch.ones(3), world).wait()


def test_a_hang_ends_at_the_limit_and_says_where_each_rank_stood() -> None:
    start = time.monotonic()
    with pytest.raises(CellTimeout) as caught:
        pool(2).run(_one_sleeps, timeout=1)
    assert time.monotonic() - start < 5
    stood = dict(caught.value.failures)
    assert "in _one_sleeps" in stood[1]
    assert "in wait" in stood[0]


def _one_dies(context: Context) -> None:
    if context.rank == 1:
        os._exit(7)
    collectives.all_reduce(torch.ones(3), _world(context)).wait()


def test_a_worker_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(CellError) as caught:
        pool(2).run(_one_dies)
    assert (1, "the process ended, exit code 7") in caught.value.failures


def _many_meshes(context: Context) -> int:
    for number in range(pools.CACHED_MESHES + 3):
        mesh = Mesh(sizes={"dp": 2}, factors={"tp": ((f"part{number}", 1),)})
        plan = group_plan(mesh)
        total = collectives.all_reduce(torch.ones(1), context.groups(mesh, plan).of(["dp"])).wait()
        assert total.item() == 2
    return len(context._cache)


def test_the_groups_kept_are_bounded() -> None:
    assert pool(2).run(_many_meshes) == [pools.CACHED_MESHES] * 2


def test_only_the_sizes_that_tests_are_written_for_exist() -> None:
    with pytest.raises(ValueError, match="2, 4 and 8"):
        pool(3)
