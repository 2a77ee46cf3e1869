"""`ultrascale schedule --svg --html --csv --trace`: each file is written, and the CSV is a schedule again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ultrascale.pipeline import command

CONTRACT = ["makespan", "span", "ideal", "bubble_fraction", "bubble_over_ideal", "peak_activations", "actions"]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_all_files_are_written_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: tmp_path / f"out.{name}" for name in ("svg", "html", "csv", "trace")}
    flags = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert run("dualpipe", "--stages", "4", "--microbatches", "8", *flags) == 0
    output = capsys.readouterr().out
    assert output.rstrip().endswith("wrote " + ", ".join(map(str, paths.values())))
    begins = {"svg": "<svg", "html": "<!DOCTYPE html>", "csv": "F0.0,F0.1,", "trace": '{"traceEvents"'}
    for name, path in paths.items():
        assert path.read_text().startswith(begins[name])


@pytest.mark.parametrize(("name", "micro_batches"), [("interleaved_1f1b", 6), ("zb_v", 8), ("dualpipe", 8)])
def test_csv_is_the_same_schedule_again(
    tmp_path: Path, name: str, micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.csv"
    size = ["--stages", "4", "--microbatches", str(micro_batches), "--cost", "P2P=0.25", "--json"]
    assert run(name, *size, "--csv", str(path)) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(f"custom:{path}", *size) == 0
    again = json.loads(capsys.readouterr().out)
    del first["schedule"], again["schedule"]
    assert again == first


def test_json_alone_is_printed_with_new_keys_behind_the_contracts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = "F=1:2,P2P=0.5,MESSAGE=3,BANDWIDTH=6,ACTIVATION=10:20"
    words = ["1f1b", "--stages", "2", "--microbatches", "4", "--cost", cost, "--json"]
    assert run(*words, "--svg", str(tmp_path / "a.svg")) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output)[: len(CONTRACT)] == CONTRACT
    for rank in range(2):
        assert sum(output["idle"][rank].values()) == pytest.approx(output["makespan"] - output["busy"][rank])
    # Rank 0 keeps two activations, one gradient that it works on and one that is on its way; rank 1 one of each.
    assert output["peak_bytes"] == [2 * 10 + 2 * 3, 20 + 3]
    # A hop takes 0.5 + 3/6. Rank 1 waits one for F0.0, from 1 to 2, and one for F0.2, which leaves at 10, when free.
    assert output["exposed_p2p"][1] == 2
    path = output["critical_path"]
    assert (path[0]["start"], path[-1]["end"]) == (0, output["makespan"])


@pytest.mark.parametrize("name", ["svg", "html", "csv", "trace"])
def test_a_file_that_cannot_be_written_is_one_line_and_exit_code_2(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "file"
    assert run("1f1b", "--stages", "2", "--microbatches", "2", f"--{name}", str(path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"--{name} {path} cannot be written: No such file or directory" in err
    assert err.count("\n") == 1


def test_table_shows_bytes_only_when_sizes_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpipe", "--stages", "2", "--microbatches", "4"]
    assert run(*words) == 0
    assert "bytes" not in capsys.readouterr().out
    assert run(*words, "--cost", "ACTIVATION=1e9") == 0
    assert "bytes held" in capsys.readouterr().out
