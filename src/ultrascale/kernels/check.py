"""What a config can get wrong about kernels: one that is named and cannot run. Needs no torch."""

from __future__ import annotations

from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config
from ultrascale.kernels.choice import Demand, Place, Refusal, choose, installed


def check(config: Config) -> list[Problem]:
    """Problems of the keys `kernels.*` on every device. Takes a resolved config."""
    package = installed("flash-attn")
    by_device = [_refusals(config, Place(*of, package)) for of in (("cpu", (0, 0)), ("cuda", (9, 0)))]
    return [_problem(config, refusal) for refusal in by_device[-1]] if all(by_device) else []


def check_device(config: Config, device: str) -> list[Problem]:
    """Those of the device that the run is on. Takes a config that `check` found nothing wrong with."""
    if config.kernels.attention == "auto":
        return []
    return [_problem(config, refusal, device) for refusal in _refusals(config, Place.of(device))]


def _refusals(config: Config, place: Place) -> tuple[Refusal, ...]:
    return choose(config.kernels.attention, Demand.of(config), place).refusals


def _problem(config: Config, refusal: Refusal, device: str = "") -> Problem:
    run = f", and this run is on {device}" if device == "cpu" else ""
    ways = [refusal.fix] if refusal.fix else []
    message = f"kernels.attention={config.kernels.attention} {refusal.text}{run}"
    return Problem("kernels.attention", f"{message}; {', or '.join([*ways, 'use kernels.attention=auto'])}")
