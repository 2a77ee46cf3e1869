"""tools/pipeline_bubble.py: both bubbles, and splits by time that are as good as any."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TOOL = Path(__file__).parents[2] / "tools" / "pipeline_bubble.py"


def load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("pipeline_bubble", TOOL)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["pipeline_bubble"] = module
    specification.loader.exec_module(module)
    return module


tool = load()
TIME = st.integers(1, 9).map(float)


@settings(max_examples=50, deadline=None)
@given(st.lists(TIME, min_size=3, max_size=9), st.integers(1, 3), st.integers(0, 5), st.integers(0, 9))
def test_no_split_into_runs_of_layers_has_a_faster_slowest_stage(
    layers: list[float], stages: int, embedding: int, head: int
) -> None:
    model = tool.Model(tuple(layers), embedding, head)
    found = max(model.stage_times(tool.by_time(model, stages)))
    for cuts in combinations(range(1, len(layers)), stages - 1):
        edges = (0, *cuts, len(layers))
        times = [sum(layers[a:b]) for a, b in pairwise(edges)]
        times[0] += embedding
        times[-1] += head
        assert found <= max(times)


def test_both_bubbles_of_equal_stages_and_the_cost_of_unequal_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "bubble.svg"
    words = ["--stages", "4", "--microbatches", "8", "--layers", "32", "--schedules", "1f1b,zb_h1"]
    assert tool.main([*words, "--svg", str(picture)]) == 0
    output = capsys.readouterr().out
    assert "(p − 1)/m           37.50%" in output
    assert "(p − 1)/(m + p − 1) 27.27%" in output
    assert "8 layers + head               10.4" in output
    for name in ("1f1b", "zb_h1"):
        line = next(line for line in output.splitlines() if line.startswith(f"{name} "))
        ideal, by_count, by_time = (float(cells.split()[0]) for cells in line.removeprefix(name).split("|"))
        assert ideal < by_time < by_count
    root = ElementTree.parse(picture).getroot()
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(bool(re.match(r"[FB]\d", title or "")) for title in titles) == 2 * 4 * 8 * 2

    # Equal stages are what the formula says, to the digit.
    assert tool.main([*words[:4], "--layers", "8", "--embedding", "0", "--head", "0", "--schedules", "gpipe"]) == 0
    assert re.search(r"gpipe +48 \| +66 +27\.3% +37\.5%", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--layers 3", "3 layers are too few for 4 stages"),
        ("--layers 8*x", "'8*x' is not N or N*TIME"),
        ("--layers 8*0", "'8*0' is nothing"),
        ("--schedules 1f1", "did you mean 1f1b"),
        ("--head -30", "negative"),
        ("--svg no/such/folder.svg", "No such file or directory"),
    ],
)
def test_numbers_that_make_no_pipeline_are_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(words.split()) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_it_runs_without_torch() -> None:
    code = (
        f"import runpy, sys; main = runpy.run_path({str(TOOL)!r}, run_name='pipeline_bubble')['main']; "
        "sys.exit(main(['--microbatches', '2']) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
