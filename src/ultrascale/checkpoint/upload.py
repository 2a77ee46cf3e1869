"""Copies whole checkpoints to storage beside training, one at a time. Needs no torch.

One is copied and at most one waits: where storage is slower than saves, the one that waits gives way to a newer one,
unless it is kept for good. A copy that fails, also after some more attempts, is said; training and local saves go on,
and the next checkpoint is tried afresh.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.folder import step_of
from ultrascale.checkpoint.storage import Storage


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened to a checkpoint: a line of events.jsonl, and a notice for people where there is one."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    notice: str = ""


class GivenUp(BaseException):
    """The run ends, and does not wait for storage any more."""


class Uploads:
    """Takes whole local checkpoints and puts them on storage, in a thread of its own.

    tell   called with what happened, from that thread
    """

    def __init__(self, url: str, keep: int | None, keep_every: int | None, tell: Callable[[News], None]) -> None:
        self.storage = Storage(url, pause=self._pause)
        self._keep, self._keep_every, self._tell = keep, keep_every, tell
        self._waiting: list[Path] = []
        self._current: Path | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, folder: Path) -> None:
        """A checkpoint that is whole now."""
        with self._changed:
            for older in [f for f in self._waiting if not self._is_milestone(f)]:
                self._waiting.remove(older)
                notice = (
                    f"storage is slower than saves: step {step_of(older)} is passed over for step {step_of(folder)}"
                )
                self._tell(News("upload_skipped", {"step": step_of(older)}, notice))
            self._waiting.append(folder)
            if self._thread is None:
                # A daemon: a process that is to end does not wait for storage, which is whole at every instant.
                self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def pending(self) -> list[str]:
        """Names of the checkpoints that are being copied, or wait: they must not be removed."""
        with self._changed:
            return [folder.name for folder in (self._current, *self._waiting) if folder is not None]

    def wait(self) -> None:
        """Returns when nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed.is_set() or not (self._waiting or self._current))

    def close(self) -> None:
        """Begins nothing more, and breaks off what waits for another attempt."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def _is_milestone(self, folder: Path) -> bool:
        return self._keep_every is not None and step_of(folder) % self._keep_every == 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or bool(self._waiting))
                if self._closed.is_set():
                    return
                self._current = self._waiting.pop(0)
            try:
                self._one(self._current)
            except GivenUp:
                return
            finally:
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _one(self, folder: Path) -> None:
        begun, step = time.perf_counter(), step_of(folder)
        try:
            if self.storage.put(folder):
                seconds = time.perf_counter() - begun
                self._tell(News("upload", {"step": step, "path": f"{self.storage}/{folder.name}", "seconds": seconds}))
        except Exception as error:  # of any filesystem
            notice = f"step {step} is not on storage: {error}; it is saved in {folder}"
            self._tell(News("upload_failed", {"step": step, "reason": str(error)}, notice))
            return
        try:
            self.storage.retain(self._keep, self._keep_every)
        except Exception as error:
            self._tell(News("checkpoint_not_removed", {"reason": str(error)}, f"an old checkpoint stays: {error}"))

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise GivenUp
