"""`ultrascale schedule`: its JSON, its table and picture, its errors; and that none of it needs torch."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from ultrascale.pipeline import command
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.draw import text
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import simulate


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_json_has_the_keys_that_others_read(capsys: pytest.CaptureFixture[str]) -> None:
    cost = "F=1,BI=1,BW=1,P2P=0.1"
    assert run("1f1b", "--stages", "4", "--microbatches", "8", "--cost", cost, "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["makespan"] == pytest.approx(34.6)
    assert output["span"] == pytest.approx(34.6)
    assert output["ideal"] == 24
    assert output["bubble_fraction"] == pytest.approx(0.306358, abs=1e-6)
    assert output["bubble_over_ideal"] == pytest.approx(34.6 / 24 - 1)
    assert output["peak_activations"] == {"release_at_BW": [4, 3, 2, 1], "release_at_BI": [4, 3, 2, 1]}
    assert output["actions"][3][:4] == ["F3.0", "B3.0", "F3.1", "B3.1"]
    assert [len(row) for row in output["actions"]] == [16] * 4


def test_text_names_both_bubbles_and_draws_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("afab", "--stages", "3", "--microbatches", "4") == 0
    output = capsys.readouterr().out
    assert "bubble fraction      33.33%" in output
    assert "bubble over ideal    50.00%" in output
    assert "rank 2 |......F0-F1-F2-F3-B0====B1====B2====B3====............|" in output


def test_timeline_never_outgrows_its_width() -> None:
    result = simulate(registry.build("1f1b", 12, 300), Costs(BW=0, P2P=0.1))
    for width in (10, 80, 200):
        lines = text(result.timeline(), width).splitlines()
        assert len(lines) == 12
        assert {len(line) for line in lines} == {len("rank 11 ||") + width}
    assert text(simulate(registry.build("1f1b", 1, 1), Costs(0, 0, 0)).timeline()) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("zb_z --stages 2 --microbatches 2", "'zb_z' is not a schedule"),
        ("1f1b --stages 0 --microbatches 2", "0 ranks"),
        ("1f1b --stages 2 --microbatches 2 --virtual 3", "3 virtual stages"),
        ("1f1b --stages 2 --microbatches 2 --cost F=-1 --json", "F=-1.0 is negative"),
    ],
)
def test_impossible_requests_are_one_line_and_exit_code_2(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_schedules_are_made_checked_simulated_and_drawn_without_torch() -> None:
    # These two import all the rest of the package that promises it.
    modules = "ultrascale.pipeline.command, ultrascale.pipeline.check"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
