"""The entry points: what is wrong is said before torch is imported, once for each host, and costs exit 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from config_cases import DEBUG, ROOT

from ultrascale import cli, train

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def modules_after(statement: str) -> tuple[int, set[str], str]:
    """Exit code of `statement` in a fresh Python, the modules it imported, and standard error."""
    program = (
        f"import json, sys\nfrom contextlib import redirect_stdout\nimport io\n"
        f"with redirect_stdout(io.StringIO()):\n    try:\n        code = {statement}\n"
        f"    except SystemExit as exit:\n        code = exit.code\n"
        f"print(json.dumps([code, sorted(sys.modules)]))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=clean, check=False
    )
    assert done.stdout, done.stderr
    code, modules = json.loads(done.stdout)
    return code, set(modules), done.stderr


def test_a_config_error_is_found_before_torch_is_imported() -> None:
    code, modules, error = modules_after(
        f"__import__('ultrascale.train').train.main(['--config', {str(DEBUG)!r}, 'parallel.tp=3', 'parallel.dp=1'])"
    )
    assert code == 2
    assert "parallel.tp=3" in error
    assert "torch" not in modules


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["config", "show", "--config", str(DEBUG)],
        ["config", "schema"],
        *([name, "--help"] for name in cli.COMMANDS),
    ],
    ids=" ".join,
)
def test_help_and_config_answer_without_torch(words: list[str]) -> None:
    code, modules, error = modules_after(f"__import__('ultrascale.cli').cli.main({words!r})")
    assert code == 0, error
    assert not {"torch", "numpy.random", "transformers", "tokenizers"} & modules


def test_every_command_has_help_with_an_example_and_json() -> None:
    for name in cli.COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "ultrascale.cli", name, "--help"], capture_output=True, text=True, check=True
        )
        assert f"ultrascale {name}" in done.stdout.split("example", 1)[1]
    for words in (["config", "show"], ["config", "schema"]):
        done = subprocess.run(
            [sys.executable, "-m", "ultrascale.cli", *words, "--help"], capture_output=True, text=True, check=True
        )
        assert "--json" in done.stdout
        assert f"ultrascale {' '.join(words)}" in done.stdout.split("example", 1)[1]


@pytest.mark.parametrize("missing", TORCHRUN)
def test_a_half_set_torchrun_environment_is_refused_by_name(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    half = {name: value for name, value in TORCHRUN.items() if name not in (missing, "LOCAL_RANK")}
    assert train.main(["--config", str(DEBUG)], environment=half) == 2
    error = capsys.readouterr().err
    assert "half set" in error
    assert missing in error.split("without")[1]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [({"RANK": "4"}, "do not fit"), ({"WORLD_SIZE": "four"}, "WORLD_SIZE=four"), ({"LOCAL_RANK": "9"}, "do not fit")],
)
def test_a_torchrun_environment_that_makes_no_sense_is_refused(wrong: dict[str, str], complaint: str) -> None:
    with pytest.raises(train.LaunchError, match=complaint):
        train.read_launch(TORCHRUN | wrong)
    assert train.read_launch(TORCHRUN) == train.Launch(rank=3, world_size=4, local_rank=1)
    assert train.read_launch({}) == train.Launch(rank=0, world_size=1, local_rank=0)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_all_ranks_exit_2_and_one_of_each_host_speaks(local_rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    environment = TORCHRUN | {"LOCAL_RANK": str(local_rank)}
    for argv in (["--config", str(DEBUG), "parallel.tp=3"], ["--config", str(DEBUG), "--unknown"], ["a.b=1"]):
        assert train.main(argv, environment=environment) == 2
        assert bool(capsys.readouterr().err) == (local_rank == 0)


def test_overrides_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "show", "run.steps=3", "--config", str(DEBUG), "parallel.tp=2", "--json", "run.seed=8"]
    assert cli.main([*words, "--world", "4", "run.name=x"]) == 0
    shown = json.loads(capsys.readouterr().out)
    config = shown["config"]
    assert (config["run"]["steps"], config["run"]["seed"], config["run"]["name"]) == (3, 8, "x")
    assert (config["parallel"]["tp"], config["parallel"]["dp"], shown["world_size"]) == (2, 2, 4)
    assert shown["origins"]["run.name"] == "command line"


def test_the_yaml_that_show_prints_is_a_config(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert cli.main(["config", "show", "--config", str(DEBUG)]) == 0
    printed = capsys.readouterr().out
    assert "# notice: " in printed
    path = tmp_path_factory.mktemp("show") / "shown.yaml"
    path.write_text(printed)
    assert cli.main(["config", "show", "--config", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["config"]
    assert cli.main(["config", "show", "--config", str(DEBUG), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == again


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["confg"]) == 2
    assert "did you mean config?" in capsys.readouterr().err
    assert cli.main(["config", "show", "--config", str(DEBUG), "run.step=3"]) == 2
    assert "did you mean run.steps?" in capsys.readouterr().err
