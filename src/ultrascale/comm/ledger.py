"""The ledger: one row for every call that crosses ranks. Needs no torch.

It is what proves which collectives a layer makes, what `ledger.json` and the planner's measured column are
summed from, and where a look at a hang begins: the last rows of two ranks say which call one of them did not
make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One call, as one rank issued it.

    sequence   number of the call on this ledger, from 0; goes on over `clear()`
    axes       axes of the group, those of size 1 left out
    op         all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive, barrier, mark
    phase      the ledger's phase when the call was issued
    shape      of the tensor that was handed in
    dtype      torch's name of its dtype, without `torch.`
    bytes      what this rank sends on the wire in the ring form, whatever the backend does; see `ring_bytes`
    note       the name of a mark; peer and tag of a message
    """

    sequence: int
    axes: tuple[str, ...]
    op: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    note: str = ""


class Ledger:
    """Rows in the order in which the calls were issued."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.phase = ""
        self.before_wait: Callable[[], None] | None = None
        """Called before a call is awaited: what else could run meanwhile (`comm/turns.py`)."""
        self._sequence = count()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Rows written inside carry this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def record(
        self, axes: tuple[str, ...], op: str, shape: tuple[int, ...], dtype: str, bytes: int, note: str = ""
    ) -> Row:
        """Writes one row under the current phase."""
        row = Row(next(self._sequence), axes, op, self.phase, shape, dtype, bytes, note)
        self.rows.append(row)
        return row

    def mark(self, name: str) -> None:
        """Writes a row that is no call (`note` is the name), to tell what was issued before this moment."""
        self.record((), "mark", (), "", 0, name)

    def clear(self) -> None:
        """Drops the rows. Sequence numbers go on, so that rows of two ranks can still be compared."""
        self.rows.clear()

    def summary(self) -> list[dict[str, Any]]:
        """Calls and bytes by (axes, op, phase), in order of first appearance; marks left out."""
        totals: dict[tuple[tuple[str, ...], str, str], list[int]] = {}
        for row in self.rows:
            if row.op != "mark":
                total = totals.setdefault((row.axes, row.op, row.phase), [0, 0])
                total[0] += 1
                total[1] += row.bytes
        return [
            {"axes": axes, "op": op, "phase": phase, "calls": calls, "bytes": sent}
            for (axes, op, phase), (calls, sent) in totals.items()
        ]


def ring_bytes(op: str, total: int, size: int) -> int:
    """Bytes that one of `size` ranks sends in the ring form of a collective, rounded up.

    total   bytes of the whole: the tensor of an all_reduce, the input of a reduce_scatter or all_to_all, the
            output of an all_gather, the tensor of a broadcast
    The ring's bounds: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """
    if op == "broadcast":
        return total
    trips = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}[op]
    return -(-trips * total * (size - 1) // size)
