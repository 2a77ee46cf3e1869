"""Messages between two members of a group.

Only the asynchronous forms are here: on gloo and on NCCL a blocking send returns when the other side
receives, so that two ranks that send first and receive then wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ultrascale.comm.collectives import Pending, record
from ultrascale.comm.group import Group

_LARGEST_TAG = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a batch.

    tensor   what is sent, or the contiguous buffer that is received into
    peer     index of the other member
    tag      0 … 2³¹ − 1, the same on both sides
    sends    whether it goes out
    """

    tensor: Tensor
    peer: int
    tag: int
    sends: bool


def batch(messages: Sequence[Message], group: Group) -> list[Pending]:
    """Issues messages as one, so that no order among them can make two ranks wait for each other.

    On NCCL, which goes by order alone, both sides must issue a message in their batch of the same number.
    """
    if not messages:
        return []
    tensors = [_prepared(message, group) for message in messages]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(
                dist.isend if message.sends else dist.irecv,
                tensor,
                group=group.process_group,
                tag=message.tag,
                group_peer=message.peer,
            )
            for message, tensor in zip(messages, tensors, strict=True)
        ]
    )
    if len(works) == 1:  # NCCL has one handle for all
        works = works * len(messages)
    return [Pending(t, work, (t,), ledger=group.ledger) for t, work in zip(tensors, works, strict=True)]


def send(tensor: Tensor, group: Group, destination: int, tag: int) -> Pending:
    """Sends a tensor to the member of index `destination`; leave it as it is until `wait` returns.

    tag   0 … 2³¹ − 1, the same as the receiver's. gloo matches messages by it: two messages under one tag
          whose receives are posted the other way round are exchanged without an error. NCCL ignores it and
          goes by order alone.
    """
    payload = _prepared(Message(tensor, destination, tag, sends=True), group)
    work = dist.isend(payload, group=group.process_group, group_dst=destination, tag=tag)
    return Pending(tensor, work, (payload,), ledger=group.ledger)


def receive(buffer: Tensor, group: Group, source: int, tag: int) -> Pending:
    """Receives into `buffer` from the member of index `source`; `wait` returns the buffer.

    The shape and the dtype must be the sender's: gloo reinterprets another dtype of the same size without an
    error, and ends the connection when the size differs. Raises ValueError when the buffer is not contiguous.
    """
    _prepared(Message(buffer, source, tag, sends=False), group)
    work = dist.irecv(buffer, group=group.process_group, group_src=source, tag=tag)
    return Pending(buffer, work, (buffer,), ledger=group.ledger)


def _prepared(message: Message, group: Group) -> Tensor:
    """The tensor that travels, contiguous; writes the row."""
    _check(group, message.peer, message.tag)
    tensor = message.tensor
    if message.sends:
        tensor = tensor.contiguous()
        record(group, "send", tensor, tensor.nbytes, f"to {group.ranks[message.peer]} tag {message.tag}")
    elif not tensor.is_contiguous():
        raise ValueError(f"receive over {group}: the buffer of shape {tuple(tensor.shape)} is not contiguous")
    else:
        record(group, "receive", tensor, 0, f"from {group.ranks[message.peer]} tag {message.tag}")
    return tensor


def _check(group: Group, peer: int, tag: int) -> None:
    if not 0 <= peer < group.size or peer == group.index:
        raise ValueError(f"member {group.index} of {group} cannot exchange a message with member {peer}")
    if not 0 <= tag <= _LARGEST_TAG:
        raise ValueError(f"tag {tag} is outside 0 … {_LARGEST_TAG}")
