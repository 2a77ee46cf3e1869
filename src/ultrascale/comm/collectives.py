"""Collectives on a `Group`: issued at once, finished by `Pending.wait()`, written to the ledger when issued.

All work on dim 0, on any device. A group of one rank returns its input at once and writes no row. Collectives
of one group run in the order in which they were issued, so all members must issue them in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger, ring_bytes

# torch renamed these two; the old names still work on new releases but warn, and old releases lack the new ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending:
    """A call under way. It holds the tensors that it reads and writes; leave them alone until `wait`."""

    __slots__ = ("_finish", "_kept", "_ledger", "_result", "_work")

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None = None,
        kept: tuple[Tensor, ...] = (),
        finish: Callable[[], Tensor] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._ledger = ledger
        self._result = result
        self._work = work
        self._kept = kept
        self._finish = finish

    @property
    def unfinished(self) -> Tensor:
        """The tensor that the result comes into: not to be read or written before `wait`."""
        return self._result

    def wait(self) -> Tensor:
        """The result, once it is there; on CUDA, once the current stream is ordered behind it.

        May be called again: it then returns the same tensor.
        """
        work = self._work
        if work is not None:
            if self._ledger is not None and self._ledger.before_wait is not None:
                self._ledger.before_wait()  # what runs meanwhile may wait for this call too
            work.wait()
            self._work = None
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        self._kept = ()
        return self._result


class Nothing(Pending):
    """No call: `wait` takes the turn of one, and returns a tensor without elements.

    Where two computations take turns (`comm/turns.py`), what is issued next hangs on how often each has waited; so
    ranks that have different messages to exchange wait equally often.
    """

    __slots__ = ()

    def __init__(self, group: Group) -> None:
        super().__init__(torch.empty(0), ledger=group.ledger)

    def wait(self) -> Tensor:
        if self._ledger is not None and self._ledger.before_wait is not None:
            self._ledger.before_wait()
        return self._result


def all_reduce(tensor: Tensor, group: Group, op: Literal["sum", "max"] = "sum") -> Pending:
    """Sums (or takes the largest of) a tensor of any shape over the group, in place."""
    if group.size == 1:
        return Pending(tensor)
    buffer = tensor.contiguous()
    record(group, "all_reduce", tensor, ring_bytes("all_reduce", tensor.nbytes, group.size))
    work = dist.all_reduce(buffer, op=_OPERATIONS[op], group=group.process_group, async_op=True)
    return Pending(tensor, work, (buffer,), None if buffer is tensor else lambda: tensor.copy_(buffer), group.ledger)


def all_gather(tensor: Tensor, group: Group, into: Tensor | None = None) -> Pending:
    """Joins the members' tensors on dim 0, in the order of their indices.

    tensor    [n, ...], the same shape on all members
    into      contiguous, the shape of what is returned: where to put it; None makes a new tensor
    returns   [size · n, ...]; the input itself when the group has one rank and there is no `into`
    """
    if group.size == 1:
        return Pending(tensor if into is None else into.copy_(tensor))
    _has_rows("all_gather", tensor, group)
    source = tensor.contiguous()
    shape = (group.size * source.shape[0], *source.shape[1:])
    gathered = source.new_empty(shape) if into is None else into
    if gathered.shape != shape or gathered.dtype != source.dtype or not gathered.is_contiguous():
        raise ValueError(
            f"all_gather over {group}: `into` must be contiguous, of shape {shape} and {source.dtype}; "
            f"it has shape {tuple(gathered.shape)} and {gathered.dtype}"
        )
    record(group, "all_gather", tensor, ring_bytes("all_gather", gathered.nbytes, group.size))
    work = _all_gather(gathered, source, group=group.process_group, async_op=True)
    return Pending(gathered, work, (source,), ledger=group.ledger)


def reduce_scatter(tensor: Tensor, group: Group, in_rank_order: bool = False) -> Pending:
    """Sums the members' tensors and leaves each with its piece of dim 0.

    tensor          [size · n, ...], the same shape on all members
    in_rank_order   each element's terms are added in the order of the members' indices, as on gloo they always are
    returns   [n, ...]: rows index · n up to (index + 1) · n of the sum; the input itself when the group has
              one rank
    Raises ValueError when dim 0 does not divide by the size of the group.
    """
    if group.size == 1:
        return Pending(tensor)
    _divides("reduce_scatter", tensor, group)
    source = tensor.contiguous()
    record(group, "reduce_scatter", tensor, ring_bytes("reduce_scatter", source.nbytes, group.size))
    if in_rank_order or dist.get_backend(group.process_group) == "gloo":
        # gloo's own is an all_reduce of the whole: twice the bytes, and measured two to five times slower.
        pieces = source.new_empty(source.shape)
        work = dist.all_to_all_single(pieces, source, group=group.process_group, async_op=True)
        return Pending(pieces, work, (source,), lambda: _sum_pieces(pieces, group.size), group.ledger)
    piece = source.new_empty((source.shape[0] // group.size, *source.shape[1:]))
    work = _reduce_scatter(piece, source, group=group.process_group, async_op=True)
    return Pending(piece, work, (source,), ledger=group.ledger)


def all_to_all(
    tensor: Tensor,
    group: Group,
    send_splits: Sequence[int] | None = None,
    receive_splits: Sequence[int] | None = None,
) -> Pending:
    """Sends piece i of dim 0 to member i, and joins what the members sent here, in their order.

    send_splits      rows that go to each member; they add up to dim 0. None: equal pieces
    receive_splits   rows that come from each member. None: as many as are sent
    returns          [sum(receive_splits), ...]; the input itself when the group has one rank
    Raises ValueError when the splits do not fit, or equal pieces are asked of a dim that does not divide.
    """
    even = send_splits is None and receive_splits is None
    if send_splits is None:
        _divides("all_to_all", tensor, group)
        send = [tensor.shape[0] // group.size] * group.size
    else:
        send = list(send_splits)
    receive = send if receive_splits is None else list(receive_splits)
    if len(send) != group.size or len(receive) != group.size or sum(send) != tensor.shape[0]:
        raise ValueError(
            f"all_to_all over {group}: splits {send} → {receive} need one entry for each of the {group.size} "
            f"members, and what is sent must add up to dim 0 of {tuple(tensor.shape)}"
        )
    if group.size == 1:
        return Pending(tensor)
    source = tensor.contiguous()
    received = source.new_empty((sum(receive), *source.shape[1:]))
    row_bytes = source[:1].numel() * source.element_size()
    record(group, "all_to_all", tensor, (sum(send) - send[group.index]) * row_bytes)
    work = dist.all_to_all_single(
        received,
        source,
        None if even else receive,
        None if even else send,
        group=group.process_group,
        async_op=True,
    )
    return Pending(received, work, (source,), ledger=group.ledger)


def broadcast(tensor: Tensor, group: Group, source: int) -> Pending:
    """Overwrites the tensor on every member with that of the member of index `source`, in place."""
    if not 0 <= source < group.size:
        raise ValueError(f"broadcast over {group}: source {source} is not an index within 0 … {group.size - 1}")
    if group.size == 1:
        return Pending(tensor)
    buffer = tensor.contiguous()
    record(group, "broadcast", tensor, ring_bytes("broadcast", tensor.nbytes, group.size))
    work = dist.broadcast(buffer, group_src=source, group=group.process_group, async_op=True)
    return Pending(tensor, work, (buffer,), None if buffer is tensor else lambda: tensor.copy_(buffer), group.ledger)


class DeterministicSum(Pending):
    """Two exchanges in a row: `wait` does all that is left, `advance` only what starts the second one."""

    __slots__ = ("_first", "_flat", "_group", "_padded", "_second")

    def __init__(self, flat: Tensor, group: Group) -> None:
        self._flat = flat
        self._group = group
        self._padded = flat
        if flat.numel() % group.size or not flat.is_contiguous():
            self._padded = flat.new_zeros(-(-flat.numel() // group.size) * group.size)
            self._padded[: flat.numel()] = flat
        self._first: Pending | None = all_to_all(self._padded, group)
        self._second: Pending | None = None
        super().__init__(flat, finish=self._complete)

    def advance(self) -> None:
        """Sums this rank's share once it has arrived, and issues the second exchange without awaiting it."""
        if self._first is not None:
            total = _sum_pieces(self._first.wait(), self._group.size)
            self._first = None  # the pieces are as large as the tensor itself
            self._second = all_gather(total, self._group, into=self._padded)

    def _complete(self) -> Tensor:
        self.advance()
        assert self._second is not None
        total = self._second.wait()
        return self._flat if total is self._flat else self._flat.copy_(total[: self._flat.numel()])


def deterministic_all_reduce(flat: Tensor, group: Group) -> Pending:
    """Sums a flat tensor over the group, in place, each element in rank order.

    flat   [n], any n; padded to a multiple of the group's size inside
    The result does not depend on how a larger buffer is cut into such tensors, and is bitwise equal on all
    members, which a ring does not give: there the order of the terms depends on where in the buffer an
    element lies. An all_to_all, a local sum and an all_gather send together what a ring all_reduce sends. The
    first is issued at once, the second in `wait` (or `advance`), so members must wait for several of these in
    the same order.
    """
    if flat.dim() != 1:
        raise ValueError(f"deterministic_all_reduce takes a flat tensor, not one of shape {tuple(flat.shape)}")
    if group.size == 1 or flat.numel() == 0:
        return Pending(flat)
    return DeterministicSum(flat, group)


def barrier(group: Group) -> None:
    """Returns when every member has called it."""
    if group.size > 1:
        group.ledger.record(group.axes, "barrier", (), "", 0)
        dist.barrier(group=group.process_group)


def gather_json(value: Any, group: Group) -> list[Any]:
    """Every member's value, in the order of their indices, as JSON gives it back (tuples as lists).

    For start-up and checkpoints, never in a step: two exchanges, of lengths and of texts.
    """
    if group.size == 1:
        return [value]
    text = json.dumps(value).encode()
    device = torch.device("cuda", torch.cuda.current_device()) if _on_cuda(group) else torch.device("cpu")
    lengths = all_gather(torch.tensor([len(text)], dtype=torch.int64, device=device), group).wait().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = all_gather(padded.unsqueeze(0), group).wait().cpu()
    return [json.loads(bytes(row[:length].numpy())) for row, length in zip(rows, lengths, strict=True)]


def _on_cuda(group: Group) -> bool:
    return dist.get_backend(group.process_group) == "nccl"


def record(group: Group, op: str, tensor: Tensor, sent: int, note: str = "") -> None:
    """Writes the row of a call that hands in `tensor` and sends `sent` bytes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    group.ledger.record(group.axes, op, tuple(tensor.shape), dtype, sent, note)


def _sum_pieces(pieces: Tensor, size: int) -> Tensor:
    """The sum of the `size` pieces of dim 0, in rank order: torch.sum may group the terms by the shape."""
    rows = pieces.shape[0] // size
    first, second, *rest = (pieces.narrow(0, index * rows, rows) for index in range(size))
    total = first + second  # a new tensor, so that the pieces can go
    for piece in rest:
        total += piece
    return total


def _has_rows(op: str, tensor: Tensor, group: Group) -> None:
    if tensor.dim() == 0:
        raise ValueError(f"{op} over {group} works on dim 0, and a scalar has none; hand in tensor.view(1)")


def _divides(op: str, tensor: Tensor, group: Group) -> None:
    _has_rows(op, tensor, group)
    rows = tensor.shape[0]
    if rows % group.size:
        below = rows // group.size * group.size
        raise ValueError(
            f"{op} over {group}: dim 0 of {tuple(tensor.shape)} does not divide by the {group.size} members; "
            f"use {' or '.join(str(fit) for fit in (below, below + group.size) if fit)} rows"
        )
