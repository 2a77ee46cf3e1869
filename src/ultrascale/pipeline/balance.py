"""Which layers lie on which stage, so that the slowest rank is as fast as possible.

Equal numbers of layers are not equal times: the head costs as much as several layers. A rank's time is the sum of its
stages'. Exact dynamic programmes: the slowest rank first, then, among the splits that are as good, the slowest stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from ultrascale.pipeline.partition import PartitionError, Split, from_list
from ultrascale.pipeline.schedules.placement import Placement

_EQUAL = 1e-12


@dataclass(frozen=True)
class LayerCosts:
    """What a model's parts cost, per micro-batch.

    time              of a layer, in any unit, forward and backward together; one number per layer
    embedding, head   times of what stands before the first and after the last layer
    parameter_bytes   of a layer: weights, gradients and optimizer state, as a rank holds them
    activation_bytes  of a layer and micro-batch, from its forward to the end of its backward
    embedding_bytes, head_bytes  (parameters, activations of a micro-batch) of the two ends
    """

    time: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0
    parameter_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    embedding_bytes: tuple[float, float] = (0.0, 0.0)
    head_bytes: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "activation_bytes"):
            given = getattr(self, name)
            if given and len(given) != len(self.time):
                raise PartitionError(f"{name} is given for {len(given)} layers, time for {len(self.time)}; give both")


@dataclass(frozen=True)
class Memory:
    """What a rank may hold.

    limit      bytes of a rank; None: as much as it takes
    in_flight  stage → micro-batches whose activations it holds at most, as the schedule has it
    """

    limit: float | None = None
    in_flight: tuple[int, ...] = ()


class Stages:
    """Times and bytes of stages made of neighbouring layers."""

    def __init__(self, costs: LayerCosts, placement: Placement, memory: Memory) -> None:
        self.costs, self.placement, self.memory = costs, placement, memory
        self.layers, self.stages = len(costs.time), len(placement)
        self.ranks = 1 + max(max(ranks) for ranks in placement)
        self.held = [[s for s, ranks in enumerate(placement) if rank in ranks] for rank in range(self.ranks)]
        self._time = list(accumulate(costs.time, initial=0.0))
        self._parameters = list(accumulate(costs.parameter_bytes or (0,) * self.layers, initial=0.0))
        self._activations = list(accumulate(costs.activation_bytes or (0,) * self.layers, initial=0.0))
        self.limit = inf if memory.limit is None else memory.limit

    def layer_time(self, first: int, last: int) -> float:
        """Of the layers first … last − 1 alone."""
        return self._time[last] - self._time[first]

    def time(self, stage: int, first: int, last: int) -> float:
        """Of a stage with the layers first … last − 1."""
        time = self.layer_time(first, last)
        if stage == 0:
            time += self.costs.embedding
        if stage == self.stages - 1:
            time += self.costs.head
        return time

    def bytes(self, stage: int, first: int, last: int) -> float:
        """Of a stage with the layers first … last − 1: parameters, and activations times those in flight."""
        parameters = self._parameters[last] - self._parameters[first]
        activations = self._activations[last] - self._activations[first]
        for number, end in ((0, self.costs.embedding_bytes), (self.stages - 1, self.costs.head_bytes)):
            if stage == number:
                parameters, activations = parameters + end[0], activations + end[1]
        return parameters + activations * (self.memory.in_flight[stage] if self.memory.in_flight else 1)

    def loads(self, counts: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
        """Times of the stages, times of the ranks and bytes of the ranks of a split."""
        ends = list(accumulate(counts, initial=0))
        times = [self.time(stage, ends[stage], ends[stage + 1]) for stage in range(self.stages)]
        held = [self.bytes(stage, ends[stage], ends[stage + 1]) for stage in range(self.stages)]
        return (
            times,
            [sum(times[stage] for stage in stages) for stages in self.held],
            [sum(held[stage] for stage in stages) for stages in self.held],
        )

    @property
    def alike(self) -> bool:
        """Whether all layers cost the same, so that only their number on a stage counts."""
        costs = self.costs
        return all(len(set(each)) <= 1 for each in (costs.time, costs.parameter_bytes, costs.activation_bytes))


def balanced(costs: LayerCosts, placement: Placement, memory: Memory = Memory()) -> Split:
    """The split of least time of the slowest rank, then of the slowest stage; at least one layer per stage.

    Exact for layers that cost the same under any placement, and for any layers with one stage per rank, or two in a
    loop or a V. With more, layers that differ are cut so that the slowest stage is fastest.

    Raises PartitionError with fewer layers than stages, and when no split fits into the memory.
    """
    stages = Stages(costs, placement, memory)
    if stages.layers < stages.stages:
        raise PartitionError(f"{stages.layers} layers are too few for {stages.stages} stages, which need one each")
    counts = _counts(stages)
    if counts is None:
        least = max(stages.loads(_even(stages.layers, stages.stages))[2])
        raise PartitionError(
            f"no split of {stages.layers} layers over {stages.stages} stages fits into {memory.limit:.6g} bytes per "
            f"rank; the uniform one takes {least:.6g}"
        )
    return from_list(counts, stages.layers, stages.stages)


def _even(layers: int, stages: int) -> list[int]:
    least, extra = divmod(layers, stages)
    return [least + (stage < extra) for stage in range(stages)]


def _counts(stages: Stages) -> list[int] | None:
    """Two passes of one programme: the fastest slowest rank; then, keeping that, the fastest slowest stage."""
    even = stages.loads(_even(stages.layers, stages.stages))
    most = max(even[1]) if max(even[2]) <= stages.limit else inf
    first = _solve(stages, most * (1 + _EQUAL), by_stage=False)
    if first is None:
        return None
    second = _solve(stages, first[0] * (1 + _EQUAL), by_stage=True)
    return (second or first)[1]


Solution = tuple[float, list[int]]
"""Time of the slowest rank or stage, and layers per stage."""


def _solve(stages: Stages, most: float, by_stage: bool) -> Solution | None:
    """The split whose slowest stage (or rank) is fastest, of those without a rank above `most`; None: there is none."""
    layers, ranks = stages.layers, stages.ranks
    shape = stages.held
    if stages.alike:
        return _alike(stages, most, by_stage)
    if all(len(held) == 1 for held in shape):
        return _in_lanes(stages, ((0, 1, layers),), most, by_stage)
    if shape == [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]:
        return _in_lanes(stages, ((0, 1, layers), (layers, -1, 0)), most, by_stage)
    if shape == [[rank, ranks + rank] for rank in range(ranks)]:
        best: Solution | None = None
        for cut in range(ranks, layers - ranks + 1):
            found = _in_lanes(stages, ((0, 1, cut), (cut, 1, layers)), most, by_stage)
            if found and (best is None or found[0] < best[0]):
                best = found
                most = most if by_stage else found[0]
        return best
    flat = Stages(stages.costs, tuple((stage,) for stage in range(stages.stages)), stages.memory)
    found = _in_lanes(flat, ((0, 1, layers),), inf, by_stage)
    return found and (max(stages.loads(found[1])[0 if by_stage else 1]), found[1])


def _alike(stages: Stages, most: float, by_stage: bool) -> Solution | None:
    """All layers cost the same: rank after rank takes some of those that are left, whichever they are."""
    best: dict[int, tuple[float, list[list[int]]]] = {0: (0.0, [])}
    for rank in range(stages.ranks):
        options = list(_shares(stages, rank, most))
        longer: dict[int, tuple[float, list[list[int]]]] = {}
        for used, (value, chosen) in best.items():
            for counts, rank_time, stage_time in options:
                total = used + sum(counts)
                worst = max(value, stage_time if by_stage else rank_time)
                if total <= stages.layers and (total not in longer or worst < longer[total][0]):
                    longer[total] = (worst, [*chosen, counts])
        best = longer
    if stages.layers not in best:
        return None
    value, chosen = best[stages.layers]
    split = [0] * stages.stages
    for held, counts in zip(stages.held, chosen, strict=True):
        for stage, count in zip(held, counts, strict=True):
            split[stage] = count
    return value, split


def _shares(stages: Stages, rank: int, most: float) -> Iterator[tuple[list[int], float, float]]:
    """(layers per stage of the rank, time of the rank, of its slowest stage) for each number of layers it may take."""
    held = stages.held[rank]
    for total in range(len(held), stages.layers - (stages.stages - len(held)) + 1):
        if sum(stages.time(stage, 0, 0) for stage in held) + stages.layer_time(0, total) > most:
            return
        best: tuple[float, list[int], float] | None = None
        for counts in _divisions(total, len(held)):
            times = [stages.time(stage, 0, count) for stage, count in zip(held, counts, strict=True)]
            fits = sum(stages.bytes(stage, 0, count) for stage, count in zip(held, counts, strict=True))
            if sum(times) > most or fits > stages.limit:
                continue
            if best is None or max(times) < best[0]:
                best = (max(times), counts, sum(times))
        if best is not None:
            yield best[1], best[2], best[0]


def _divisions(total: int, parts: int) -> Iterator[list[int]]:
    """All ways to write `total` as `parts` numbers of 1 or more, in order."""
    if parts == 1:
        yield [total]
        return
    for first in range(1, total - parts + 2):
        for rest in _divisions(total - first, parts - 1):
            yield [first, *rest]


Lane = tuple[int, int, int]
"""Where the first rank's layers begin, the direction in which the next rank's follow, and where the last one's end."""


def _in_lanes(stages: Stages, lanes: tuple[Lane, ...], most: float, by_stage: bool) -> Solution | None:
    """Rank after rank takes the next layers of each lane: a state is how far the lanes are.

    The second of two lanes that run towards each other ends where the first does.
    """
    meeting = len(lanes) == 2 and lanes[1][1] < 0
    starts = tuple(lane[0] for lane in lanes)
    best: dict[tuple[int, ...], tuple[float, list[tuple[int, ...]]]] = {starts: (0.0, [])}
    for rank in range(stages.ranks):
        room = (stages.ranks - 1 - rank) * most
        longer: dict[tuple[int, ...], tuple[float, list[tuple[int, ...]]]] = {}
        for state, (value, chosen) in best.items():
            for after, rank_time, stage_time in _takes(stages, rank, lanes, state, most):
                if meeting and after[0] > after[1]:
                    continue
                if _left(stages, lanes, after, meeting) > room:
                    continue
                worst = max(value, stage_time if by_stage else rank_time)
                if after not in longer or worst < longer[after][0]:
                    longer[after] = (worst, [*chosen, after])
        best = longer
    ends = [
        (value, chosen)
        for state, (value, chosen) in best.items()
        if (state[0] == state[1] if meeting else state == tuple(lane[2] for lane in lanes))
    ]
    if not ends:
        return None
    value, chosen = min(ends, key=lambda end: (end[0], end[1]))
    split = [0] * stages.stages
    for rank, (before, after) in enumerate(zip([starts, *chosen], chosen, strict=False)):
        for stage, first, last in zip(stages.held[rank], before, after, strict=True):
            split[stage] = abs(last - first)
    return value, split


def _takes(
    stages: Stages, rank: int, lanes: tuple[Lane, ...], state: tuple[int, ...], most: float
) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """(state after, time of the rank, of its slowest stage) for all that a rank may take: one layer or more a lane."""
    options: list[list[tuple[int, float, float]]] = []
    for stage, position, (_, direction, end) in zip(stages.held[rank], state, lanes, strict=True):
        lane = []
        for count in range(1, abs(end - position) + 1):
            ends = sorted((position, position + direction * count))
            time, size = stages.time(stage, *ends), stages.bytes(stage, *ends)
            if time > most or size > stages.limit:
                break
            lane.append((position + direction * count, time, size))
        options.append(lane)
    if len(options) == 1:
        for position, time, _ in options[0]:
            yield (position,), time, time
        return
    for first, time, size in options[0]:
        for second, other, more in options[1]:
            if time + other > most or size + more > stages.limit:
                break
            yield (first, second), time + other, max(time, other)


def _left(stages: Stages, lanes: tuple[Lane, ...], state: tuple[int, ...], meeting: bool) -> float:
    """Time of the layers that no rank has yet."""
    if meeting:
        return stages.layer_time(state[0], state[1])
    return sum(stages.layer_time(position, lane[2]) for position, lane in zip(state, lanes, strict=True))
