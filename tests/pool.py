"""Pools of worker processes for tests that need several ranks.

    result = pool(4).run(function, *args)     # function(rank_context, *args) on four ranks → a list of four
    results

Importing torch costs seconds per process, so the workers of a pool are forked from a server that has imported
it, and live until the end of the test run; between cells they sleep on a pipe. A pool that failed or ran out
of time is killed, and the next call starts a new one: after a failure nothing is known about what the other
ranks are waiting for.

`function` must be importable from its module's top level; arguments and results are pickled (tensors too, by
value).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ultrascale.comm.process_groups import Groups
    from ultrascale.mesh.axes import Mesh
    from ultrascale.mesh.groups import GroupSpec

# Before the server starts, which inherits them: two cores cannot feed a thread pool per process.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Imported once, in the server. pytest too, because the workers look at the main module of the test run.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # torch imports it, and 800 modules with it, at the first recomputation
    "numpy",
    "pytest",
    "ultrascale.comm.collectives",
    "ultrascale.comm.differentiable",
    "ultrascale.comm.p2p",
    "ultrascale.comm.process_groups",
    # Imported as they come to be; the server passes over those that are not there.
    "ultrascale.config.schema",
    "ultrascale.assembly",
    "ultrascale.kernels.attention",
    "ultrascale.kernels.reference",
    "ultrascale.models.llama",
    "ultrascale.trainer",
]
START_SECONDS = 60.0
CELL_SECONDS = 60.0
CACHED_MESHES = 4  # more would leave hundreds of sockets and threads behind, which wake a hundred times a second


class CellError(AssertionError):
    """A cell failed: what each rank that failed said, the first to fail first."""

    def __init__(self, headline: str, failures: list[tuple[int, str]]) -> None:
        self.failures = failures
        reports = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in failures]
        super().__init__("\n".join([headline, *reports]))


class CellTimeout(CellError):
    """A cell ran out of time: where each rank that had not finished stood."""


class Context:
    """What a cell's function is given on each rank."""

    def __init__(self, rank: int, world_size: int, cache: OrderedDict[Any, Groups]) -> None:
        from ultrascale.comm.ledger import Ledger

        self.rank = rank
        self.world_size = world_size
        self.ledger = Ledger()  # of this cell; the groups write to it
        self._cache = cache

    def groups(self, mesh: Mesh, plan: tuple[GroupSpec, ...]) -> Groups:
        """The groups of a mesh, made on first use and kept for later cells; every rank asks for the same."""
        from ultrascale.comm.process_groups import create

        key = (mesh, plan)
        if key not in self._cache:
            self._cache[key] = create(mesh, plan, self.ledger)
            if len(self._cache) > CACHED_MESHES:  # all ranks saw the same meshes, so they drop the same one
                self._cache.popitem(last=False)[1].destroy()
        self._cache.move_to_end(key)
        return self._cache[key].with_ledger(self.ledger)


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    outcome: tuple[bool, Any] | None = field(default=None)  # (True, result) or (False, text)


class Pool:
    """`size` workers with one gloo process group over all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="ultrascale-pool-"))
        self._workers: list[_Worker] = []
        multiprocessing = forking()
        for rank in range(size):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=_work, args=(rank, size, theirs, str(self._folder)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        try:
            # Rank 0 picks a free port for the store, and the others are told.
            self._collect(self._workers[:1], "starting", START_SECONDS)
            self._send(self._workers[1:], self._workers[0].outcome and self._workers[0].outcome[1])
            self._collect(self._workers, "starting", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = CELL_SECONDS) -> list[Any]:
        """Runs `function(rank_context, *args)` on every rank and returns the results by rank.

        timeout   seconds for the cell
        Raises CellError with the tracebacks of the ranks that failed, CellTimeout with where the ranks stood.
        """
        name = f"{function.__module__}.{function.__qualname__}"
        self._signal(signal.SIGCONT)
        try:
            # The workers started before this test's folder was on the path.
            self._send(self._workers, (list(sys.path), pickle.dumps((function, args))))
            self._collect(self._workers, name, timeout)
        except BaseException:
            self.close()
            raise
        # A thread of gloo's for each group looks up a hundred times a second: idle pools would take half of two cores.
        self._signal(signal.SIGSTOP)
        return [worker.outcome[1] if worker.outcome else None for worker in self._workers]

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                os.kill(worker.process.pid, number)

    def close(self) -> None:
        """Ends the workers."""
        self.alive = False
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, workers: list[_Worker], message: Any) -> None:
        payload = pickle.dumps(message)  # not Connection.send: that would pass tensors through shared memory
        for worker in workers:
            # A worker that has died is reported by _collect, with what it said last.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.pipe.send_bytes(payload)

    def _collect(self, workers: list[_Worker], name: str, timeout: float) -> None:
        """Waits for the outcome of each of these workers."""
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self._workers))
        waiting = {rank: worker for rank, worker in waiting.items() if worker in workers}
        for worker in workers:
            worker.outcome = None
        failures: list[tuple[int, str]] = []
        while waiting:
            pipes = {worker.pipe: rank for rank, worker in waiting.items()}
            ready = connection.wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                worker = waiting.pop(rank)
                try:
                    worker.outcome = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    worker.process.join(5)
                    worker.outcome = (False, f"the process ended, exit code {worker.process.exitcode}")
                if not worker.outcome[0]:
                    failures.append((rank, worker.outcome[1] + self._said(rank)))
                    # The others may wait for this rank for ever; those that fail too do so soon.
                    deadline = min(deadline, time.monotonic() + 0.5)
        if failures:
            ranks = ", ".join(str(rank) for rank, _ in failures)
            stuck = f"; rank {', '.join(map(str, waiting))} did not finish" if waiting else ""
            raise CellError(f"{name}: rank {ranks} of {self.size} failed{stuck}", failures)
        if waiting:
            stood = [(rank, self._stack(rank) + self._said(rank)) for rank in waiting]
            ranks = ", ".join(map(str, waiting))
            raise CellTimeout(f"{name}: rank {ranks} of {self.size} not done after {timeout:g} s", stood)

    def _stack(self, rank: int) -> str:
        """Where a worker stands, from its fault handler, which works inside a collective too."""
        file = self._folder / f"{rank}.stack"
        os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.05)
            if file.exists() and file.stat().st_size:
                break
        return file.read_text() if file.exists() else ""

    def _said(self, rank: int) -> str:
        """The end of what a worker printed."""
        file = self._folder / f"{rank}.log"
        lines = file.read_text(errors="replace").splitlines()[-30:] if file.exists() else []
        return "\n".join(["", "printed:", *lines]) if lines else ""


_pools: dict[int, Pool] = {}


def pool(size: int) -> Pool:
    """The pool of this size, started when it is first asked for."""
    if size not in (2, 4, 8):
        raise ValueError(f"there are pools of 2, 4 and 8 processes, not of {size}")
    if size not in _pools or not _pools[size].alive:
        _pools[size] = Pool(size)
    return _pools[size]


def close_pools() -> None:
    """Ends all pools."""
    for started in _pools.values():
        started.close()
    _pools.clear()


def forking() -> Any:
    """The multiprocessing context whose processes are forked from the server that has imported torch."""
    os.environ.update(THREADS)
    context = get_context("forkserver")
    context.set_forkserver_preload([name for name in PRELOAD if _exists(name)])
    return context


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# In the worker


def _work(rank: int, size: int, pipe: connection.Connection, folder: str) -> None:
    """The life of a worker."""
    _die_with_parent()
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115 - for as long as the process lives
    stack = open(f"{folder}/{rank}.stack", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo looks the host's name up

    import torch

    # Nothing of what the server imported will ever be garbage, and looking through it takes a quarter of a second.
    gc.freeze()
    torch.set_num_threads(1)
    with contextlib.suppress(RuntimeError):  # may be set once only
        torch.set_num_interop_threads(1)
    if not _answer(pipe, lambda: _join(rank, size, pipe)):
        return
    cache: OrderedDict[Any, Groups] = OrderedDict()
    while True:
        try:
            path, cell = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        sys.path.extend(entry for entry in path if entry not in sys.path)
        # What a cell may have changed must not reach the next one.
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if not _answer(pipe, lambda cell=cell: _call(cell, Context(rank, size, cache))):  # type: ignore[misc]
            return


def _join(rank: int, size: int, pipe: connection.Connection) -> None:
    """Joins the process group that all workers of the pool share."""
    import torch.distributed as dist

    wait = timedelta(seconds=START_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=wait, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps((True, store.port)))
    else:
        port = pickle.loads(pipe.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=wait)
    # Longer than a cell's limit, so that the pool reports a hang with its stack, and not gloo with a closed
    # socket.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(hours=1))


def _call(cell: bytes, context: Context) -> Any:
    function, args = pickle.loads(cell)
    return function(context, *args)


def _answer(pipe: connection.Connection, action: Callable[[], Any]) -> bool:
    """Sends what an action returns, or its traceback; False when it failed."""
    try:
        payload = pickle.dumps((True, action()))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        # The pool kills this process. Leaving by itself would close its connections, and the other ranks
        # would then report that and not what they were doing.
        time.sleep(30)
        return False
    pipe.send_bytes(payload)
    return True


def _die_with_parent() -> None:
    """Asks Linux to kill this process when the server that forked it ends, as it does with the test run."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
