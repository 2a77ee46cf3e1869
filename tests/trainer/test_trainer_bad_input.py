"""Bad input costs exit 2 and one clear sentence: key, value, rule, way out. Nothing is lost, and no step is made."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_cases import Job, checkpoints, codes, files, metrics, status, train, yaml_file

from ultrascale import train as command
from ultrascale import trainer
from ultrascale.data.indexed import IndexedDataset

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is made all the same fails its test at once."""

    def step(*args: Any) -> None:
        raise AssertionError("a step was made")

    monkeypatch.setattr(trainer, "train_step", step)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two steps of a run, which no test may harm."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert codes(train(1, folder, {"run.steps": 2, "checkpoint.every": 1})) == {0}
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that may be harmed."""
    folder = tmp_path / "run"
    for name, data in files(finished).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.replace(str(finished).encode(), str(folder).encode()) if name == "config.yaml" else data)
    return folder


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the user reads when the run in `folder` is refused; fails when it is not, or something there changed."""

    def refused(folder: Path, *overrides: str, environment: dict[str, str] | None = None, **settings: Any) -> str:
        tree = {"run.steps": 4, "checkpoint.every": 1, **{key.replace("__", "."): v for key, v in settings.items()}}
        config = yaml_file(tmp_path / "bad.yaml", tree)
        before = files(folder) if folder.is_dir() else {}
        code = command.main(
            ["--config", str(config), "--device", "cpu", f"run.dir={folder}", *overrides], environment=environment or {}
        )
        said = capsys.readouterr().err
        assert code == 2, said
        assert "Traceback" not in said
        assert len(said.strip().splitlines()) <= 2, said
        after = files(folder) if folder.is_dir() else {}
        for name, data in before.items():
            # status.json says how this attempt ended, events.jsonl goes on; all else is as it was.
            assert (
                name == "status.json"
                or after[name] == data
                or (name == "events.jsonl" and after[name].startswith(data))
            ), name
        return said

    return refused


def tokens(prefix: Path, values: list[int]) -> str:
    """A corpus of one document as somebody else would hand it over: the two files, without a sidecar."""
    raw = np.array(values, "<u2").tobytes()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 1, 2) + struct.pack("<iqqq", len(values), 0, 0, 1)
    Path(f"{prefix}.bin").write_bytes(raw)
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix)


@pytest.mark.parametrize(
    ("overrides", "world", "words"),
    [
        (["model.hidden_sise=3"], 1, ["model.hidden_sise", "did you mean model.hidden_size"]),
        (["run.steps=many"], 1, ["run.steps", "many", "a whole number of at least 1"]),
        (["run.steps=true"], 1, ["run.steps", "true", "a whole number of at least 1"]),
        (["optimizer.lr='0.1'"], 1, ["optimizer.lr", "without quotes"]),
        (["parallel.dp=2"], 3, ["parallel.dp=2", "world size 3", "use 2 processes"]),
        (["parallel.tp=3"], 3, ["parallel.tp=3", "model.num_attention_heads=4", "use 1, 2 or 4"]),
        (["model.num_key_value_heads=3"], 1, ["model.num_key_value_heads=3", "use 1, 2 or 4"]),
        (["parallel.pp=3"], 3, ["parallel.pp=3", "model.num_hidden_layers=2"]),
        (["pipeline.layout=[1,2]", "parallel.pp=2"], 2, ["pipeline.layout", "model.num_hidden_layers=2"]),
        (["batch.global_size=5", "batch.micro_size=1", "parallel.dp=2"], 2, ["batch.global_size=5", "4 or 6"]),
        (["batch.sequence_length=7", "parallel.tp=2"], 2, ["batch.sequence_length=7", "6 or 8"]),
        (["batch.sequence_length=4096"], 1, ["batch.sequence_length=4096", "model.max_position_embeddings=2048"]),
        (["evaluation.every=1", "data.validation=null"], 1, ["evaluation.every=1", "data.validation"]),
        (["schedule.name=cosine"], 1, ["schedule.total_steps", "schedule.name=cosine"]),
    ],
    ids=str,
)
def test_a_config_that_cannot_run_is_refused_and_nothing_is_written(
    overrides: list[str], world: int, words: list[str], tmp_path: Path, refusal: Callable[..., str]
) -> None:
    environment = {**TORCHRUN, "WORLD_SIZE": str(world)} if world > 1 else {}
    said = refusal(tmp_path / "new", *overrides, environment=environment)
    assert all(word in said for word in words), said
    assert not (tmp_path / "new").exists()


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml_file(tmp_path / "twice.yaml")
    config.write_text(config.read_text() + "run: {steps: 3}\n")
    assert command.main(["--config", str(config)], environment={}) == 2
    said = capsys.readouterr().err
    assert "run is given twice" in said
    assert said.count(f"{config}:") == 2


@pytest.mark.parametrize("missing", [*TORCHRUN])
def test_a_half_set_torchrun_environment_is_refused(missing: str, tmp_path: Path, refusal: Callable[..., str]) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    said = refusal(tmp_path / "new", environment=environment)
    assert missing in said
    assert "torchrun" in said
    assert not (tmp_path / "new").exists()


# ---- data ----------------------------------------------------------------------------------------------------------


def test_data_that_are_missing_are_named(tmp_path: Path, refusal: Callable[..., str]) -> None:
    said = refusal(tmp_path / "new", f"data.train={tmp_path}/nothing")
    assert f"{tmp_path}/nothing" in said
    assert "ultrascale data prepare" in said
    os.unlink(f"{tokens(tmp_path / 'half', list(range(100)))}.idx")
    assert "half.idx" in refusal(tmp_path / "new", f"data.train={tmp_path}/half")


def test_data_that_are_empty_or_too_short_are_named(tmp_path: Path, refusal: Callable[..., str]) -> None:
    prefix = tokens(tmp_path / "empty", [1])
    Path(f"{prefix}.bin").write_bytes(b"")
    assert "empty" in refusal(tmp_path / "new", f"data.train={prefix}")
    short = tokens(tmp_path / "short", [1, 2, 3])
    said = refusal(tmp_path / "new", f"data.train={short}")
    assert "short" in said
    assert "batch.sequence_length" in said


def test_an_index_that_is_damaged_is_named(tmp_path: Path, refusal: Callable[..., str]) -> None:
    prefix = tokens(tmp_path / "torn", list(range(100)))
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for harmed in (whole[:-7], b"X" + whole[1:], whole[:40]):
        index.write_bytes(harmed)
        assert "torn.idx" in refusal(tmp_path / "new", f"data.train={prefix}")
    index.write_bytes(whole)
    Path(f"{prefix}.bin").write_bytes(b"\0" * 30)
    assert "torn.idx" in refusal(tmp_path / "new", f"data.train={prefix}")


def test_a_token_that_the_model_has_no_row_for_is_named_with_its_place(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    values = [5] * 100
    values[61] = 131
    said = refusal(tmp_path / "new", f"data.train={tokens(tmp_path / 'large', values)}")
    assert all(word in said for word in ("large", "131", "61", "model.vocab_size")), said


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_the_size_that_fits(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    said = refusal(tmp_path / "new", "data.train=builtin:stdlib", "data.validation=null")
    assert "data.tokenizer=bytes" in said
    assert "model.vocab_size to at least 257" in said
    vocabulary = {f"t{n}": n for n in range(200)}
    tokenizer = {
        "version": "1.0", "added_tokens": [{"id": 0, "content": "<|endoftext|>", "special": True}],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    corpus = tokens(tmp_path / "corpus", [5] * 100)
    said = refusal(tmp_path / "new", f"data.train={corpus}", f"data.tokenizer={tmp_path}/tokenizer.json")
    assert "model.vocab_size to at least 200" in said


# ---- the run folder ------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        said = refusal(folder)
        assert f"run.dir={folder} cannot be written" in said
        assert "run.dir=…" in said
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("override", "was"),
    [
        ("run.seed=9", "3"),
        ("model.rope_theta=5000", "10000.0"),
        ("model.num_attention_heads=2", "4"),
        ("optimizer.lr=0.5", "0.01"),
        ("batch.global_size=8", "4"),
        ("batch.sequence_length=4", "8"),
        ("schedule.warmup_steps=1", "0"),
        ("precision.compute=float64", "'float32'"),
    ],
)
def test_a_folder_that_holds_a_different_run_is_refused_and_kept(
    override: str, was: str, run: Path, refusal: Callable[..., str]
) -> None:
    said = refusal(run, override)
    assert "holds a different run" in said
    assert f"{override.split('=')[0]} was {was}" in said
    assert status(run)["state"] == "finished"  # not even that


def test_other_data_than_the_run_began_with_are_refused(run: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    corpus = tokens(tmp_path / "corpus", [n % 131 for n in range(1000)])
    assert "the data are not the same tokens" in refusal(run, f"data.train={corpus}")


def test_resume_never_into_a_folder_with_a_run_is_refused(run: Path, refusal: Callable[..., str]) -> None:
    said = refusal(run, "run.resume=never")
    assert "run.resume=never" in said
    assert "run.resume=auto" in said


# ---- run.resume as a path ------------------------------------------------------------------------------------------


def test_a_path_that_holds_no_checkpoint_is_refused(run: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    said = refusal(tmp_path / "new", f"run.resume={tmp_path}/nowhere")
    assert f"run.resume={tmp_path}/nowhere" in said
    (tmp_path / "hollow").mkdir()
    assert "hollow" in refusal(tmp_path / "new", f"run.resume={tmp_path}/hollow")
    (run / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    assert "manifest.json" in refusal(tmp_path / "newer", f"run.resume={run}/checkpoints/step-00000001")


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_checkpoint_with_one_flipped_byte_is_refused_and_named(
    name: str, run: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    damaged = run / "checkpoints" / "step-00000002" / name
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    assert name in refusal(tmp_path / "new", f"run.resume={damaged.parent}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.intermediate_size=32", "model.intermediate_size was 24 and is 32"),
        ("model.num_hidden_layers=3", "model.num_hidden_layers was 2 and is 3"),
        ("model.tie_word_embeddings=false", "model.tie_word_embeddings was True and is False"),
        ("optimizer.name=sgd", "optimizer.name was 'adamw' and is 'sgd'"),
        ("run.seed=4", "run.seed was 3 and is 4"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    override: str, words: str, run: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    said = refusal(tmp_path / "new", override, f"run.resume={run}")
    assert words in said
    assert not metrics_of(tmp_path / "new")


def metrics_of(folder: Path) -> list[Any]:
    return metrics(folder) if (folder / "metrics.jsonl").exists() else []


def test_the_newest_checkpoint_that_is_damaged_is_not_taken_for_whole_and_the_one_before_serves(run: Path) -> None:
    torn = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert codes(train(1, run, {"run.steps": 1, "checkpoint.every": 1})) == {0}
    assert status(run)["step"] == 1
    assert "step-00000002" in checkpoints(run)  # kept for whoever looks


# ---- on several ranks ----------------------------------------------------------------------------------------------


def refused_job(tmp_path: Path, world: int, *overrides: str, fault: tuple[str, str] | None = None) -> list[str]:
    """What each rank said of a job that every rank ends with exit 2."""
    config = yaml_file(tmp_path / "run.yaml", {"run.steps": 4, "checkpoint.every": 1})
    arguments = ["--config", str(config), f"run.dir={tmp_path / 'run'}", *overrides]
    with Job(arguments, world, tmp_path / "logs", fault) as job:
        assert job.wait(20) == [2] * world, [job.said(rank) for rank in range(world)]
        return [job.said(rank) for rank in range(world)]


def test_what_only_rank_0_sees_is_refused_on_all_ranks_and_said_once(run: Path, tmp_path: Path) -> None:
    said = refused_job(tmp_path, 2, "parallel.dp=2", "run.seed=9")
    assert "holds a different run" in said[0]
    assert said[1] == ""


def damage_rank_1(tmp_path: Path) -> Path:
    assert codes(train(2, tmp_path / "run", {"parallel.tp": 2, "run.steps": 2, "checkpoint.every": 1})) == {0}
    damaged = tmp_path / "run" / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(bytes(data))
    return damaged


def test_damage_that_only_rank_1_reads_is_named_and_refused_on_all_ranks(tmp_path: Path) -> None:
    damage_rank_1(tmp_path)
    said = refused_job(tmp_path, 2, "parallel.tp=2")
    assert any("rank-00001.safetensors" in text and "checksum" in text for text in said), said
    assert "Traceback" not in "".join(said)


def corpus_is_missing_on_rank_1(rank: int) -> None:
    """As on a second host whose disk does not have the file."""
    if rank == 1:

        def gone(self: IndexedDataset, prefix: Any, *rest: Any) -> None:
            from ultrascale.data.errors import DataError

            raise DataError(f"{prefix}.idx: there is no such file")

        IndexedDataset.__init__ = gone  # type: ignore[method-assign]


def test_data_that_only_rank_1_lacks_are_named_and_refused_on_all_ranks(tmp_path: Path) -> None:
    corpus = tokens(tmp_path / "corpus", [n % 131 for n in range(1000)])
    said = refused_job(
        tmp_path, 2, "parallel.dp=2", f"data.train={corpus}", fault=(__name__, "corpus_is_missing_on_rank_1")
    )
    assert any("corpus.idx: there is no such file" in text for text in said), said
    assert "Traceback" not in "".join(said)


def test_status_says_that_a_claimed_folder_was_refused(run: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    damaged = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(bytes(data))
    refusal(tmp_path / "new", f"run.resume={damaged.parent}")
    found = status(tmp_path / "new")
    assert (found["state"], found["exit_code"]) == ("failed", 2)
    assert "rank-00000.safetensors" in found["reason"]
