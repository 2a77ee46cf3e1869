"""What a config gets wrong about its pipeline is said with its key, its values and what would do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ultrascale.config.schema import Config
from ultrascale.pipeline.check import check


def config(pp: int = 1, layers: int = 8, **pipeline: Any) -> Config:
    given = {"schedule": "1f1b", "virtual_stages": None, "layout": None} | pipeline
    return cast(
        Config,
        SimpleNamespace(
            parallel=SimpleNamespace(pp=pp),
            model=SimpleNamespace(num_hidden_layers=layers),
            pipeline=SimpleNamespace(**given),
        ),
    )


@pytest.mark.parametrize(
    "good",
    [
        config(),
        config(pp=8),
        config(pp=3, schedule="afab", virtual_stages=1),
        config(pp=2, layout=[3, 5]),
        config(pp=2, layout="E t*3 | t*5 L"),
        config(pp=10, layers=8, layout=[0, *[1] * 8, 0]),
    ],
)
def test_pipelines_that_fit_have_no_problem(good: Config) -> None:
    assert check(good) == []


@pytest.mark.parametrize(
    ("bad", "key", "words"),
    [
        (config(schedule="1f2b"), "pipeline.schedule", ["'1f2b'", "did you mean 1f1b"]),
        (config(schedule="evaluation"), "pipeline.schedule", ["evaluation", "gpipe or 1f1b"]),
        (config(pp=2, virtual_stages=2), "pipeline.virtual_stages", ["=2", "1f1b", "use 1 or null"]),
        (config(pp=1, layout=[8]), "pipeline.layout", ["[8]", "parallel.pp=1"]),
        (config(pp=1, layout=[3, 5]), "pipeline.layout", ["[3, 5]", "parallel.pp=1"]),
        (config(pp=2, layout=[3, 4]), "pipeline.layout", ["7 layers", "num_hidden_layers=8"]),
        (config(pp=4, layout=[3, 5]), "pipeline.layout", ["2 stages", "parallel.pp=4"]),
        (config(pp=2, layout="t*3|q"), "pipeline.layout", ["'q'"]),
        (config(pp=12, layers=8), "parallel.pp", ["parallel.pp=12", "=8", "1, 2, 3, 4 or 6"]),
    ],
)
def test_a_pipeline_that_does_not_fit_is_one_problem_with_its_key(bad: Config, key: str, words: list[str]) -> None:
    (problem,) = check(bad)
    assert (problem.key, problem.kind) == (key, "error")
    assert problem.message.startswith(key)
    for word in words:
        assert word in problem.message
