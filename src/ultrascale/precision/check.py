"""What a config can get wrong about its number formats. Needs no torch."""

from __future__ import annotations

from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config


def check(config: Config) -> list[Problem]:
    """Problems of the keys `precision.*`. Takes a resolved config."""
    precision = config.precision
    problems = []
    if precision.compute in ("float16", "fp8"):
        message = f"precision.compute={precision.compute} is not in this version; use bfloat16"
        problems.append(Problem("precision.compute", message))
    if precision.recipe is not None and precision.compute != "fp8":
        message = f"precision.recipe has no effect under precision.compute={precision.compute}; leave it out"
        problems.append(Problem("precision.recipe", message, kind="idle"))
    return problems
