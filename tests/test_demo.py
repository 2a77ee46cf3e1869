"""The parts of `make demo` that take no minutes."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from rich.console import Console

from ultrascale.config import collect
from ultrascale.config.load import load
from ultrascale.data.writer import IndexedWriter

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    specification = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_corpus_that_is_prepared_is_the_one_that_is_read(demo: ModuleType) -> None:
    config = collect.check(load(ROOT / demo.CONFIG, []), world_size=4)
    command = demo.PREPARE.format(train=config.data.train, vocab=config.model.vocab_size)
    words = shlex.split(command)
    prefix, tokenizer = words[words.index("--output") + 1], words[words.index("--tokenizer") + 1]
    assert config.data.train == prefix
    assert config.data.validation == f"{prefix}.validation"
    assert config.data.tokenizer == f"{Path(prefix).parent}/tokenizer.json"
    assert f"train:{config.model.vocab_size}" == tokenizer
    assert command in (ROOT / demo.CONFIG).read_text()  # for who runs it by hand


def test_it_stops_where_a_checkpoint_and_an_evaluation_are(demo: ModuleType) -> None:
    config = yaml.safe_load((ROOT / demo.CONFIG).read_text())
    steps = config["run"]["steps"]
    assert steps % 2 == 0
    assert (steps // 2) % config["checkpoint"]["every"] == 0
    assert steps % config["evaluation"]["every"] == 0
    assert config["schedule"]["total_steps"] == steps


def test_the_unigram_loss_is_the_cross_entropy_of_frequencies(demo: ModuleType, tmp_path: Path) -> None:
    for name, tokens in (("train", [0, 0, 0, 1, 2]), ("held", [0, 1, 1, 3])):
        with IndexedWriter(tmp_path / name, vocab_size=4) as writer:
            writer.append(np.array(tokens, np.int64))
            writer.seal()
            writer.publish()
    probability = np.array([4, 2, 2, 1]) / 9
    expected = -np.log(probability[[0, 1, 1, 3]]).mean()
    assert demo.unigram_loss(tmp_path / "train", tmp_path / "held") == pytest.approx(expected)


def test_a_step_that_fails_ends_it_with_its_exit_code(demo: ModuleType) -> None:
    console = Console(quiet=True)
    assert demo.step(console, "", "true") >= 0
    with pytest.raises(SystemExit) as ended:
        demo.step(console, "", "bash -c 'exit 7'")
    assert ended.value.code == 7
