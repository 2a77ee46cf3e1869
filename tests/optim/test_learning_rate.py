"""The learning rate is a function of the step and of `schedule.*`: right at the ends, continuous, blind to the run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from small import config_of
from ultrascale.optim.schedule import learning_rate

PEAK, LOW, WARMUP, TOTAL, DECAY = 0.4, 0.05, 10, 110, 20
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"schedule.total_steps": TOTAL, "schedule.min_lr": LOW},
    "cosine": {"schedule.total_steps": TOTAL, "schedule.min_lr": LOW},
    "wsd": {"schedule.total_steps": TOTAL, "schedule.min_lr": LOW, "schedule.decay_steps": DECAY},
}
DECAYING = ["linear", "cosine", "wsd"]


def rates(name: str, steps: int = 200, **more: Any) -> list[float]:
    """Index = step; index 0 is unused."""
    settings = {"schedule.name": name, "schedule.warmup_steps": WARMUP, "optimizer.lr": PEAK}
    config = config_of({**settings, **SCHEDULES[name], **{key.replace("__", "."): v for key, v in more.items()}})
    return [0.0] + [learning_rate(step, config) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_warm_up_rises_evenly_and_ends_at_the_peak(name: str) -> None:
    lr = rates(name)
    for step in range(1, WARMUP + 1):
        assert lr[step] == pytest.approx(PEAK * step / WARMUP, rel=1e-15)
    assert lr[WARMUP] == PEAK
    assert max(lr) == PEAK


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warm_up_the_first_step_is_near_the_peak(name: str) -> None:
    lr = rates(name, schedule__warmup_steps=0)
    assert 0.98 * PEAK < lr[1] <= PEAK


@pytest.mark.parametrize("name", DECAYING)
def test_the_decay_ends_at_its_last_step_and_stays_there(name: str) -> None:
    lr = rates(name)
    assert lr[TOTAL] == pytest.approx(LOW, rel=1e-12)
    assert lr[TOTAL - 1] > LOW
    assert all(rate == pytest.approx(LOW, rel=1e-12) for rate in lr[TOTAL:])


def test_values_on_the_way() -> None:
    middle = (WARMUP + TOTAL) // 2
    assert rates("constant")[middle] == PEAK
    assert rates("linear")[middle] == pytest.approx((PEAK + LOW) / 2, rel=1e-12)
    assert rates("cosine")[middle] == pytest.approx((PEAK + LOW) / 2, rel=1e-12)
    quarter = WARMUP + (TOTAL - WARMUP) // 4
    assert rates("cosine")[quarter] == pytest.approx(LOW + (PEAK - LOW) * (2 + 2**0.5) / 4, rel=1e-12)
    assert rates("linear")[quarter] == pytest.approx(LOW + (PEAK - LOW) * 3 / 4, rel=1e-12)
    wsd = rates("wsd")
    assert all(rate == PEAK for rate in wsd[WARMUP : TOTAL - DECAY + 1])
    assert wsd[TOTAL - DECAY + 1] < PEAK
    assert wsd[TOTAL - DECAY // 2] == pytest.approx((PEAK + LOW) / 2, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_continuous_and_never_rises_after_warm_up(name: str) -> None:
    lr = rates(name)
    steepest = max(PEAK / WARMUP, (PEAK - LOW) / DECAY)
    for before, after in pairwise(lr):
        assert abs(after - before) <= steepest * (1 + 1e-9)
    assert all(after <= before + 1e-15 for before, after in pairwise(lr[WARMUP:]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_length_of_the_run_plays_no_part(name: str) -> None:
    assert rates(name, run__steps=1) == rates(name, run__steps=100_000)
