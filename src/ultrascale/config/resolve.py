"""What a config leaves open, filled in from the config and the world size: the same on every rank."""

from collections.abc import Callable, Sequence
from typing import Any

from ultrascale.config.problem import ConfigError, Problem, choices
from ultrascale.config.schema import Config
from ultrascale.config.section import Section

Fitting = Callable[[int, Config], Sequence[object]]


def resolve(config: Config, world_size: int, fitting: Fitting | None = None) -> Config:
    """The config with nothing left to guess, but for what depends on the device
    (parallel.deterministic_reduction) or on the schedule (pipeline.virtual_stages).

    `fitting(world_size, config)` gives ways to cut a world, nearest first, for the message when the axes do
    not multiply to it (it is the mesh's, which stands above this package).

    Raises ConfigError when they do not, or when the heads do not divide the model's width.
    """
    run, model, parallel, schedule = config.run, config.model, config.parallel, config.schedule
    dp, head_dim = _data_parallel(config, world_size, fitting), _head_dim(config)
    problems = [problem for problem in (dp, head_dim) if isinstance(problem, Problem)]
    if problems:
        raise ConfigError(problems)

    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel == "auto":
        sequence_parallel = parallel.tp > 1
    expert_tensor_axes = parallel.expert_tensor_axes
    if expert_tensor_axes is None:
        expert_tensor_axes = () if "tp" in parallel.expert_axes else ("tp",)
    decay_steps = schedule.decay_steps
    if decay_steps is None and schedule.name == "wsd" and schedule.total_steps is not None:
        decay_steps = max(1, schedule.total_steps // 10)

    return _replace(
        config,
        run=_replace(run, dir=run.dir or f"runs/{run.name}"),
        model=_replace(
            model,
            head_dim=head_dim,
            num_key_value_heads=model.num_key_value_heads or model.num_attention_heads,
        ),
        parallel=_replace(
            parallel,
            dp=dp,
            sequence_parallel=sequence_parallel,
            expert_tensor_axes=expert_tensor_axes,
        ),
        schedule=_replace(schedule, decay_steps=decay_steps),
        precision=_replace(
            config.precision,
            reduce=config.precision.reduce or ("float64" if config.precision.compute == "float64" else "float32"),
        ),
    )


def smallest_world(config: Config) -> int:
    """The number of processes that the config asks for: parallel.dp replicas, or one where that is open."""
    parallel = config.parallel
    return parallel.tp * parallel.cp * parallel.pp * parallel.ep * (parallel.dp or 1)


def _head_dim(config: Config) -> int | Problem:
    model = config.model
    if model.head_dim is not None:
        return model.head_dim
    if model.qk_nope_head_dim is not None and model.qk_rope_head_dim is not None:
        return model.qk_nope_head_dim + model.qk_rope_head_dim
    width, heads = model.hidden_size, model.num_attention_heads
    if width % heads == 0:
        return width // heads
    fitting = choices([size for size in (width // heads * heads, (width // heads + 1) * heads) if size])
    return Problem(
        "model.num_attention_heads",
        f"model.num_attention_heads={heads} does not divide model.hidden_size={width}; use a hidden_size of "
        f"{fitting}, or set model.head_dim",
    )


def _data_parallel(config: Config, world_size: int, fitting: Fitting | None) -> int | Problem:
    """What is left of the world, which must come out whole."""
    dp = config.parallel.dp
    asked = smallest_world(config)
    if dp is None and world_size % asked == 0:
        return world_size // asked
    if dp is not None and world_size == asked:
        return dp

    sizes = {axis: getattr(config.parallel, axis) for axis in ("dp", "tp", "cp", "pp", "ep")}
    cut = {axis: size for axis, size in sizes.items() if size is not None and size > 1} or {"dp": dp}
    product = " × ".join(f"parallel.{axis}={size}" for axis, size in cut.items())
    total = f" = {asked}" if len(cut) > 1 else ""
    verb = "does not divide" if dp is None else "is not"
    below = world_size // asked * asked
    worlds = [asked] if dp is not None else [size for size in (below, below + asked) if size]
    ways_out = [f"use {choices(worlds)} processes"]
    if fitting is not None:
        ways_out.append(f"cut {world_size} as {choices(fitting(world_size, config)[:3])}")
    return Problem(
        f"parallel.{next(iter(cut))}",
        f"{product}{total} {verb} the world size {world_size}; {', or '.join(ways_out)}",
    )


def _replace(section: Any, **values: Any) -> Any:
    """A copy with other values. The class validates nothing here: every value comes from a validated one."""
    assert isinstance(section, Section)
    return section.model_copy(update=values)
