"""How evenly experts are used: figures, the file of counts, the console, and pictures that can be read at any size."""

from __future__ import annotations

import io
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recorded_run import lines, metrics, write_run
from ultrascale.observe.console import Console
from ultrascale.observe.expert_load import balance_figures, busiest, dropped_figures, entropy
from ultrascale.observe.expert_pictures import CURVES, EARLIER
from ultrascale.observe.heat_map import COLOURS, EDGES, NOTHING, UNKNOWN, Axes, colour, heat_map, loads_of
from ultrascale.observe.report import page
from ultrascale.observe.run_folder import RunFolder
from ultrascale.observe.run_record import read_run

CONFIG = {"run": {"seed": 1}}


def counts(layers: int, experts: int) -> list[list[int]]:
    """Uneven, each layer otherwise; the first expert of the second layer gets nothing."""
    found = [[1 + (7 * expert + 3 * layer) % 11 for expert in range(experts)] for layer in range(layers)]
    found[1][0] = 0
    return found


# ---- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "load", "even"),
    [
        ([5, 5, 5, 5], 1.0, 1.0),
        ([20, 0, 0, 0], 4.0, 0.0),
        ([10, 10, 0, 0], 2.0, 0.5),
        ([3, 1], 1.5, -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))),
        ([7], 1.0, 1.0),
        ([0, 0], None, None),
    ],
)
def test_load_and_entropy_are_their_definitions(tokens: list[int], load: float | None, even: float | None) -> None:
    assert busiest(tokens) == pytest.approx(load)
    assert entropy(tokens) == pytest.approx(even)
    assert balance_figures([tokens, [1, 1]]) == {
        "expert_load": [busiest(tokens), 1.0],
        "expert_entropy": [entropy(tokens), 1.0],
    }


def test_dropped_choices_are_counted_and_shares_are_of_all_choices() -> None:
    assert dropped_figures([[3, 5], [0, 0]], [2, 0]) == {
        "expert_dropped": [2, 0],
        "expert_dropped_share": [0.25, 0.0],
    }


def test_figures_do_not_hang_on_the_number_of_tokens() -> None:
    few, many = [1, 2, 0, 5], [10**15, 2 * 10**15, 0, 5 * 10**15]
    assert busiest(few) == busiest(many)
    assert entropy(few) == pytest.approx(entropy(many), rel=1e-12)


# ---- files and console --------------------------------------------------------------------------------------------


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "expert_load.jsonl").read_text().splitlines()]


def test_counts_are_cut_back_on_resume_and_a_torn_line_goes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, config=CONFIG)
    for step in (2, 4, 6, 8):
        folder.expert_load(step, (1, 3), counts(2, 4))
    with open(tmp_path / "expert_load.jsonl", "a") as file:
        file.write('{"step": 10, "layers": [1, 3], "tok')
    again = RunFolder(tmp_path, config=CONFIG)
    assert [line["step"] for line in written(tmp_path)] == [2, 4, 6, 8]
    again.cut_back(5)
    assert [line["step"] for line in written(tmp_path)] == [2, 4]
    again.expert_load(6, (1, 3), counts(2, 4))
    assert written(tmp_path)[-1] == {"step": 6, "layers": [1, 3], "tokens": counts(2, 4)}


def test_a_run_without_experts_has_no_file_of_counts_and_other_ranks_write_none(tmp_path: Path) -> None:
    RunFolder(tmp_path / "dense", config=CONFIG).cut_back(0)
    RunFolder(tmp_path / "dense", config=CONFIG, rank=1).expert_load(1, (0,), [[1, 2]])
    assert not (tmp_path / "dense" / "expert_load.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"expert_load": [1.2, 1.834, None]}, "| ETA 0s | expert_load 1.83\n"),
        ({"expert_load": [1.2], "validation_loss": 2.0}, "| expert_load 1.20 | validation_loss 2.0000\n"),
        ({"expert_load": [None]}, "| ETA 0s\n"),
        ({}, "| ETA 0s\n"),
    ],
)
def test_the_console_shows_the_worst_load(more: dict[str, Any], end: str) -> None:
    stream = io.StringIO()
    Console(4, stream=stream, tty=False).step({**metrics(4), **more})
    assert stream.getvalue().endswith(end)


# ---- pictures -----------------------------------------------------------------------------------------------------


def test_colours_go_up_with_the_load_and_tell_nothing_and_unknown_apart() -> None:
    edges = [0.01, *EDGES]
    assert [colour(edge) for edge in edges] == list(COLOURS)
    assert [colour(edge - 1e-9) for edge in EDGES] == list(COLOURS[:-1])
    assert len({*COLOURS, NOTHING, UNKNOWN}) == len(COLOURS) + 2
    assert (colour(0.0), colour(None)) == (NOTHING, UNKNOWN)
    assert colour(1.0) == "#f7f7f7"
    assert loads_of([[1, 3], [0, 0]]) == [[0.5, 1.5], [None, None]]


def squares(svg: str) -> dict[tuple[int, int], str]:
    """Every pixel's colour where a path fills it, refusing a pixel that two fill."""
    found: dict[tuple[int, int], str] = {}
    for fill, d in re.findall(r"<path fill='(#\w+)' d='([^']+)'", svg):
        for x, y, wide, high in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", d):
            for place in ((a, b) for a in range(int(x), int(x) + int(wide)) for b in range(int(y), int(y) + int(high))):
                assert place not in found
                found[place] = fill
    return found


@pytest.mark.parametrize(("width", "height"), [(1100, 520), (360, 240)])
@pytest.mark.parametrize("experts", [8, 256])
@pytest.mark.parametrize("layers", [4, 60])
def test_a_map_shows_every_layer_and_expert_and_can_be_read(layers: int, experts: int, width: int, height: int) -> None:
    tokens = counts(layers, experts)
    svg = heat_map(
        "a < b", loads_of(tokens), Axes("layer", range(3, 3 + layers), "expert", range(experts)), width, height
    )
    full, high = map(int, re.findall(r"width='(\d+)' height='(\d+)'", svg)[0])
    assert full <= width
    assert high <= height
    assert "a &lt; b" in svg

    pixels = squares(svg)
    across, down = sorted({x for x, _ in pixels}), sorted({y for _, y in pixels})
    assert across[-1] < full
    wide, tall = (across[-1] + 2 - across[0]) // experts, (down[-1] + 2 - down[0]) // layers
    for layer, row in enumerate(loads_of(tokens)):
        for expert, load in enumerate(row):
            assert pixels[across[0] + wide * expert, down[0] + tall * layer] == colour(load), (layer, expert)

    numbers = re.findall(r"<text x='[\d.]+' y='[\d.]+' font-size='10' fill='(#\w+)'[^>]*>([\d.]+)</text>", svg)
    assert len(numbers) in (0, layers * experts)  # in all squares, or none where they are too small
    assert bool(numbers) == (layers == 4 and experts == 8)
    for anchor, apart in (("end", 11), ("middle", 12)):
        places = re.findall(rf"<text x='([\d.]+)' y='([\d.]+)' font-size='11'[^>]*'{anchor}'>(\d+)</text>", svg)
        along = [float(place[anchor == "end"]) for place in places]
        assert 2 <= len(along) <= 70
        assert all(b - a >= apart for a, b in pairwise(along)), "labels stand on each other"
    if layers * experts == 60 * 256:
        assert len(svg) < 400_000


def balanced_run(folder: Path, layers: int, steps: int = 40, every: int = 4, first: int = 0) -> None:
    write_run(folder, steps)
    tokens = counts(layers, 8)
    more = {**balance_figures(tokens), "aux_balance": 1.1}
    records = [{**metrics(step), **more, "router_bias_range": [-0.1 * step, 0.2]} for step in range(1, steps + 1)]
    lines(folder / "metrics.jsonl", records)
    named = list(range(first, first + layers))
    loads = [{"step": step, "layers": named, "tokens": tokens} for step in range(every, steps + 1, every)]
    lines(folder / "expert_load.jsonl", loads)


def test_the_page_shows_maps_over_time_and_a_curve_of_each_layer(tmp_path: Path) -> None:
    balanced_run(tmp_path, 4, first=3)
    content = page(read_run(tmp_path))
    shown = re.findall(r"load at step (\d+)</text>", content)
    assert shown[0] == "40"
    assert len(shown) == 1 + EARLIER
    assert shown[1:] == sorted(shown[1:], key=int)
    part = content.split("<h2>Experts</h2>")[1].split("<h2>")[0]
    worst = max((load, layer) for layer, row in enumerate(loads_of(counts(4, 8))) for load in row if load is not None)
    assert f"of layer {worst[1] + 3} is the busiest, with <b>{worst[0]:.2f}</b> times the mean; 1 of 32 got" in part
    for title in ("busiest expert over the mean, by layer", "entropy of the load, by layer", "biases of routers"):
        assert title in part
    assert [name for name in ("3", "4", "5", "6") if f">{name}</text>" in part] == ["3", "4", "5", "6"]
    assert "busiest expert over the mean</text>" not in part  # no map of layers over time: each has a curve
    assert "aux_balance" in content


def test_many_layers_are_a_map_over_time_and_three_curves(tmp_path: Path) -> None:
    balanced_run(tmp_path, CURVES + 1)
    part = page(read_run(tmp_path)).split("<h2>Experts</h2>")[1].split("<h2>")[0]
    assert "busiest expert over the mean</text>" in part
    for name in ("best", "median", "worst"):
        assert f">{name}</text>" in part


def test_a_page_is_made_of_a_run_without_experts_of_a_new_and_of_a_damaged_one(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert "Experts" not in page(read_run(tmp_path))
    balanced_run(tmp_path, 2)
    (tmp_path / "metrics.jsonl").write_text("")
    good = (tmp_path / "expert_load.jsonl").read_text().splitlines()[0]
    bad = [
        '{"step": 1, "layers": [0], "tokens": [[1], [2]]}',
        '{"step": 1, "layers": [0, 1], "tokens": [[1, 2], [2]]}',
        '{"step": 1, "layers": [], "tokens": []}',
        '{"step": 1, "layers": [0], "tokens": 3}',
        '{"step": null, "layers": [0], "tokens": [[1]]}',
        good[:30],
    ]
    (tmp_path / "expert_load.jsonl").write_text("\n".join([*bad[:3], good, *bad[3:]]))
    assert [load.step for load in read_run(tmp_path).loads] == [4]
    assert page(read_run(tmp_path)).count("load at step 4</text>") == 1
    lines(tmp_path / "metrics.jsonl", [{**metrics(1), "expert_load": [None, "x"], "router_bias_range": [1]}])
    assert "Experts" in page(read_run(tmp_path))
