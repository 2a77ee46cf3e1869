"""What one layout saves another loads: every tensor bit for bit, and three steps more are those of an unbroken run.

A few pairs here, the matrix in `make prove`, which goes on where it was broken off and writes its table to
benchmarks/results/reshard_matrix.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from resharding import MATRIX, SAMPLE, Pair, ReshardError, cell, check, layouts_of, saved
from test_prove import ROOT, sources

from ultrascale.checkpoint import read

DONE = ROOT / "build" / "prove" / "reshard_matrix.jsonl"
TABLE = ROOT / "benchmarks" / "results" / "reshard_matrix.md"


@pytest.mark.parametrize("pair", SAMPLE, ids=str)
def test_a_checkpoint_goes_on_under_another_layout_as_if_nothing_had_been(pair: Pair) -> None:
    check(pair)


def test_the_matrix_is_as_wide_as_it_says() -> None:
    assert len({str(pair) for pair in MATRIX}) == len(MATRIX) >= 40
    assert all(pair.saved != pair.loaded for pair in MATRIX)
    worlds = {(cell(p.model, p.saved).world, cell(p.model, p.loaded).world) for p in MATRIX}
    assert {(1, 8), (8, 1)} <= worlds
    for model in {pair.model for pair in MATRIX}:
        of_it = [pair for pair in MATRIX if pair.model == model]
        assert {p.saved for p in of_it} == {p.loaded for p in of_it} == set(layouts_of(model))


def test_a_load_that_mixes_up_two_tensors_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: values that are off by one row are found, and the tensor is named."""
    pair = Pair("dense", "one process", "one process")
    original = read._copy

    def shifted(reader: Any, place: Any, dtype: str, box: Any, sha: Any) -> None:
        original(reader, place, dtype, box, sha)
        if box.name == "optimizer.exp_avg/layers.1.mlp.up_proj.weight":
            box.tensor.copy_(box.tensor.roll(1, 0))

    saved(pair.model, pair.saved)
    monkeypatch.setattr(read, "_copy", shifted)
    with pytest.raises(ReshardError, match=r"elements of optimizer\.exp_avg/layers\.1\.mlp\.up_proj\.weight are not"):
        check(pair)


def done() -> dict[str, dict[str, Any]]:
    """Pairs that have held for these sources."""
    if not DONE.exists():
        return {}
    records = [json.loads(line) for line in DONE.read_text().splitlines()]
    return {record["pair"]: record for record in records if record["sources"] == sources()}


@pytest.mark.prove
@pytest.mark.parametrize("pair", MATRIX, ids=str)
def test_pair_of_the_full_matrix(pair: Pair) -> None:
    if str(pair) in done():
        return
    record = {"pair": str(pair), **check(pair), "sources": sources()}
    DONE.parent.mkdir(parents=True, exist_ok=True)
    with open(DONE, "a") as file:
        file.write(json.dumps(record) + "\n")


def rows(records: dict[str, dict[str, Any]]) -> Iterator[str]:
    for pair in MATRIX:
        record = records[str(pair)]
        worst = "—" if record["worst"] is None else f"{record['worst']:.1e}"
        worlds = f"{cell(pair.model, pair.saved).world} → {cell(pair.model, pair.loaded).world}"
        yield f"| {pair.model} | {worlds} | {pair.saved} | {pair.loaded} | {record['tensors']} | {worst} |"


@pytest.mark.prove
def test_the_table_of_the_reshard_matrix_is_written() -> None:
    records = done()
    missing = [str(pair) for pair in MATRIX if str(pair) not in records]
    assert not missing, f"{len(missing)} pairs have not held, the first: {missing[0]}"
    lines = [
        "# From one layout to another",
        "",
        f"Written by `make prove` on {time.strftime('%Y-%m-%d')} with torch {torch.__version__}, on CPU with gloo.",
        "A run of AdamW saves after two steps under one layout, and goes on for three under the other. After the load",
        "every logical tensor (parameters, masters, both moments, biases of routers), put together from all ranks, is",
        "equal bit for bit to what was saved, and copies are equal to each other; weights in bfloat16 are the masters,",
        "rounded. The figure is the largest relative difference of any loss, norm, weight or moment of the steps after",
        "from one process in float64 that was never interrupted.",
        "",
        "| model | processes | saved under | loaded under | tensors, equal bit for bit | three steps more |",
        "|---|---|---|---|---|---|",
        *rows(records),
        "",
        f"{len(MATRIX)} pairs.",
    ]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")
