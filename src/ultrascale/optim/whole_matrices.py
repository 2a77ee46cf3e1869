"""Each logical matrix whole on one rank, and back: for updates that no piece of a matrix can make by itself.

ZeRO cuts matrices as flat memory, tp cuts them by rows or columns, and replicas hold copies. The ranks at one pp
coordinate, which together hold everything of their stages, share the matrices out among them: each is put together on
one rank, and what it becomes goes back to all that hold pieces of it. Two all-to-all exchanges for all matrices. Who
gets which matrix, and what every rank sends, is a pure function of mesh, layouts and buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ultrascale.comm import collectives
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.mesh.axes import Mesh
from ultrascale.parallel.buckets import Bucket, Held, Span
from ultrascale.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Task:
    """One matrix to be put together: a parameter [rows, columns], or one of a stack [experts, rows, columns]."""

    bucket: Bucket
    span: Span
    number: int | None
    """Which of a stack."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.span.layout.shape[-2:]
        return rows, columns

    @property
    def work(self) -> int:
        """Multiplications of one step of Newton-Schulz: two Gram-sized products and one back."""
        small, large = sorted(self.shape)
        return small * small * (2 * large + small)

    def held(self, mesh: Mesh, rank: int) -> Iterator[Held]:
        """The boxes of the matrix that a rank has in its shard."""
        for box in self.bucket.held(self.span, mesh, rank):
            if self.number is None:
                yield box
            elif box.offset[0] <= self.number < box.offset[0] + box.shape[0]:
                memory = box.memory[1:]
                start = box.start + (self.number - box.offset[0]) * prod(memory)
                yield replace(box, offset=box.offset[1:], shape=box.shape[1:], start=start, memory=memory)

    def sends(self, rank: int, owner: int, mesh: Mesh) -> bool:
        """Whether it is `rank` that sends its pieces to `owner`.

        Copies of a piece are equal. Of the ranks that hold one, that sends it which differs from the owner in nothing
        but where the matrix is cut: often the owner itself.
        """
        cut = {*self.span.layout.split_axes(mesh), *self.bucket.shard_axes}
        copies = [leaf for leaf in mesh.leaves if leaf not in cut]
        return mesh.index(rank, copies) == mesh.index(owner, copies)


@dataclass(frozen=True, slots=True)
class Part:
    """What a message holds of a matrix."""

    task: Task
    held: Held

    def of(self, flat: torch.Tensor, begin: int) -> torch.Tensor:
        """The piece in a part of the bucket's shard that begins with the shard's element `begin`; a view."""
        start, (rows, columns) = self.held.start - begin, self.held.shape
        return flat[start : start + prod(self.held.memory)].view(self.held.memory)[:rows, :columns]

    def within(self, matrix: torch.Tensor) -> torch.Tensor:
        """The piece in the whole matrix; a view."""
        (row, column), (rows, columns) = self.held.offset, self.held.shape
        return matrix[row : row + rows, column : column + columns]


Route = list[list[Part]]
"""By the other rank's index in the group: what is exchanged with it, in the order of the message."""


def tasks_of(spans: Sequence[tuple[Bucket, Span]]) -> Iterator[Task]:
    """The matrices of these parameters, in order. Raises ValueError for one that is neither matrix nor stack."""
    for bucket, span in spans:
        shape = span.layout.shape
        if len(shape) not in (2, 3):
            raise ValueError(f"{span.layout.name} of shape {list(shape)} is neither a matrix nor a stack of matrices")
        for number in [None] if len(shape) == 2 else range(shape[0]):
            yield Task(bucket, span, number)


def share_out(tasks: Sequence[Task], mesh: Mesh, ranks: Sequence[int]) -> list[int]:
    """For each task the rank that puts it together: the largest first, each to the rank with the least work so far.

    Only ranks whose part of the parameter has some of the matrix come into question: an expert stays with the ranks
    that have it.
    """
    load = dict.fromkeys(ranks, 0)
    owners = [-1] * len(tasks)
    holders: dict[Hashable, list[list[int]]] = {}
    """Of stacks of one shape that are cut alike: as many as there are layers."""
    for place in sorted(range(len(tasks)), key=lambda place: -tasks[place].work):
        task, layout = tasks[place], tasks[place].span.layout
        candidates = ranks
        if task.number is not None:
            alike = layout.shape, tuple(layout.split.items()), tuple(layout.pad_to.items())
            if alike not in holders:
                holders[alike] = _holders(layout, mesh, ranks)
            candidates = holders[alike][task.number]
        owners[place] = min(candidates, key=lambda rank: load[rank])
        load[owners[place]] += task.work
    return owners


def _holders(layout: Layout, mesh: Mesh, ranks: Sequence[int]) -> list[list[int]]:
    """For each matrix of a stack the ranks whose part of the parameter, before ZeRO cuts it, has some of it."""
    holders: list[list[int]] = [[] for _ in range(layout.shape[0])]
    for rank in ranks:
        offset, shape = layout.box(mesh, rank)
        if prod(shape):
            for number in range(offset[0], offset[0] + shape[0]):
                holders[number].append(rank)
    return holders


class WholeMatrices:
    """The exchanges of one rank.

    spans   whose matrices are meant, the same on all ranks of the group
    group   all ranks at this pp coordinate
    """

    def __init__(self, mesh: Mesh, group: Group, spans: Sequence[tuple[Bucket, Span]]) -> None:
        self.group = group
        ranks, me = group.ranks, group.ranks[group.index]
        tasks = list(tasks_of(spans))
        owners = share_out(tasks, mesh, ranks)
        self.own = [task for task, owner in zip(tasks, owners, strict=True) if owner == me]
        """The matrices that this rank puts together."""
        self.idle = not tasks
        """Whether there is nothing to exchange, on any rank of the group."""

        def parts(task: Task, rank: int) -> list[Part]:
            return [Part(task, held) for held in task.held(mesh, rank)]

        self._sent: Route = [[] for _ in ranks]
        self._returned: Route = [[] for _ in ranks]
        self._received: Route = [[] for _ in ranks]
        self._given_back: Route = [[] for _ in ranks]
        for task, owner in zip(tasks, owners, strict=True):
            mine, place = parts(task, me), ranks.index(owner)
            self._returned[place] += mine
            if mine and task.sends(me, owner, mesh):
                self._sent[place] += mine
            if owner == me:
                for index, rank in enumerate(ranks):
                    theirs = parts(task, rank)
                    self._given_back[index] += theirs
                    if theirs and task.sends(rank, owner, mesh):
                        self._received[index] += theirs

    def gather(self, piece: Callable[[Part], torch.Tensor], like: torch.Tensor) -> Pending:
        """Sends this rank's pieces to where they are put together; issued, in the dtype of `like`.

        piece   what this rank has of a part, [rows, columns]
        """
        return self._exchange(self._sent, self._received, piece, like)

    def wholes(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of `own`, from what `gather` brought."""
        made = {id(task): message.new_zeros(task.shape) for task in self.own}
        for part, values in _read(self._received, message):
            part.within(made[id(part.task)]).copy_(values)
        return [made[id(task)] for task in self.own]

    def scatter(self, matrices: Sequence[torch.Tensor], like: torch.Tensor) -> Pending:
        """Sends pieces of `own`, as these matrices are now, to all ranks that hold them; issued."""
        whole: Mapping[int, torch.Tensor] = {id(task): m for task, m in zip(self.own, matrices, strict=True)}
        return self._exchange(self._given_back, self._returned, lambda part: part.within(whole[id(part.task)]), like)

    def pieces(self, message: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Each piece that this rank holds, from what `scatter` brought."""
        return _read(self._returned, message)

    def _exchange(
        self, send: Route, receive: Route, piece: Callable[[Part], torch.Tensor], like: torch.Tensor
    ) -> Pending:
        values = [piece(part).to(like.dtype).flatten() for parts in send for part in parts]
        message = torch.cat(values) if values else like.new_empty(0)
        with self.group.ledger.during("optimizer"):
            return collectives.all_to_all(message, self.group, _sizes(send), _sizes(receive))


def _sizes(route: Route) -> list[int]:
    return [sum(prod(part.held.shape) for part in parts) for parts in route]


def _read(route: Route, message: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    start = 0
    for part in (part for parts in route for part in parts):
        size = prod(part.held.shape)
        yield part, message[start : start + size].view(part.held.shape)
        start += size
