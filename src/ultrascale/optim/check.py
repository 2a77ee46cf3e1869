"""What a config can get wrong about its optimizer and its learning rate. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config, Optimizer, ParameterGroup
from ultrascale.optim.groups import uses

# Which keys of schedule.* each schedule reads, beside warmup_steps, which all do.
_READ_BY = {
    "constant": (),
    "linear": ("total_steps", "min_lr"),
    "cosine": ("total_steps", "min_lr"),
    "wsd": ("total_steps", "min_lr", "decay_steps"),
}

BFLOAT16_DECAY = 0.996
"""The largest decay at which every bfloat16 shrinks: half a step of the format is at most 2⁻⁸ of the number."""


def check(config: Config) -> list[Problem]:
    """Problems of the keys `optimizer.*` and `schedule.*`. Takes a resolved config."""
    return [*_optimizer(config), *_schedule(config)]


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    if not uses(optimizer, "adamw"):
        yield _idle("optimizer.betas", f"optimizer.name={optimizer.name}")
        yield _idle("optimizer.eps", f"optimizer.name={optimizer.name}")
    if not uses(optimizer, "sgd") and not uses(optimizer, "muon"):
        yield _idle("optimizer.momentum", "optimizer.name=adamw (its first moment decays by optimizer.betas)")
    if not uses(optimizer, "muon"):
        yield _idle("optimizer.newton_schulz_dtype", f"optimizer.name={optimizer.name}")
    elif config.precision.compute == "float64":
        yield _idle("optimizer.newton_schulz_dtype", "precision.compute=float64 (matrices stay float64)")
    if not _has_state(optimizer):
        yield _idle("optimizer.state_dtype", "optimizer.name=sgd without momentum, which holds no moments")
        yield _idle("optimizer.offload", "optimizer.name=sgd without momentum, which holds no moments")
    if optimizer.state_dtype == "bfloat16":
        yield from _decays_that_stand_still(optimizer)
    for number, group in enumerate(optimizer.groups):
        yield from _group(optimizer, group, f"optimizer.groups[{number}]")


def _group(optimizer: Optimizer, group: ParameterGroup, key: str) -> Iterator[Problem]:
    """One of optimizer.groups by itself; whom it holds for is seen when the model is known."""
    if (group.match is None) == (group.kind is None):
        both = "match and kind" if group.match else "neither match nor kind"
        yield Problem(key, f"{key} has {both}; use one of them, for example match: embed_tokens.* or kind: norm")
    said = [name for name in type(group).model_fields if name not in ("match", "kind")]
    if all(getattr(group, name) is None for name in said):
        yield Problem(key, f"{key} sets nothing; give it one of {', '.join(said)}, or leave it out")
    name: str = group.optimizer or optimizer.name
    if name == "muon" and group.optimizer is None and group.kind != "matrix":
        name = "adamw or muon"  # as each parameter is
    unread = {"adamw": ("momentum",), "sgd": ("betas", "eps"), "muon": ("betas", "eps")}.get(name, ())
    for field in unread:
        if getattr(group, field) is not None:
            yield _idle(f"{key}.{field}", f"optimizer {name}")


def _has_state(optimizer: Optimizer) -> bool:
    """Whether anything may have moments."""
    momentum = optimizer.momentum or any(group.momentum for group in optimizer.groups)
    return uses(optimizer, "adamw") or uses(optimizer, "muon") or bool(momentum)


def _decays_that_stand_still(optimizer: Optimizer) -> Iterator[Problem]:
    """A moment that is to shrink by less than half a step of its format is rounded back to where it was."""
    given: dict[str, Optimizer | ParameterGroup] = {
        "optimizer": optimizer,
        **{f"optimizer.groups[{number}]": group for number, group in enumerate(optimizer.groups)},
    }
    for prefix, settings in given.items():
        values = {f"{prefix}.betas": settings.betas or (), f"{prefix}.momentum": (settings.momentum or 0.0,)}
        for key, decays in values.items():
            if (largest := max(decays, default=0.0)) > BFLOAT16_DECAY:
                yield Problem(
                    key,
                    f"{key}: a moment in bfloat16 that decays by {largest} is rounded back to what it was and never "
                    f"shrinks; use at most {BFLOAT16_DECAY}, or optimizer.state_dtype=float32",
                )


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
