"""A run folder as it stands, read and never written: of a run that is over, or still going on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ultrascale.observe.run_folder import LOADS, RunFolderError
from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.recording import Recording, load

Record = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """A line of expert_load.jsonl: tokens of each expert, by layer, at a step."""

    step: int
    layers: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RunRecord:
    """What a run has said about itself so far; files that are not there yet are empty.

    metrics    lines of metrics.jsonl, one per step
    events     lines of events.jsonl
    ledger     rows of ledger.json: axes, op, phase, calls, bytes per step and rank
    recording  of its pipeline, where the run was asked for one
    loads      lines of expert_load.jsonl; only a model with experts has any
    """

    path: Path
    status: Record
    manifest: Record
    metrics: tuple[Record, ...]
    events: tuple[Record, ...]
    ledger: tuple[Record, ...]
    recording: Recording | None
    loads: tuple[Load, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the folder's path."""
        return self.path.resolve().name

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a key of metrics.jsonl, where it has a number."""
        found = [(record.get("step"), record.get(key)) for record in self.metrics]
        return [(float(x), float(y)) for x, y in found if _is_number(x) and _is_number(y)]

    def lists(self, key: str) -> list[tuple[float, list[float | None]]]:
        """(step, values) of a key of metrics.jsonl, where it has a list; what is no number in it is None."""
        found = [(record.get("step"), record.get(key)) for record in self.metrics]
        return [
            (float(x), [float(y) if _is_number(y) else None for y in values])
            for x, values in found
            if _is_number(x) and isinstance(values, list)
        ]

    def peak_bytes(self) -> list[Record]:
        """Per rank: peak, allocated, reserved, as the newest event says; empty when none does."""
        for event in reversed(self.events):
            peaks = event.get("peak_bytes_by_rank")
            if isinstance(peaks, list):
                return [peak for peak in peaks if isinstance(peak, dict)]
        return []


def read_run(path: str | Path) -> RunRecord:
    """The run of this folder. Raises RunFolderError when the folder holds none."""
    folder = Path(path)
    status = _whole(folder / "status.json")
    if not isinstance(status, dict):
        raise RunFolderError(f"{folder} is not the folder of a run: it has no status.json; give a run.dir")
    manifest = _whole(folder / "manifest.json")
    ledger = _whole(folder / "ledger.json")
    try:
        recording = load(folder)
    except ScheduleError:
        recording = None
    return RunRecord(
        path=folder,
        status=status,
        manifest=manifest if isinstance(manifest, dict) else {},
        metrics=_lines(folder / "metrics.jsonl"),
        events=_lines(folder / "events.jsonl"),
        ledger=_records(ledger if isinstance(ledger, list) else []),
        recording=recording,
        loads=tuple(filter(None, map(_load, _lines(folder / LOADS)))),
    )


def _whole(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> tuple[Record, ...]:
    """Without a last line that is being written."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return _records(found)


def _records(values: Sequence[Any]) -> tuple[Record, ...]:
    return tuple(value for value in values if isinstance(value, dict))


def _load(record: Record) -> Load | None:
    """None for a line that is none: pages are made of damaged runs too."""
    try:
        tokens = tuple(tuple(int(n) for n in row) for row in record["tokens"])
        load = Load(int(record["step"]), tuple(int(n) for n in record["layers"]), tokens)
    except (KeyError, TypeError, ValueError):
        return None
    whole = tokens and tokens[0] and len({len(row) for row in tokens}) == 1 and len(tokens) == len(load.layers)
    return load if whole else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
