"""Messages between two members of a group.

Only the asynchronous forms are here: on gloo and on NCCL a blocking send returns when the other side
receives, so that two ranks that send first and receive then wait for each other for ever.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ultrascale.comm.collectives import Pending, record
from ultrascale.comm.group import Group

_LARGEST_TAG = 2**31 - 1


def send(tensor: Tensor, group: Group, destination: int, tag: int) -> Pending:
    """Sends a tensor to the member of index `destination`; leave it as it is until `wait` returns.

    tag   0 … 2³¹ − 1, the same as the receiver's. gloo matches messages by it: two messages under one tag
          whose receives are posted the other way round are exchanged without an error. NCCL ignores it and
          goes by order alone.
    """
    _check(group, destination, tag)
    payload = tensor.contiguous()
    record(group, "send", tensor, tensor.nbytes, f"to {group.ranks[destination]} tag {tag}")
    work = dist.isend(payload, group=group.process_group, group_dst=destination, tag=tag)
    return Pending(tensor, work, (payload,), ledger=group.ledger)


def receive(buffer: Tensor, group: Group, source: int, tag: int) -> Pending:
    """Receives into `buffer` from the member of index `source`; `wait` returns the buffer.

    The shape and the dtype must be the sender's: gloo reinterprets another dtype of the same size without an
    error, and ends the connection when the size differs. Raises ValueError when the buffer is not contiguous.
    """
    _check(group, source, tag)
    if not buffer.is_contiguous():
        raise ValueError(f"receive over {group}: the buffer of shape {tuple(buffer.shape)} is not contiguous")
    record(group, "receive", buffer, 0, f"from {group.ranks[source]} tag {tag}")
    work = dist.irecv(buffer, group=group.process_group, group_src=source, tag=tag)
    return Pending(buffer, work, (buffer,), ledger=group.ledger)


def _check(group: Group, peer: int, tag: int) -> None:
    if not 0 <= peer < group.size or peer == group.index:
        raise ValueError(f"member {group.index} of {group} cannot exchange a message with member {peer}")
    if not 0 <= tag <= _LARGEST_TAG:
        raise ValueError(f"tag {tag} is outside 0 … {_LARGEST_TAG}")
