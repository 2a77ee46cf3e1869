"""The run folder: what a run says about itself while it runs, in files that other programs read.

    config.yaml     the resolved config
    manifest.json   world, axes, hosts, groups, precision, versions
    status.json     state, step, reason, exit_code
    metrics.jsonl   one JSON object per step and nothing else
    events.jsonl    everything else that happens, one JSON object each
    expert_load.jsonl   of models with experts, tokens of each expert at some steps
    ledger.json     bytes per step of each kind of collective
    checkpoints/
    run.lock        held by the process that writes here; failure-RANK.json of ranks that failed

Rank 0 writes. A whole file is replaced at once, so that a reader sees the old or the new one; a line is
written at once, and a line that a crash tore is cut away by the next claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from ultrascale.config import meaning

State = Literal["starting", "running", "finished", "stopped", "failed"]

LOADS = "expert_load.jsonl"
BY_STEP = ("metrics.jsonl", LOADS)
"""Files of lines that a resume cuts back."""

# Keys that every line of metrics.jsonl has; beside them stand aux_*, validation_loss and whatever a run adds.
METRICS = (
    "step",
    "loss",
    "lm_loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_time_s",
    "mfu",
    "peak_memory_bytes",
)


class RunFolderError(Exception):
    """The run folder cannot be used; the text says why, and what to do instead."""


class RunFolder:
    """A run's folder, claimed by this run: RunFolder("runs/debug", config=…, resume="auto").

    path         run.dir; made when it is not there
    config       the resolved config as plain dicts and lists; kept as config.yaml, and compared with the one that
                 is there in the keys that make it this run and no other (`config/meaning.py`)
    resume       run.resume: auto | never | PATH; `never` wants a folder that holds no run
    rank         only rank 0 looks at the folder and writes; on the others every method does nothing

    Raises RunFolderError on rank 0 when the folder cannot be written, holds a different run, or holds any run
    under resume=never.
    """

    def __init__(self, path: str | Path, *, config: Mapping[str, Any], resume: str = "auto", rank: int = 0) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._writes = rank == 0
        self._rank = rank
        self._last_step = 0
        self.finished_step = 0
        """The step after which a run finished here, as it was found; 0 when none did. Rank 0 knows."""
        if self._writes:
            self._claim(config, resume)
            if not self._holds_a_run():
                self.write_config(config)

    @property
    def last_step(self) -> int:
        """Of the last line of metrics.jsonl; 0 for none."""
        return self._last_step

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes config.yaml. Over that of an older part of the run only once nothing can refuse this one any more."""
        if self._writes:
            text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            self._replace("config.yaml", text)

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Writes manifest.json."""
        if self._writes:
            self._replace("manifest.json", _json(manifest, indent=1) + "\n")

    def write_ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes ledger.json: rows of axes, op, phase, calls, bytes (per step and rank)."""
        if self._writes:
            self._replace("ledger.json", "[\n" + ",\n".join(_json(row) for row in rows) + "\n]\n")

    def status(self, state: State, step: int, reason: str | None = None, exit_code: int | None = None) -> None:
        """Writes status.json. The exit code is said here because a launcher does not hand it on."""
        if self._writes:
            status = {"state": state, "step": step, "reason": reason, "exit_code": exit_code}
            self._replace("status.json", _json(status) + "\n")

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Writes the step's line of metrics.jsonl: Python numbers, floats in full precision.

        JSON has no NaN and no infinity: such a value is written as null, and what it was goes to
        events.jsonl. Raises ValueError when a key of METRICS is missing, or the step is not after the last
        one.
        """
        if not self._writes:
            return
        missing = [key for key in METRICS if key not in record]
        if missing:
            raise ValueError(f"metrics of step {record.get('step')}: keys {missing} are missing")
        if type(record["step"]) is not int or record["step"] <= self._last_step:
            raise ValueError(f"metrics of step {record['step']!r} after those of step {self._last_step}")
        lost = {key: value for key, value in record.items() if _not_finite(value)}
        self._append("metrics.jsonl", {key: None if key in lost else value for key, value in record.items()})
        self._last_step = record["step"]
        if lost:
            self.event("not_finite", step=record["step"], values=lost)

    def expert_load(self, step: int, layers: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Writes a line of expert_load.jsonl: step, numbers of the layers with experts, tokens [layers][experts]."""
        if self._writes:
            self._append(LOADS, {"step": step, "layers": list(layers), "tokens": [list(row) for row in tokens]})

    def _timeline(self) -> Path:
        return self.path / f"timeline-{self._rank}.jsonl"

    def timeline(self, step: int, actions: Iterable[tuple[str, int, int, float, float, str]]) -> None:
        """Adds a step's executed actions (kind, stage, micro-batch, start, end in seconds, text) to this rank's file.

        The only file that every rank writes: `timeline-RANK.jsonl`.
        """
        names = ("kind", "stage", "micro_batch", "start", "end", "action")
        text = "".join(_json({"step": step, **dict(zip(names, action, strict=True))}) + "\n" for action in actions)
        with open(self._timeline(), "a") as file:
            file.write(text)

    def failure(self, reason: str) -> None:
        """Says why this rank failed, in a file of its own: `failure-RANK.json`. Every rank may write one."""
        with contextlib.suppress(OSError):
            path = self.path / f"failure-{self._rank}.json"
            path.write_text(_json({"time": time.time(), "rank": self._rank, "reason": reason}) + "\n")

    def first_failure(self) -> str | None:
        """What the rank said that failed first."""
        found = [self._read(path.name) for path in self.path.glob("failure-*.json")]
        found = [failure for failure in found if {"time", "reason"} <= failure.keys()]
        return min(found, key=lambda failure: failure["time"])["reason"] if found else None

    def forget_failures(self) -> None:
        """Removes what an earlier start left."""
        if self._writes:
            for path in self.path.glob("failure-*.json"):
                path.unlink(missing_ok=True)

    def event(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        """Writes a line of events.jsonl: time (seconds since 1970), event, step, and what else there is to
        say."""
        if self._writes:
            self._append("events.jsonl", {"time": time.time(), "event": event, "step": step, **_tame(fields)})

    def cut_back(self, step: int) -> None:
        """Cuts what is written by step, and this rank's timeline, back to the step of the checkpoint that the run goes
        on from; 0 for none."""
        timeline = self._timeline()
        if timeline.exists():
            kept = [line for line in self._lines(timeline.name) if 0 < (_step(line) or 0) <= step]
            self._replace(timeline.name, b"".join(line + b"\n" for line in kept))
        if not self._writes:
            return
        if (self.path / LOADS).exists():
            self._cut_lines(LOADS, step)
        self._last_step = self._cut_lines("metrics.jsonl", step)

    def _cut_lines(self, name: str, step: int) -> int:
        """Returns the step of the last line that stays, 0 for none."""
        kept, last = [], 0
        for line in self._lines(name):
            found = _step(line)
            # One line per step, in order: what is torn, repeated or of the future goes.
            if found is not None and last < found <= step:
                kept.append(line + b"\n")
                last = found
        self._replace(name, b"".join(kept))
        return last

    def sync(self) -> None:
        """Forces the lines written so far to disk; before a checkpoint, so that they outlive what it
        outlives."""
        if self._writes:
            for name in (*BY_STEP, "events.jsonl"):
                if (self.path / name).exists():
                    with open(self.path / name, "rb") as file:
                        os.fsync(file.fileno())

    def _lock(self, way_out: str) -> None:
        """Holds the folder for as long as this process lives: two runs in one would save over each other."""
        self._lock_file = open(self.path / "run.lock", "a+")  # noqa: SIM115
        try:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._lock_file.seek(0)
            raise RunFolderError(
                f"run.dir={self.path} is in use by {self._lock_file.read().strip() or 'another process'}; "
                f"wait for it, or {way_out}"
            ) from error
        except OSError:
            return  # a file system without locks
        self._lock_file.truncate(0)
        self._lock_file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._lock_file.flush()

    def _claim(self, config: Mapping[str, Any], resume: str) -> None:
        way_out = "choose another folder with run.dir=… or run.name=…"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            reason = error.strerror or error
            raise RunFolderError(f"run.dir={self.path} cannot be written: {reason}; {way_out}") from error
        self._lock(way_out)
        if "tensors" in self._read("manifest.json"):
            raise RunFolderError(f"run.dir={self.path} is a checkpoint, not a run folder; {way_out}")
        if self._holds_a_run():
            if resume == "never":
                raise RunFolderError(
                    f"run.resume=never, and run.dir={self.path} holds a run already; go on with it by "
                    f"run.resume=auto, or {way_out}"
                )
            try:
                saved = yaml.safe_load((self.path / "config.yaml").read_bytes())
                changed = meaning.refused(meaning.differences(saved, config), config)
            except (OSError, yaml.YAMLError, AttributeError) as error:
                raise RunFolderError(
                    f"run.dir={self.path} holds a run whose config.yaml cannot be read; {way_out}"
                ) from error
            before = self._read("status.json")
            if before.get("state") == "finished" and type(before.get("step")) is int:
                self.finished_step = before["step"]
            if changed:
                raise RunFolderError(
                    f"run.dir={self.path} holds a different run: {'; '.join(change.text for change in changed)}; "
                    f"{meaning.way_out(changed, config)}, or {way_out}"
                )
        for name in (*BY_STEP, "events.jsonl"):
            self._cut_torn_line(name)
        for line in self._lines("metrics.jsonl"):
            self._last_step = max(self._last_step, _step(line) or 0)
        self.status("starting", self._last_step)

    def _holds_a_run(self) -> bool:
        """Whether anything here would be missed: a step's metrics, or a checkpoint."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            return True
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*"))

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _lines(self, name: str) -> Iterator[bytes]:
        path = self.path / name
        if path.exists():
            with open(path, "rb") as file:
                yield from (line.rstrip(b"\n") for line in file)

    def _cut_torn_line(self, name: str) -> None:
        path = self.path / name
        if not path.exists():
            return
        with open(path, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - 65536)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                end = start + newline + 1
                if newline >= 0:
                    break
            file.truncate(end)

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = (_json(record) + "\n").encode()
        # Opened for each line: microseconds a step, and nothing is left in a buffer when the process dies.
        try:
            with open(self.path / name, "ab") as file:
                file.write(line)
        except OSError as error:
            raise self._unwritable(name, error) from error

    def _replace(self, name: str, content: str | bytes) -> None:
        path = self.path / name
        unfinished = path.with_name(f".{name}.tmp")
        try:
            with open(unfinished, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise self._unwritable(name, error) from error

    def _unwritable(self, name: str, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"{self.path / name} cannot be written: {error.strerror or error}; make room or mend the disk, "
            "and start the same command again: it goes on from its newest checkpoint"
        )


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, allow_nan=False, indent=indent)


def _step(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _tame(value: Any) -> Any:
    """The value with its NaNs and infinities as text."""
    if isinstance(value, Mapping):
        return {key: _tame(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tame(inner) for inner in value]
    return str(value) if _not_finite(value) else value
