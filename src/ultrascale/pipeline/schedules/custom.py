"""A plan from a file, so that anyone can bring an order of their own: `custom:PATH`.

JSON as `ultrascale schedule … --json` prints it: `actions`, per rank a list of texts; `placement` and `microbatches`
where what the actions say is not meant. Or CSV: a row per rank, an action per cell, empty cells for nothing. Actions
are written as in actions.py or as PyTorch writes them (`0F1`, `3I2`, `2W0`, `1B3`, `(0F1;7B0)OVERLAP_F_B`). Only what
is computed is given; messages and reductions are put in as for every schedule.

It is validated like every schedule; what is wrong is said with its row and column, both counted from 1.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.pipeline.actions import COMPUTE, Action, Kind, Plan, ScheduleError, pair, parse_action
from ultrascale.pipeline.activations import peak_activations
from ultrascale.pipeline.schedules.placement import Placement
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.validate import validate

_TORCH_KINDS = {"F": Kind.F, "B": Kind.B, "I": Kind.BI, "W": Kind.BW}
_TORCH = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_TORCH_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_TORCH_OTHER = re.compile(r"\d+(SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)


@dataclass(frozen=True)
class Custom:
    """What a file says: a schedule of one size.

    columns  rank → for each of its actions, the place in the file: column of the row, or of the list
    """

    path: Path
    plan: Plan
    columns: tuple[tuple[int, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """Stages per rank."""
        return self.plan.stages // self.plan.ranks

    def requires(self, request: Request) -> None:
        """Raises ScheduleError when the file is for another number of ranks or micro-batches."""
        for what, have, asked in (
            ("ranks", self.plan.ranks, request.ranks),
            ("micro_batches", self.plan.micro_batches, request.micro_batches),
        ):
            if have != asked:
                raise ScheduleError(f"{self.path} is a plan for {what}={have}, not for {asked}; ask for {have}")

    def schedule(self, request: Request) -> Plan:
        """The plan of the file. Raises ScheduleError, with row and column, when it is wrong."""
        self.requires(request)
        try:
            validate(self.plan)
        except ScheduleError as error:
            place = f"{self.path}"
            if error.rank is not None:
                place += f", row {error.rank + 1}"
                if error.index is not None:
                    place += f", column {self.columns[error.rank][error.index]}"
            raise ScheduleError(f"{place}: {error}") from None
        return self.plan

    def memory_bound(self, request: Request) -> tuple[int, ...]:
        """Activations that each rank holds at most: what was asked for, or as many as the plan needs."""
        if request.activation_limit is not None:
            return (request.activation_limit,) * request.ranks
        return peak_activations(self.plan)


def read(path: Path) -> Custom:
    """The plan of a file, not yet validated. Raises ScheduleError when the file cannot be read as one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ScheduleError(f"{path} does not exist; custom:PATH names a .json or .csv file") from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ScheduleError(f"{path} cannot be read: {reason}") from None
    except ValueError as error:  # a NUL in the path
        raise ScheduleError(f"{str(path)!r} cannot be read: {error}") from None
    given: dict[str, Any] = {}
    if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
        given = _json(path, text)
        cells = given["actions"]
    else:
        cells = _csv(path, text)
    if not cells:
        raise ScheduleError(f"{path} has no rows; give one for each rank")
    rows = [_row(path, number, row) for number, row in enumerate(cells, start=1)]
    actions = tuple(tuple(action for _, action in row) for row in rows)
    runs = [(part, rank) for rank, row in enumerate(actions) for action in row for part in action.computes]
    if not runs:
        raise ScheduleError(f"{path} has no action; write for example F0.0 and B0.0")
    placement = _placement(path, given["placement"]) if "placement" in given else _inferred(path, runs)
    # What enters the first stage says how many there are, so that a number too large elsewhere is found there.
    entering = (part.micro_batch for part, _ in runs if part.stage == 0)
    micro_batches = given.get("microbatches", 1 + max(entering, default=0))
    if len(placement) % len(actions):
        raise ScheduleError(
            f"{path} has {len(placement)} stages on {len(actions)} ranks; give a multiple of {len(actions)} stages "
            "(pipeline.layout may leave some without layers)"
        )
    plan = Plan(f"custom:{path}", placement, micro_batches, actions)
    return Custom(path, plan, tuple(tuple(column for column, _ in row) for row in rows))


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{path}, row {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ScheduleError(f"{path} is not a plan: its JSON is nested without end") from None
    except ValueError as error:  # a number of thousands of digits
        raise ScheduleError(f"{path} is not a plan: {error}") from None
    rows = given.get("actions") if isinstance(given, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ScheduleError(f'{path} is not a plan; write {{"actions": [["F0.0", "B0.0"], …]}}, a list for each rank')
    micro_batches = given.get("microbatches", 1)
    if type(micro_batches) is not int or micro_batches < 1:
        raise ScheduleError(f"{path}: microbatches={micro_batches!r} is no number of them; give 1 or more")
    return given


def _csv(path: Path, text: str) -> list[list[str]]:
    try:
        rows = list(csv.reader(text.splitlines(), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"{path} is not CSV: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()  # empty lines at the end of the file
    return rows


def _row(path: Path, number: int, cells: Sequence[Any]) -> list[tuple[int, Action]]:
    """(column, action) of a rank's cells that are not empty."""
    row = []
    for column, cell in enumerate(cells, start=1):
        try:
            if not isinstance(cell, str):
                raise ScheduleError(f"{cell!r} is not the text of an action; write for example F0.3")
            if cell.strip():
                row.append((column, _action(cell.strip())))
        except ScheduleError as error:
            raise ScheduleError(f"{path}, row {number}, column {column}: {error}") from None
    return row


def _action(text: str) -> Action:
    if match := _TORCH.fullmatch(text):
        return Action(_TORCH_KINDS[match[2]], int(match[1]), int(match[3]))
    if match := _TORCH_PAIR.fullmatch(text):
        return pair(_action(match[1].strip()), _action(match[2].strip()))
    if text.startswith("FB(") and not text.endswith(")"):
        raise ScheduleError(f'{text!r} is half an action; in CSV write it in quotes, "FB(F0.3,B5.1)"')
    action = None if _TORCH_OTHER.fullmatch(text) else parse_action(text)
    if action is None or action.kind not in COMPUTE:
        raise ScheduleError(f"{text!r} computes nothing; messages and reductions are put in later, leave them out")
    return action


def _placement(path: Path, given: Any) -> Placement:
    whole = isinstance(given, list) and all(isinstance(ranks, list) for ranks in given)
    if not whole or not all(type(rank) is int for ranks in given for rank in ranks):
        raise ScheduleError(f"{path}: placement is not a list of ranks for each stage; write [[0], [1], …]")
    return tuple(map(tuple, given))


def _inferred(path: Path, runs: Sequence[tuple[Action, int]]) -> Placement:
    """Each stage on the ranks where its actions stand, the rank of its first micro-batch before others."""
    held: dict[int, dict[int, int]] = {}
    for part, rank in runs:
        first = held.setdefault(part.stage, {})
        first[rank] = min(part.micro_batch, first.get(rank, part.micro_batch))
    last = max(held)
    if len(held) <= last:
        missing = next(stage for stage in range(last) if stage not in held)
        raise ScheduleError(f"{path} has actions of stage {last} and none of stage {missing}; give those of all stages")
    return tuple(tuple(sorted(held[stage], key=held[stage].__getitem__)) for stage in range(last + 1))
