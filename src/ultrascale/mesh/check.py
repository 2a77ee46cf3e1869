"""What the mesh asks of a config. Needs no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from ultrascale.config.problem import Problem
from ultrascale.mesh.axes import AXES


def check(config: Any) -> list[Problem]:
    """Problems of `parallel.order` and of the sizes of the axes; empty when there are none."""
    parallel = config.parallel
    problems = [
        Problem(f"parallel.{axis}", f"parallel.{axis}={size} is not a number of ranks; use 1 or more")
        for axis in AXES
        if (size := getattr(parallel, axis)) is not None and size < 1
    ]
    order = list(parallel.order)
    if sorted(order) != sorted(AXES):
        problems.append(Problem("parallel.order", _order_message(order)))
    return problems


def _order_message(order: list[str]) -> str:
    faults = []
    for name in dict.fromkeys(order):
        if name not in AXES:
            near = get_close_matches(name, AXES, n=1)
            faults.append(f"{name} is not an axis" + (f" (did you mean {near[0]}?)" if near else ""))
        elif order.count(name) > 1:
            faults.append(f"{name} stands there {order.count(name)} times")
    missing = [axis for axis in AXES if axis not in order]
    if missing:
        faults.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    # What the user surely meant comes first, what was left out goes outside of it.
    kept = [name for name in dict.fromkeys(order) if name in AXES]
    nearest = ", ".join([*missing, *kept])
    return (
        f"parallel.order=[{', '.join(order)}] must name each of the five axes once, outermost first: "
        f"{'; '.join(faults)}; use [{nearest}]"
    )
