"""What is asked of a run while it goes on: to stop, or to save. Noted when it comes, agreed on at the end of a step.

SIGTERM, SIGUSR1 (what launchers send ahead of a time limit) and SIGINT ask to stop with a checkpoint saved, SIGUSR2 to
save and go on; `checkpoint.every_minutes` asks to save by the clock of one rank. Needs no torch.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

SAME_SIGNAL_SECONDS = 5.0


class Wishes:
    """Of one rank.

    every_minutes   between two saves; None: this rank's clock asks for none
    """

    def __init__(self, every_minutes: float | None) -> None:
        self.every_minutes = every_minutes
        self.stop = False
        self._asked_at = 0.0
        self._save, self._saved_at = False, time.monotonic()
        self._handlers: dict[int, Any] = {}

    def listen(self) -> None:
        """Takes the signals over."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self.on_stop_signal)
        self._handlers[signal.SIGUSR2] = signal.signal(signal.SIGUSR2, self.on_save_signal)

    def let_go(self) -> None:
        """Gives the signals back.

        A signal handler would keep this object, and what holds it, alive until the interpreter is torn down.
        """
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def save(self) -> bool:
        """Whether a signal has asked to save, or it is time."""
        minutes = self.every_minutes
        return self._save or (minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes)

    def saved(self) -> None:
        """It was saved: the clock starts anew."""
        self._save, self._saved_at = False, time.monotonic()

    def on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        """A later second one ends the process at once.

        Launchers pass a signal on and send it themselves too: what comes at the same time is the same wish.
        """
        now = time.monotonic()
        if self.stop and now - self._asked_at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        if not self.stop:
            self.stop, self._asked_at = True, now

    def on_save_signal(self, number: int, frame: FrameType | None) -> None:
        """Noted like a stop; the run goes on."""
        self._save = True
