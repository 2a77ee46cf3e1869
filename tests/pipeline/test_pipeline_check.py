"""What a config gets wrong about its pipeline is said with its key, its values and what would do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from small import config_of
from ultrascale.config.schema import Config
from ultrascale.pipeline.check import check
from ultrascale.pipeline.layer_costs import planned_costs
from ultrascale.pipeline.schedules import registry


def config(pp: int = 1, layers: int = 8, micro_batches: int = 4, **pipeline: Any) -> Config:
    given = {"schedule": "1f1b", "virtual_stages": None, "layout": None} | pipeline
    given = {"group_size": None, "activation_limit": None, "costs": None} | given
    return cast(
        Config,
        SimpleNamespace(
            parallel=SimpleNamespace(pp=pp, dp=3, ep=1),
            batch=SimpleNamespace(global_size=6 * micro_batches, micro_size=2),
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
        config(pp=2, schedule="interleaved_1f1b"),
        config(pp=2, schedule="interleaved_1f1b", virtual_stages=4, group_size=3),
        config(pp=2, schedule="llama3_N=M", layout="E | t*4 | t*4 | L"),
        config(pp=1, schedule="zb_v", layout=[3, 5]),
        config(pp=2, schedule="dualpipe", layers=2),
        config(pp=64, layers=128, micro_batches=10_000),
    ],
)
def test_pipelines_that_fit_have_no_problem(good: Config) -> None:
    assert check(good) == []


@pytest.mark.parametrize(
    ("bad", "key", "words"),
    [
        (config(schedule="1f2b"), "pipeline.schedule", ["'1f2b'", "did you mean 1f1b"]),
        (config(schedule="evaluation"), "pipeline.schedule", ["evaluation", "use gpipe, 1f1b"]),
        (config(pp=2, schedule="zb_v", virtual_stages=4), "pipeline.virtual_stages", ["=4", "zb_v", "use 2 or null"]),
        (config(pp=2, group_size=4), "pipeline.group_size", ["=4", "1f1b", "leave group_size out, or use null"]),
        (config(pp=2, activation_limit=4), "pipeline.activation_limit", ["=4", "1f1b", "or use null"]),
        (
            config(pp=4, schedule="interleaved_1f1b", group_size=3),
            "pipeline.schedule",
            ["group_size=3", "use 4", "parallel.pp=4 and 4 micro-batches"],
        ),
        (
            config(pp=4, schedule="dualpipe", micro_batches=6),
            "pipeline.schedule",
            ["6 are too few; use 8", "parallel.pp=4 and 6 micro-batches per rank, from batch.global_size"],
        ),
        (config(pp=3, schedule="dualpipe", micro_batches=6), "pipeline.schedule", ["3 is odd; use 2 or 4"]),
        (
            config(pp=4, schedule="interleaved_1f1b", virtual_stages=3),
            "pipeline.virtual_stages",
            ["=3", "12 stages", "num_hidden_layers=8", "use at most 2"],
        ),
        (
            config(pp=4, schedule="interleaved_1f1b", virtual_stages=9),
            "pipeline.virtual_stages",
            ["=9", "36 stages", "num_hidden_layers=8", "use at most 2"],
        ),
        (
            config(pp=2, schedule="interleaved_1f1b", layout=[3, 5]),
            "pipeline.layout",
            ["2 stages", "2 virtual stages each"],
        ),
        (config(pp=2, schedule="custom:none.csv"), "pipeline.schedule", ["none.csv does not exist"]),
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


def test_a_file_that_stands_still_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    file = tmp_path / "plan.csv"
    file.write_text("F0.0,B0.0,F0.1,B0.1\nF1.0,F1.1,B1.0,B1.1\n")
    (problem,) = check(config(pp=2, micro_batches=2, schedule=f"custom:{file}"))
    assert problem.key == "pipeline.schedule"
    assert f"{file}, row 1, column 2: rank 0, action 1 (B0.0): a circle of waiting" in problem.message
    (problem,) = check(config(pp=2, micro_batches=4, schedule=f"custom:{file}"))
    assert "is a plan for micro_batches=2, not for 4" in problem.message


def test_a_check_builds_no_plan_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr("ultrascale.pipeline.check.prove", lambda entry, request: built.append(request.micro_batches))
    for micro_batches in (8, 100_000):
        assert check(config(pp=8, micro_batches=micro_batches)) == []
    assert built == [8]
    slow = dataclasses.replace(registry.find("1f1b"), searched=True)
    monkeypatch.setattr(registry, "find", lambda name: slow)
    assert check(config(pp=8, micro_batches=8)) == []
    assert built == [8]


def real(schedule: str, costs: str | None = None) -> Config:
    return config_of(
        {"parallel.pp": 2, "model.num_hidden_layers": 8, "pipeline.schedule": schedule, "pipeline.costs": costs}, 2
    )


def test_a_searched_schedule_orders_by_the_stages_it_will_run() -> None:
    """The last stage has the head, here as heavy as several layers; the numbers of a config come before the model's."""
    auto = registry.find("auto")
    costs = planned_costs(real("auto"), auto)
    assert costs is not None
    assert isinstance(costs.F, tuple)
    assert costs.F[0] == pytest.approx(4)
    assert costs.F[1] > costs.F[0]
    given = planned_costs(real("auto", "F=1:3,BI=2,BW=2"), auto)
    assert given is not None
    assert given.F == (1, 3)
    assert planned_costs(real("1f1b"), registry.find("1f1b")) is None


@pytest.mark.parametrize(
    ("schedule", "costs", "words"),
    [
        ("auto", "F=1:2:3", "for 3 stages"),
        ("auto", "G=1", "unknown"),
        ("auto", "F=-1", "negative"),
        ("1f1b", "F=1", "no effect"),
    ],
)
def test_costs_that_do_not_fit_are_refused(schedule: str, costs: str, words: str) -> None:
    (problem,) = check(real(schedule, costs))
    assert problem.key == "pipeline.costs"
    assert words in problem.message
