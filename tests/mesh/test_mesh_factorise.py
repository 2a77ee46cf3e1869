"""Layouts offered when the world size does not fit."""

from __future__ import annotations

import time
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest

from ultrascale.mesh.factorise import Factorisation, fitting


def config(heads: int = 8, kv: int = 4, layers: int = 4, batch: int = 64, **sizes: int | None) -> Any:
    parallel = {"dp": None, "tp": 1, "cp": 1, "pp": 1, "ep": 1, **sizes}
    model = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "num_experts": None,
    }
    return SimpleNamespace(
        parallel=SimpleNamespace(**parallel),
        model=SimpleNamespace(**model),
        batch=SimpleNamespace(global_size=batch, micro_size=1, sequence_length=64),
    )


@pytest.mark.parametrize("world", [1, 6, 8, 48])
def test_what_is_offered_fills_the_world_and_suits_the_model(world: int) -> None:
    offers = fitting(world, config(tp=4, batch=48))
    assert offers
    assert len(set(offers)) == len(offers)
    for sizes in offers:
        assert prod(sizes) == world
        assert 8 % sizes.tp == 0
        assert sizes.pp <= 4
        assert 48 % (sizes.dp * sizes.ep) == 0


def test_the_nearest_comes_first() -> None:
    assert fitting(8, config(tp=4))[0] == Factorisation(dp=2, tp=4, cp=1, pp=1, ep=1)
    assert fitting(6, config(tp=4, batch=48))[0] == Factorisation(dp=3, tp=2, cp=1, pp=1, ep=1)
    # An explicit dp is what gives way when it alone can.
    assert fitting(8, config(dp=3, tp=2))[0] == Factorisation(dp=4, tp=2, cp=1, pp=1, ep=1)


def test_something_is_offered_when_nothing_suits_the_model() -> None:
    assert prod(fitting(7, config(heads=4, kv=4, layers=2, batch=4))[0]) == 7


def test_a_large_world_is_answered_at_once() -> None:
    start = time.process_time()
    assert len(fitting(100_000, config(tp=8, pp=4, batch=100_000), limit=4)) == 4
    assert time.process_time() - start < 1.0


def test_axes_of_size_one_are_not_printed() -> None:
    assert str(Factorisation(1, 2, 1, 4, 1)) == "dp=1 tp=2 pp=4"
