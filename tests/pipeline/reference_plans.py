"""Orders and numbers of the published schedules, as plans."""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from ultrascale.pipeline.actions import Action, Plan, pair, parse_action
from ultrascale.pipeline.costs import Costs

FOLDER = Path(__file__).parents[1] / "reference"


FIXED = (
    "gpipe",
    "1f1b",
    "1f1b_eager",
    "interleaved_1f1b",
    "grouped_interleaved",
    "interleaved_1f1b_a2a_overlap",
    "looped_bfs",
    "looped_bfs_ascending",
    "zb_h1",
    "zb_h1_mds",
    "interleaved_zb",
    "zb_v",
    "dualpipe",
    "dualpipe_v",
)
"""Schedules for training whose order does not depend on costs."""

COST_AWARE = ("zb1p_auto", "zb2p_auto", "zb_v_auto", "v_half", "v_min", "1f1b_v")
"""Those whose order does: the files have the orders for costs of one."""


@cache
def rows() -> list[dict[str, str]]:
    with (FOLDER / "schedules_reference.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@cache
def orders() -> dict[str, list[list[str]]]:
    loaded: dict[str, list[list[str]]] = json.loads((FOLDER / "schedules_orders.json").read_text())
    return loaded


def key_of(row: dict[str, str]) -> str:
    return f"{row['schedule']}|P={row['P']}|M={row['M']}|v={row['v']}"


def costs_of(row: dict[str, str]) -> Costs:
    values: dict[str, Any] = dict(item.split("=") for item in row["costs"].split(";"))
    pair_cost = None if values["FB"] == "F+BI+BW" else float(values["FB"])
    return Costs(float(values["F"]), float(values["BI"]), float(values["BW"]), float(values["comm"]), pair_cost)


def plan_of(key: str) -> Plan:
    """A published order as a plan; the second of two directions has the upper half of the micro-batches."""
    name, ranks, micro_batches, _ = (part.rpartition("=")[2] for part in key.split("|"))
    half = int(micro_batches) // 2
    actions = tuple(tuple(_action(text, half) for text in row) for row in orders()[key])
    held: dict[int, list[int]] = {}
    for rank, row in enumerate(actions):
        for stage in sorted({part.stage for action in row for part in action.computes}):
            held.setdefault(stage, []).append(rank)
    placement = tuple(tuple(held[stage]) for stage in range(len(held)))
    assert len(actions) == int(ranks)
    return Plan(name, placement, int(micro_batches), actions)


def _action(text: str, half: int) -> Action:
    if both := re.fullmatch(r"FB\((.*),(.*)\)", text):
        return pair(_action(both[1], half), _action(both[2], half))
    found = re.fullmatch(r"([FBIW])(u?)(\d+)\.(\d+)", text)
    assert found is not None, text
    kind = {"I": "BI", "W": "BW"}.get(found[1], found[1])
    return parse_action(f"{kind}{found[3]}.{int(found[4]) + (half if found[2] else 0)}")
