"""What a person sees of a run: a table at the start, a line per step, and on a terminal a progress bar below
them.

The line is for programs too, and has one form, wherever it is written:

    step 120/1000 | loss 2.4131 | grad_norm 0.83 | lr 3.0e-04 | tokens/s 12.3k | MFU 41.2% | memory 1.2 GiB |
    ETA 3h12m

What is not known is `n/a`. With experts `| expert_load 1.31` follows, the worst of all layers; a step with a validation
ends in `| validation_loss 2.5012`. Exact values stand in metrics.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

# How much the newest step counts in the smoothed step time of the ETA.
ETA_WEIGHT = 0.1


@dataclass(frozen=True)
class StartUp:
    """What is shown before the first step.

    name, run_dir     of the run
    device            e.g. "cpu" or "NVIDIA H100 80GB HBM3"
    axes              mesh axis → size, outermost first
    parameters        of the whole model, tied ones once
    rank_parameters   held by rank 0
    global_size       sequences per step
    micro_size        sequences per micro-batch and replica
    replicas          parts that the global batch is divided into (dp · ep)
    sequence_length   tokens
    schedule          of the pipeline
    precision         stage of a number → dtype, e.g. {"compute": "bfloat16", "masters": "float32"}
    steps             run.steps
    first_step        the first step of this start; above 1 when the run is resumed
    tokens_before     read before it
    notes             anything else: heading → text
    """

    name: str
    run_dir: str
    device: str
    axes: Mapping[str, int]
    parameters: int
    rank_parameters: int
    global_size: int
    micro_size: int
    replicas: int
    sequence_length: int
    schedule: str
    precision: Mapping[str, str]
    steps: int
    first_step: int = 1
    tokens_before: int = 0
    notes: Mapping[str, str] | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The table: (heading, text)."""
        world = 1
        for size in self.axes.values():
            world *= size
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.axes.items())
        micro_batches = self.global_size // (self.replicas * self.micro_size)
        tokens = self.global_size * self.sequence_length
        in_all = self.tokens_before + tokens * max(0, self.steps + 1 - self.first_step)
        begins = f", resumed at step {self.first_step}" if self.first_step > 1 else ""
        if self.first_step > self.steps:
            begins = f", finished already at step {self.first_step - 1}"
        return [
            ("run", f"{self.name} in {self.run_dir}"),
            ("mesh", f"{mesh} = {world} {'rank' if world == 1 else 'ranks'} on {self.device}"),
            (
                "parameters",
                f"{self.parameters:,} ({count(self.parameters)}), {self.rank_parameters:,} on rank 0",
            ),
            (
                "batch",
                f"{self.global_size} sequences = {self.replicas} replicas × {micro_batches} micro-batches × "
                f"{self.micro_size}; × {self.sequence_length} tokens = {tokens:,} tokens a step",
            ),
            ("schedule", self.schedule),
            ("precision", ", ".join(f"{stage} {dtype}" for stage, dtype in self.precision.items())),
            ("steps", f"{self.steps:,}{begins}, {in_all:,} tokens in all"),
            *(self.notes or {}).items(),
        ]


class Console:
    """The console of a run; on ranks other than 0 every method does nothing.

    steps   run.steps
    every   observe.console_every: a line each so many steps, and for the last
    stream  where to write; standard output when None
    tty     whether it is a terminal, with a progress bar; found out when None
    """

    def __init__(
        self,
        steps: int,
        *,
        rank: int = 0,
        every: int = 1,
        stream: TextIO | None = None,
        tty: bool | None = None,
    ) -> None:
        self._steps = steps
        self._every = every
        self._step_time: float | None = None
        # Not left to rich, which takes FORCE_COLOR for a terminal and would draw bars into a log file.
        tty = (stream or sys.stdout).isatty() if tty is None else tty
        self._console = RichConsole(file=stream, force_terminal=tty, quiet=rank != 0, highlight=False)
        self._progress: Progress | None = None
        if rank == 0 and self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(None),
                MofNCompleteColumn(),
                TextColumn("ETA {task.fields[eta]}"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._task = self._progress.add_task("step", total=steps, eta="n/a")

    def start(self, start_up: StartUp) -> None:
        """Shows the table of the start-up."""
        rows = start_up.rows()
        if self._console.is_terminal:
            table = Table.grid(padding=(0, 2))
            for heading, text in rows:
                table.add_row(Text(heading, style="bold"), Text(text))
            self._console.print(table)
        else:
            for heading, text in rows:
                self.say(f"{heading:<11} {text}")
        if self._progress is not None:
            self._progress.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Shows a step: the record of metrics.jsonl."""
        step, took = record["step"], record["step_time_s"]
        smoothed = took if self._step_time is None else self._step_time + ETA_WEIGHT * (took - self._step_time)
        self._step_time = smoothed
        eta = duration(smoothed * (self._steps - step))
        if self._progress is not None:
            self._progress.update(self._task, completed=step, eta=eta)
            self._progress.refresh()
        if self._every and (step % self._every == 0 or step == self._steps):
            self.say(step_line(record, self._steps, eta))

    def say(self, text: str) -> None:
        """Writes a line of text, as it is, above the progress bar."""
        # Not wrapped at the width of a terminal: a line is a line, for those who read it by program.
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Takes the progress bar away; safe to call twice."""
        if self._progress is not None:
            self._progress.stop()


def step_line(record: Mapping[str, Any], steps: int, eta: str) -> str:
    """The line of a step, without its newline."""
    parts = [
        f"step {record['step']}/{steps}",
        f"loss {_number(record['loss'], '.4f')}",
        f"grad_norm {_number(record['grad_norm'], '.2f')}",
        f"lr {_number(record['lr'], '.1e')}",
        f"tokens/s {_number(record['tokens_per_s'], count)}",
        f"MFU {_number(record['mfu'], '.1%')}",
        f"memory {_number(record['peak_memory_bytes'], size)}",
        f"ETA {eta}",
    ]
    loads = [load for load in record.get("expert_load", ()) if load is not None]
    if loads:
        parts.append(f"expert_load {max(loads):.2f}")
    if record.get("validation_loss") is not None:
        parts.append(f"validation_loss {_number(record['validation_loss'], '.4f')}")
    return " | ".join(parts)


def count(number: float) -> str:
    """A number in three or four digits: 812, 12.3k, 8.03B."""
    for unit, digits in (("", 0), ("k", 1), ("M", 1), ("B", 2), ("T", 2)):
        # 999.96k would print as 1000.0k.
        if round(abs(number), digits) < 1000 or unit == "T":
            return f"{number:.{digits}f}{unit}"
        number /= 1000
    raise AssertionError("the last unit takes any number")


def size(number: float) -> str:
    """Bytes with their unit: 512 B, 1.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        digits = 0 if unit == "B" else 1
        if round(number, digits) < 1024 or unit == "TiB":
            return f"{number:.{digits}f} {unit}"
        number /= 1024
    raise AssertionError("the last unit takes any number")


def duration(seconds: float) -> str:
    """A time in its two largest units: 42s, 12m05s, 3h12m, 2d03h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(whole / 60)
    if minutes < 1440:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(whole / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def _number(value: float | None, form: Any) -> str:
    if value is None:
        return "n/a"
    return form(value) if callable(form) else format(value, form)
