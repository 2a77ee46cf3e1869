"""What a run recorded of its pipeline (`timeline-RANK.jsonl`): as a timeline that draws like a simulated one, and as
costs to simulate with."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from ultrascale.pipeline.actions import Action, Kind, Plan, ScheduleError, parse_action
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.timeline import Event, Rows, Timeline, dependencies


@dataclass(frozen=True)
class Recording:
    """Steps of one or more pipelines of a run, times in seconds.

    pipelines  for each replica of the pipeline: step → rows of that step, whole steps only
    ranks      for each replica: its ranks in the whole job, by pp coordinate
    """

    name: str
    pipelines: tuple[dict[int, Rows], ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """Recorded steps of the first pipeline, without the first one where there are more: caches, allocators and
        connections were cold in it."""
        steps = sorted(self.pipelines[0])
        return tuple(steps[1:] or steps)

    def _events(self) -> Iterator[Event]:
        for pipeline in self.pipelines:
            for step in set(self.steps) & set(pipeline):
                for row in pipeline[step]:
                    yield from row

    def typical_step(self) -> int:
        """The step whose makespan is the median."""
        times = {step: Timeline("", (), self.pipelines[0][step]).makespan for step in self.steps}
        wanted = median_low(times.values())
        return next(step for step, time in times.items() if time == wanted)

    def busy(self) -> dict[int, float]:
        """Rank in the whole job → seconds of a step in which it computed; the median over steps."""
        return {
            rank: median(sum(e.end - e.start for e in pipeline[step][at]) for step in set(self.steps) & set(pipeline))
            for ranks, pipeline in zip(self.ranks, self.pipelines, strict=True)
            if set(self.steps) & set(pipeline)
            for at, rank in enumerate(ranks)
        }

    def plan(self) -> Plan:
        """The compute actions that the ranks ran, in the order in which they did."""
        rows = self.pipelines[0][self.steps[0]]
        micro_batches = 1 + max(event.action.micro_batch for row in rows for event in row)
        actions = tuple(tuple(event.action for event in row) for row in rows)
        return Plan(self.name, _placement(rows), micro_batches, actions)

    def timeline(self, step: int | None = None) -> Timeline:
        """A recorded step of the first pipeline; the typical one when none is given."""
        chosen = self.typical_step() if step is None else step
        rows = self.pipelines[0][chosen]
        timeline = Timeline(f"{self.name}, step {chosen} as it ran", _placement(rows), rows, "s")
        notes = (("makespan", f"{timeline.makespan:.4g} s"),)
        return Timeline(timeline.title, timeline.placement, rows, "s", notes)

    def costs(self) -> Costs:
        """Seconds of each action per stage: the median over steps, micro-batches and replicas.

        A stage whose backward was always whole has half of it as BI, half as BW; one that ran in pairs
        alone has a third of them as each of the three. Messages are taken to be free: what
        they took cannot be told from waiting.
        """
        found: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        paired: dict[int, list[tuple[float, Action]]] = defaultdict(list)
        for event in self._events():
            action, length = event.action, event.end - event.start
            if action.kind is Kind.FB:
                paired[action.stage].append((length, action.parts[1]))
            else:
                found[action.kind, action.stage].append(length)
        times = {what: median(lengths) for what, lengths in found.items()}
        for stage, lengths in paired.items():
            # Costs.FB is with a whole backward.
            times[Kind.FB, stage] = median(
                length + (times.get((Kind.BW, second.stage), 0.0) if second.kind is Kind.BI else 0.0)
                for length, second in lengths
            )
        stages = range(self.plan().stages)
        forward = tuple(_alone(times, Kind.F, stage) for stage in stages)
        inputs = tuple(_alone(times, Kind.BI, stage) for stage in stages)
        weights = tuple(_alone(times, Kind.BW, stage) for stage in stages)
        pairs: tuple[float, ...] | None = None
        if paired:
            apart = (forward[stage] + inputs[stage] + weights[stage] for stage in stages)
            pairs = tuple(times.get((Kind.FB, stage), both) for stage, both in zip(stages, apart, strict=True))
        return Costs(F=forward, BI=inputs, BW=weights, FB=pairs)


def measured_costs(run: str | Path) -> Costs:
    """The costs of the pipeline of a run folder, for the schedules and the simulator, in seconds.

    Raises ScheduleError when the folder holds no whole recorded step.
    """
    return load(run).costs()


def load(run: str | Path) -> Recording:
    """What the run in this folder has recorded so far.

    Raises ScheduleError when there is no manifest, or no step that all ranks of a pipeline have finished.
    """
    folder = Path(run)
    manifest = _manifest(folder)
    pipelines: list[dict[int, Rows]] = []
    members: list[tuple[int, ...]] = []
    for ranks in _pipelines(manifest):
        recorded = [dict(_steps(folder / f"timeline-{rank['rank']}.jsonl")) for rank in ranks]
        hosts = [rank.get("host") for rank in ranks]
        common = sorted(set.intersection(*map(set, recorded)))
        steps = {
            step: _rows(rows, hosts)
            for step in common
            if _is_whole(rows := [each[step] for each in recorded], manifest["schedule"])
        }
        if steps:
            pipelines.append(steps)
            members.append(tuple(rank["rank"] for rank in ranks))
    if not pipelines:
        raise ScheduleError(f"{folder} has no recorded timeline; train with profile.timeline=true")
    return Recording(str(manifest["schedule"].get("name", "pipeline")), tuple(pipelines), tuple(members))


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ScheduleError(f"{folder} is not the folder of a run: its manifest.json cannot be read") from error
    if not isinstance(manifest, dict) or not {"ranks", "schedule"} <= manifest.keys():
        raise ScheduleError(f"{folder} is not the folder of a run: its manifest.json names no ranks and no schedule")
    return manifest


def _pipelines(manifest: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Ranks that differ in pp alone, in its order; the first ranks' pipeline first."""
    found: dict[tuple[tuple[str, int], ...], list[Mapping[str, Any]]] = defaultdict(list)
    for rank in manifest["ranks"]:
        others = sorted((axis, at) for axis, at in rank["coordinates"].items() if axis != "pp")
        found[tuple(others)].append(rank)
    return [sorted(ranks, key=lambda rank: rank["coordinates"].get("pp", 0)) for ranks in found.values()]


def _steps(path: Path) -> Iterator[tuple[int, list[tuple[Action, float, float]]]]:
    """(step, its actions in order); a last line that is being written is left out."""
    steps: dict[int, list[tuple[Action, float, float]]] = defaultdict(list)
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            record = json.loads(line)
            text = record.get("action") or f"{record['kind']}{record['stage']}.{record['micro_batch']}"
            steps[record["step"]].append((parse_action(text), record["start"], record["end"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    yield from steps.items()


def _is_whole(rows: list[list[tuple[Action, float, float]]], schedule: Mapping[str, Any]) -> bool:
    """Whether each (stage, micro-batch) of the manifest's schedule has its forward and its last backward.

    Not so in the newest step of a run that goes on, and in steps from before a resume under another layout.
    """
    forwards: set[tuple[int, int]] = set()
    backwards: set[tuple[int, int]] = set()
    for row in rows:
        for action, _, _ in row:
            for part in action.computes:
                if part.kind is not Kind.BI:
                    (forwards if part.kind is Kind.F else backwards).add((part.stage, part.micro_batch))
    wanted = {(stage, number) for stage in range(schedule["stages"]) for number in range(schedule["micro_batches"])}
    return forwards == wanted == backwards


def _rows(recorded: list[list[tuple[Action, float, float]]], hosts: list[Any]) -> Rows:
    rows = tuple(tuple(Event(rank, *action) for action in row) for rank, row in enumerate(recorded))
    return _without_waiting(_on_one_clock(rows, hosts))


def _on_one_clock(rows: Rows, hosts: list[Any]) -> Rows:
    """Clocks of different hosts begin anywhere: each is set to the middle of what cause and effect allow."""
    if len(set(hosts)) <= 1:
        return rows
    earliest: dict[tuple[int, int], float] = {}
    for source, target in dependencies(rows):
        if source.rank != target.rank:
            key = (source.rank, target.rank)
            earliest[key] = max(earliest.get(key, source.end - target.end), source.end - target.end)
    shifts = [0.0]
    for rank in range(1, len(rows)):
        if hosts[rank] == hosts[rank - 1]:
            shifts.append(shifts[-1])
            continue
        least, most = earliest.get((rank - 1, rank)), earliest.get((rank, rank - 1))
        bounds = [bound for bound in (least, None if most is None else -most) if bound is not None]
        shifts.append(shifts[-1] + (sum(bounds) / len(bounds) if bounds else 0.0))
    return tuple(
        tuple(event._replace(start=event.start + shift, end=event.end + shift) for event in row)
        for row, shift in zip(rows, shifts, strict=True)
    )


def _without_waiting(rows: Rows) -> Rows:
    """An action that waits for a message begins when what it waits for was finished, whenever it was called."""
    ready: dict[int, float] = {}
    for source, target in dependencies(rows):
        if source.rank != target.rank:
            ready[id(target)] = max(ready.get(id(target), source.end), source.end)
    return tuple(
        tuple(e._replace(start=min(max(e.start, ready.get(id(e), e.start)), e.end)) for e in row) for row in rows
    )


def _placement(rows: Rows) -> tuple[tuple[int, ...], ...]:
    """Stage → the ranks that ran it; of several, the one with the first micro-batches first."""
    held: dict[int, dict[int, int]] = defaultdict(dict)  # stage → rank → its first micro-batch
    for rank, row in enumerate(rows):
        for event in row:
            for part in event.action.computes:
                first = held[part.stage].get(rank, part.micro_batch)
                held[part.stage][rank] = min(first, part.micro_batch)
    return tuple(tuple(sorted(held[stage], key=held[stage].__getitem__)) for stage in range(max(held) + 1))


def _alone(times: Mapping[tuple[Kind, int], float], kind: Kind, stage: int) -> float:
    """Time of an F, BI or BW, also where it only ran whole or as part of a pair."""
    if (kind, stage) in times:
        return times[kind, stage]
    if kind is Kind.F:
        return times.get((Kind.FB, stage), 0.0) / 3
    if (Kind.B, stage) in times:
        return times[Kind.B, stage] / 2
    return times.get((Kind.FB, stage), 0.0) / 3
