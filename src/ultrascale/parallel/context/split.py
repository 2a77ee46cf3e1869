"""Which tokens of a sequence a rank holds when cp cuts it. Needs no torch.

A cp rank is (ring place, ulysses place). The ring's places share out the tokens: *contiguous* gives each one piece;
*zigzag* cuts every document into 2 · ring chunks and gives place r the chunks r and 2 · ring − 1 − r, so that early
queries, which see few keys, and late ones, which see many, are on each rank in equal parts (Llama 3, Grattafiori et al.
2024, §3.3.2; by document, as Megatron-Core does for packed sequences). Ulysses places halve, quarter, … what a ring
place holds, in its order.

What does not divide by the chunks is taken from the *head* of a document, where a token sees less than 2 · ring keys,
and dealt out in equal numbers: no document needs padding, and every rank holds equally many tokens. Work is equal
within a few keys for each document; under a window, over several documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np
from numpy.typing import NDArray

from ultrascale.config.schema import Config
from ultrascale.mesh.axes import ulysses_size

Ints = NDArray[np.int64]

ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one document."""

    start: int
    stop: int
    """In the sequence."""
    document: int
    """Where the document begins."""

    def __len__(self) -> int:
        return self.stop - self.start


Documents = tuple[int, ...]
"""Where the documents of one sequence begin: ascending, the first at 0."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How cp cuts a sequence."""

    ring: int = 1
    ulysses: int = 1
    kind: str = ZIGZAG
    window: int | None = None
    """The model's sliding window: what the work of most layers is balanced by."""

    @staticmethod
    def of(config: Config) -> Cut:
        """As a resolved config says."""
        ulysses = ulysses_size(config)
        return Cut(config.parallel.cp // ulysses, ulysses, config.context.split, config.model.sliding_window)

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    @property
    def multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return self.size * (2 if self.kind == ZIGZAG and self.ring > 1 else 1)


def sequence_multiple(config: Config) -> int:
    """What cp, and tp where it splits tokens, need the length of a sequence to be a multiple of."""
    parallel = config.parallel
    return lcm(Cut.of(config).multiple, parallel.cp * (parallel.tp if tp_splits_tokens(config) else 1))


def tp_splits_tokens(config: Config) -> bool:
    """Under sequence parallelism, and where there are experts, which no token is sent to twice."""
    return bool(config.parallel.sequence_parallel) or config.model.num_experts is not None


def padded_length(config: Config) -> int:
    """Tokens of a sequence as it is cut: batch.sequence_length, and what `context.pad` adds at its end."""
    length = config.batch.sequence_length
    multiple = sequence_multiple(config) if config.context.pad else 1
    return -(-length // multiple) * multiple


@lru_cache(maxsize=32)  # of a long sequence with many documents an entry takes megabytes
def ring_runs(length: int, documents: Documents, cut: Cut) -> tuple[tuple[Run, ...], ...]:
    """What each place on the ring holds, in the order in which it lies in memory.

    length   tokens; a multiple of the ring's size
    """
    ring, window = cut.ring, cut.window
    bounds = list(zip(documents, (*documents[1:], length), strict=True))
    if cut.kind == CONTIGUOUS or ring == 1:
        pieces = _dealt([Run(start, stop, start) for start, stop in bounds], ring)
        return tuple(tuple(runs) for runs in pieces)
    held: list[list[Run]] = [[] for _ in range(ring)]
    work = [0] * ring
    heads = []
    for begin, end in sorted(bounds, key=lambda bound: bound[0] - bound[1]):  # the longest first
        chunk = (end - begin) // (2 * ring)
        first = end - 2 * ring * chunk
        heads.append(Run(begin, first, begin))
        starts = [first + index * chunk for index in range(2 * ring if chunk else 0)]
        pairs = [
            (Run(a, a + chunk, begin), Run(b, b + chunk, begin)) for a, b in zip(starts[:ring], starts[: ring - 1 : -1])
        ]
        # Under a window the outer pairs have less to do: the most goes to the place that has had the least.
        by_work = sorted(pairs, key=lambda pair: -sum(keys_seen(run, window) for run in pair))
        for place, pair in zip(sorted(range(ring), key=work.__getitem__), by_work):
            held[place] += pair
            work[place] += sum(keys_seen(run, window) for run in pair)
    for runs, further in zip(held, _dealt(sorted(heads, key=lambda run: run.start), ring), strict=True):
        runs += further
    return tuple(_joined(runs) for runs in held)


def keys_seen(run: Run, window: int | None) -> int:
    """By all queries of a run together: each sees its own and those before it in its document, at most `window`."""
    first, last = run.start - run.document + 1, run.stop - run.document  # keys of the first query and of the last
    if window is None or last <= window:
        return (first + last) * len(run) // 2
    rising = max(0, window - first)
    return (first + window - 1) * rising // 2 + window * (len(run) - rising)


def rank_runs(length: int, documents: Documents, cut: Cut) -> tuple[tuple[Run, ...], ...]:
    """What each cp rank holds: ring places outside, ulysses places inside."""
    return tuple(
        tuple(part)
        for runs in ring_runs(length, documents, cut)
        for part in (_dealt(runs, cut.ulysses) if cut.ulysses > 1 else (runs,))
    )


def own_places(length: int, documents: Sequence[Documents] | None, cut: Cut, index: int) -> Ints:
    """Places in the sequence of what cp rank `index` holds of a batch, [tokens, 1] where all rows are cut alike, else
    [tokens, batch]: x[own_places, columns] of any x [seq, batch]."""
    rows = ((0,),) if documents is None else documents
    return np.stack([order(rank_runs(length, row, cut)[index]) for row in rows], axis=1)


def order(runs: Iterable[Run]) -> Ints:
    """Place in the sequence of each token of these runs."""
    return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in runs])


def _dealt(runs: Sequence[Run], parts: int) -> list[list[Run]]:
    """The runs one after another, cut into parts of equally many tokens."""
    total = sum(map(len, runs))
    assert total % parts == 0, f"{total} tokens do not divide by {parts}"
    share = total // parts
    dealt: list[list[Run]] = [[] for _ in range(parts)]
    done = 0
    for run in runs:
        start = run.start
        while start < run.stop:
            part = done // share
            stop = min(run.stop, start + (part + 1) * share - done)
            dealt[part].append(Run(start, stop, run.document))
            done += stop - start
            start = stop
    return dealt


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """In the order of the sequence, neighbours made one."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        if joined and joined[-1].stop == run.start and joined[-1].document == run.document:
            joined[-1] = Run(joined[-1].start, run.stop, run.document)
        else:
            joined.append(run)
    return tuple(joined)
