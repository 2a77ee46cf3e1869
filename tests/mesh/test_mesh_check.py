"""What the mesh refuses in a config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ultrascale.mesh.axes import AXES
from ultrascale.mesh.check import check


def config(order: list[str] | None = None, **sizes: int | None) -> Any:
    return SimpleNamespace(
        parallel=SimpleNamespace(
            order=list(AXES) if order is None else order,
            **{"dp": None, "tp": 1, "cp": 1, "pp": 1, "ep": 1, **sizes},
        )
    )


def test_a_good_config_has_no_problems() -> None:
    assert check(config()) == []
    assert check(config(["tp", "cp", "ep", "dp", "pp"], dp=2, tp=4)) == []


@pytest.mark.parametrize(
    ("order", "said", "nearest"),
    [
        (["pp", "dp", "ep", "tp"], "cp is missing", "[cp, pp, dp, ep, tp]"),
        (["pp", "dp", "ep", "cp", "tpp"], "did you mean tp?", "[tp, pp, dp, ep, cp]"),
        (["pp", "pp", "dp", "ep", "cp", "tp"], "pp stands there 2 times", "[pp, dp, ep, cp, tp]"),
        ([], "are missing", "[pp, dp, ep, cp, tp]"),
    ],
)
def test_a_wrong_order_is_named_with_the_nearest_right_one(order: list[str], said: str, nearest: str) -> None:
    (problem,) = check(config(order))
    assert problem.key == "parallel.order"
    assert said in problem.message
    assert problem.message.endswith(f"use {nearest}")


def test_an_axis_of_no_ranks_is_refused() -> None:
    problems = check(config(tp=0, dp=-1))
    assert {problem.key for problem in problems} == {"parallel.tp", "parallel.dp"}
    assert all("use 1 or more" in problem.message for problem in problems)
