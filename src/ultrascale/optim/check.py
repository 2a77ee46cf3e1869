"""What a config can get wrong about its optimizer and its learning rate. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config

# Which keys of schedule.* each schedule reads, beside warmup_steps, which all do.
_READ_BY = {
    "constant": (),
    "linear": ("total_steps", "min_lr"),
    "cosine": ("total_steps", "min_lr"),
    "wsd": ("total_steps", "min_lr", "decay_steps"),
}


def check(config: Config) -> list[Problem]:
    """Problems of the keys `optimizer.*` and `schedule.*`. Takes a resolved config."""
    return [*_optimizer(config), *_schedule(config)]


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.name == "muon":
        yield Problem("optimizer.name", "optimizer.name=muon is not in this version; use adamw")
    if optimizer.name == "sgd":
        yield _idle("optimizer.betas", "optimizer.name=sgd")
        yield _idle("optimizer.eps", "optimizer.name=sgd")
    if optimizer.name == "adamw" and optimizer.momentum:
        yield _idle("optimizer.momentum", "optimizer.name=adamw (its first moment decays by optimizer.betas)")


def _schedule(config: Config) -> Iterator[Problem]:
    schedule, lr = config.schedule, config.optimizer.lr
    reads = _READ_BY[schedule.name]
    for name in ("total_steps", "decay_steps", "min_lr"):
        if name not in reads and getattr(schedule, name):
            yield _idle(f"schedule.{name}", f"schedule.name={schedule.name}")
    if "min_lr" in reads and schedule.min_lr > lr:
        message = f"schedule.min_lr={schedule.min_lr} is above optimizer.lr={lr}; use at most {lr}"
        yield Problem("schedule.min_lr", message)
    if "total_steps" not in reads:
        return

    total, warmup = schedule.total_steps, schedule.warmup_steps
    if total is None:
        message = (
            f"schedule.total_steps is missing: schedule.name={schedule.name} decays until then; "
            f"use the length of the whole training, for example run.steps={config.run.steps}"
        )
        yield Problem("schedule.total_steps", message)
    elif warmup >= total:
        message = f"schedule.warmup_steps={warmup} is not below schedule.total_steps={total}; use less"
        yield Problem("schedule.warmup_steps", message)
    elif schedule.name == "wsd" and schedule.decay_steps is not None and warmup + schedule.decay_steps > total:
        message = (
            f"schedule.decay_steps={schedule.decay_steps} and schedule.warmup_steps={warmup} are more than "
            f"schedule.total_steps={total}; use a decay of at most {total - warmup}"
        )
        yield Problem("schedule.decay_steps", message)


def _idle(key: str, under: str) -> Problem:
    return Problem(key, f"{key} has no effect under {under}; leave it out", kind="idle")
