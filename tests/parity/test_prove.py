"""The full matrix of `make prove`: every layout up to eight processes, written down with its worst difference.

A cell that has held for the same sources is not run again, so that a broken-off run goes on where it was. The table in
benchmarks/results/ is what was proven, and when.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import context
import mla
import moe
import mtp
import pytest
import schedules
import torch
import zero
from cells import Cell, check

from ultrascale.assembly import training_plan

ROOT = Path(__file__).parents[2]
DONE = ROOT / "build" / "prove" / "parity.jsonl"
TABLE = ROOT / "benchmarks" / "results" / "parity.md"


def layouts() -> Iterator[tuple[int, dict[str, Any]]]:
    """(world, layout): tp with and without sequence parallelism × dp × pp with both schedules and unequal splits."""
    for tp, dp, pp in itertools.product((1, 2, 4), repeat=3):
        if tp * dp * pp > 8 or tp * dp * pp == 1:
            continue
        base = {f"parallel.{axis}": size for axis, size in (("tp", tp), ("dp", dp), ("pp", pp)) if size > 1}
        forms: list[dict[str, Any]] = [{}]
        if tp > 1:
            forms = [{"parallel.sequence_parallel": on} for on in (True, False)]
        if pp > 1:
            split = {2: (3, 1), 4: (0, 2, 2, 0)}[pp]
            schedules = [
                {"pipeline.schedule": "1f1b"},
                {"pipeline.schedule": "gpipe"},
                {"pipeline.schedule": "1f1b", "pipeline.layout": split},
            ]
            forms = [{**form, **schedule} for form in forms for schedule in schedules]
        for form in forms:
            yield tp * dp * pp, {**base, **form}


VARIANTS: list[dict[str, Any]] = [
    {"model.tie_word_embeddings": tied, "recompute.mode": mode, **more}
    for tied in (False, True)
    for mode, more in (
        ("none", {"batch.micro_size": 1}),
        ("full", {"batch.micro_size": 2, "model.vocab_size": 257}),
        # As many KV heads as heads, and an odd vocabulary smaller than the padding's multiple.
        ("selective", {"model.num_key_value_heads": 4, "model.vocab_size": 101, "parallel.bucket_bytes": 1}),
    )
]
MATRIX = [Cell(world, {**layout, **variant}) for world, layout in layouts() for variant in VARIANTS]
PARTS = (schedules, zero, context, mla, moe, mtp)
MATRIX += [cell for part in PARTS for cell in part.matrix() if cell not in MATRIX]


@cache
def sources() -> str:
    """A hash of everything that a cell's outcome depends on."""
    files = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/parity/*.py"), ROOT / "tests/pool.py"])
    digest = hashlib.sha256(torch.__version__.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def done() -> dict[str, dict[str, Any]]:
    """Cells that have held for these sources."""
    if not DONE.exists():
        return {}
    records = [json.loads(line) for line in DONE.read_text().splitlines()]
    return {record["cell"]: record for record in records if record["sources"] == sources()}


@pytest.mark.prove
def test_every_cell_of_the_full_matrix_is_a_run_that_could_begin() -> None:
    """As far as its schedule goes; else it would be found out hours later."""
    about = ("pipeline.", "batch.", "parallel.pp", "parallel.dp", "parallel.ep", "parallel.zero", "model.num_h")
    alike = {tuple(item for item in cell.overrides.items() if item[0].startswith(about)): cell for cell in MATRIX}
    assert len(alike) > 100
    for cell in alike.values():
        try:
            training_plan(cell.config())
        except Exception as error:
            raise AssertionError(f"{cell}: {error}") from error


@pytest.mark.prove
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_layout_of_the_full_matrix_equals_one_process(cell: Cell) -> None:
    if str(cell) in done():
        return
    worst = check(cell)
    DONE.parent.mkdir(parents=True, exist_ok=True)
    with open(DONE, "a") as file:
        file.write(json.dumps({"cell": str(cell), "world": cell.world, "worst": worst, "sources": sources()}) + "\n")


@pytest.mark.prove
def test_the_table_of_the_full_matrix_is_written() -> None:
    records = done()
    missing = [str(cell) for cell in MATRIX if str(cell) not in records]
    assert not missing, f"{len(missing)} cells have not held, the first: {missing[0]}"
    by_layout: dict[tuple[int, str], list[float]] = {}
    for cell in MATRIX:
        layout = str(Cell(cell.world, _layout_of(cell)))
        by_layout.setdefault((cell.world, layout), []).append(records[str(cell)]["worst"])
    lines = [
        "# Parity with one process",
        "",
        f"Written by `make prove` on {time.strftime('%Y-%m-%d')} with torch {torch.__version__}: float64 on CPU with",
        "gloo, three SGD steps on uneven target masks. The figure is the largest relative difference of any loss,",
        "gradient, norm or weight from one process, over the variants: tied or not × recompute none, full, selective",
        "(with other micro-batches, vocabularies, KV heads and bucket sizes).",
        "",
        "| processes | layout | variants | worst difference |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {world} | {layout} | {len(worst)} | {max(worst):.1e} |" for (world, layout), worst in by_layout.items()
    ]
    lines += ["", f"{len(MATRIX)} cells."]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")


def _layout_of(cell: Cell) -> dict[str, Any]:
    keys = ("parallel.tp", "parallel.dp", "parallel.pp", "parallel.sequence_parallel")
    return {k: v for k, v in cell.overrides.items() if k in keys or k.startswith("pipeline.")}
