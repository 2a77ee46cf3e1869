"""Two computations that take turns at their collectives, so that what one waits for hides behind the other.

Only one of the two runs at any time. It goes on until it has to wait for a collective, and then the other goes on; so
the order in which calls are issued is the program's alone, the same on all ranks whatever the network does, and no
line of a model has to know of it. On a GPU the one that goes on fills the compute stream while the collective of the
one that waits runs on its own: attention of one micro-batch over the all-to-all of another (DeepSeek-V3 2024, §3.2.1).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from ultrascale.comm.ledger import Ledger


def take_turns(ledger: Ledger, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Runs both to their ends, `first` first; every wait on a group of this ledger hands the turn over.

    `first` runs in the calling thread. Raises what either raised; the other is then ended at its next turn, since what
    it would issue no longer stands where the other ranks issue theirs, and would only wait for them.
    """
    assert ledger.before_wait is None, "pairs do not nest"
    turns = _Turns(ledger)
    phase = ledger.phase
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    errors: list[BaseException] = []

    def run(index: int, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)
            turns.failed = True
        finally:
            turns.end(index)

    def aside() -> None:
        turns.begin(1)
        ledger.phase = phase
        # A new thread starts on the first device and its default stream.
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            run(1, second if not turns.failed else lambda: None)

    thread = threading.Thread(target=aside, name="second of a pair")
    thread.start()
    ledger.before_wait = turns.hand_over
    try:
        run(0, first)
        thread.join()
    finally:
        ledger.before_wait, ledger.phase = None, phase
    if errors:
        raise errors[0]


class _Abandoned(Exception):
    """Ends the one of a pair whose other has failed; never seen outside of it."""


class _Turns:
    """Whose turn it is. The one that runs may change threads (autograd has one of its own for each GPU)."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.failed = False
        """Whether one of the two has raised."""
        self._running = 0
        self._ended = [False, False]
        self._go = (threading.Semaphore(0), threading.Semaphore(0))

    def begin(self, index: int) -> None:
        """Waits for the first turn."""
        self._go[index].acquire()

    def hand_over(self) -> None:
        """The one that runs is about to wait: lets the other run until it waits too, or ends."""
        own = self._running
        if self.failed:
            raise _Abandoned
        if self._ended[1 - own]:
            return
        phase = self.ledger.phase
        self._running = 1 - own
        self._go[1 - own].release()
        self._go[own].acquire()
        if self.failed:
            raise _Abandoned
        self.ledger.phase = phase

    def end(self, index: int) -> None:
        """The one that runs has ended: the other runs on alone."""
        self._ended[index] = True
        if not self._ended[1 - index]:
            self._running = 1 - index
            self._go[1 - index].release()
