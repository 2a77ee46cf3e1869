"""Processes that share out reading and writing, within a bound of memory. Needs no torch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TypeVar

from ultrascale.checkpoint.boxes import CheckpointError

Result = TypeVar("Result")

LEAST_BYTES = 8 << 20
"""Of memory that one process works in: blocks, and what reading and hashing them takes."""

_BUFFERS = 8
"""Copies of a block that are held at once, at most: as read, as rows, as numbers, rounded, as written."""


class Workers:
    """So many processes, started when they are first needed; one is this process itself.

    memory    bytes of buffers over all of them
    """

    def __init__(self, processes: int, memory: int) -> None:
        if processes < 1:
            raise CheckpointError(f"--processes {processes}: use 1 or more")
        if memory < processes * LEAST_BYTES:
            raise CheckpointError(
                f"--memory {memory} is too little for {processes} process{'es' if processes > 1 else ''}, which need "
                f"{LEAST_BYTES} bytes each; use {processes * LEAST_BYTES} or more"
            )
        self.block_bytes = memory // processes // _BUFFERS
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # A fresh interpreter: a fork would carry torch's threads and memory along.
            self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))

    def run(self, work: Callable[..., Result], tasks: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Result]]:
        """(number of the task, its result), as they are done. `work` is a function of a module's top level."""
        if self._pool is None:
            for number, task in enumerate(tasks):
                yield number, work(*task)
            return
        futures: dict[Future[Result], int] = {}
        try:
            futures = {self._pool.submit(work, *task): number for number, task in enumerate(tasks)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise CheckpointError("a process that was reading or writing was killed; perhaps for its memory") from error
        finally:
            for future in futures:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
