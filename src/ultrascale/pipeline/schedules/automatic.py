"""The shortest order of F, BI and BW that a search finds for the costs at hand, in the memory that is given.

Known schedules of every placement of that many stages per rank, greedy lists under many priorities, and local search
on the best (search/). Never longer than the uniform choice, 1F1B or ZB-H1, where that fits into the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from ultrascale.pipeline.actions import Action, Plan, ScheduleError
from ultrascale.pipeline.activations import peak_activations
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules import one_f_one_b, zb_h1
from ultrascale.pipeline.schedules.placement import Placement, linear, loop, v_shape
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.operations import Operations
from ultrascale.pipeline.search.portfolio import Portfolio
from ultrascale.pipeline.search.searched import plan_of
from ultrascale.pipeline.simulate import simulate
from ultrascale.pipeline.validate import validate

BUDGET = 420_000
"""Operations visited in a search: about two seconds of Python at most, where the plan is not longer than that."""

DRAWS = 60
STEPS = 40
ROUNDS = 6

LARGE = 30_000
"""Stages times micro-batches above which only the uniform schedules and a greedy list are compared."""

SEARCHED = frozenset({"auto", "zb1p_auto", "zb2p_auto", "zb_v_auto", "v_half", "v_min", "1f1b_v"})
"""Schedules that search on their own: no seeds, since their recipes are tried here."""


@dataclass(frozen=True)
class Search:
    """What a search gave; times in the unit of the costs.

    origin             what the order was made from
    bound              a makespan that no order on this placement beats, were memory unlimited; None where pairs may be
                       cheaper than their parts
    uniform            name of the uniform choice that was compared with, None when none fits into the memory
    uniform_makespan   its makespan, of the same model on the same ranks
    """

    plan: Plan
    makespan: float
    origin: str
    bound: float | None
    uniform: str | None
    uniform_makespan: float | None

    def text(self) -> str:
        """What the search gained, for people; one line each."""
        lines = [f"auto: makespan {self.makespan:.6g}, from {self.origin}"]
        if self.bound:
            gap = max(float(self.makespan / self.bound - 1), 0)
            lines.append(
                f"at most {gap:.2%} above the shortest possible makespan; no order has less than {self.bound:.6g}, "
                "however much memory it takes"
            )
        if self.uniform is None or self.uniform_makespan is None:
            lines.append("neither 1f1b nor zb_h1 fits into this memory, so there is no uniform choice to compare with")
        else:
            gain = float(1 - self.makespan / self.uniform_makespan) if self.uniform_makespan else 0.0
            lines.append(
                f"{gain:.2%} shorter than the uniform choice, {self.uniform} with makespan {self.uniform_makespan:.6g}"
            )
        return "\n".join(lines)


def schedule(request: Request) -> Plan:
    """The shortest validated plan found, with at most `activation_limit` activations on each rank."""
    return search(request).plan


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: the limit asked for, or 1F1B's P·V; or all M·V."""
    limit = request.ranks * request.virtual_stages
    if request.activation_limit is not None:
        limit = request.activation_limit
    return (min(limit, request.micro_batches * request.virtual_stages),) * request.ranks


def requires(request: Request) -> None:
    """Raises ScheduleError for a limit that does not hold one micro-batch."""
    limit, per_rank = request.activation_limit, request.virtual_stages
    if limit is not None and limit < per_rank:
        raise ScheduleError(
            f"activation_limit={limit} does not hold one micro-batch on {per_rank} stages per rank; "
            f"give {per_rank} or more"
        )


def explain(request: Request, plan: Plan) -> str:
    """What `plan`, as `schedule(request)` gave it, gained against the uniform choice, and how far it may be from the
    best. Raises ScheduleError when it is another plan."""
    found = search(request)
    if plan.compute_only().actions != found.plan.actions:
        raise ScheduleError(f"{plan.name} is not what auto makes of this request; pass the plan and its own request")
    return found.text()


@lru_cache(maxsize=8)  # a check, the plan and its explanation ask for the same
def search(request: Request) -> Search:
    """The best plan over all placements, and what it is compared with. Deterministic: the same on every rank.

    Raises ScheduleError as `requires` does.
    """
    requires(request)
    limits = memory_bound(request)
    uniform, known, placements = _uniform(request), _known(request), _placements(request)
    share = BUDGET // (2 * len(placements))
    portfolios = [_explored(placement, request, limits, [*uniform, *known], share) for placement in placements]
    best = min(portfolios, key=lambda portfolio: portfolio.best.score)
    best.left += BUDGET // 2
    best.improve(STEPS, ROUNDS)

    own = plan_of("auto", best.operations, best.best.orders)
    compared = [(simulate(plan, request.costs).makespan, plan.name, plan) for plan in uniform if _fits(plan, limits)]
    found = [(simulate(own, request.costs).makespan, best.best.origin, own), *compared]
    if request.costs.FB is not None:
        # As they are: pairs that run together may be cheaper than their parts, and the search knows the parts only.
        found += [(simulate(plan, request.costs).makespan, plan.name, plan) for plan in known if _fits(plan, limits)]
    makespan, origin, plan = min(found, key=lambda entry: float(f"{float(entry[0]):.10g}"))
    validate(plan, limits)
    bound = best.bound if request.costs.FB is None else None
    uniform_makespan, name, _ = min(compared, key=lambda entry: entry[0], default=(None, None, None))
    return Search(replace(plan, name="auto"), makespan, origin, bound, name, uniform_makespan)


def _explored(
    placement: Placement, request: Request, limits: tuple[int, ...], seeds: list[Plan], budget: int
) -> Portfolio:
    """The known schedules of a placement, then greedy lists."""
    operations = Operations(placement, request.micro_batches, request.costs)
    portfolio = Portfolio(operations, limits, budget)
    for seed in seeds:
        if seed.placement == placement and not (portfolio.candidates and portfolio.finished):
            portfolio.seed(seed)
    portfolio.draw(DRAWS)
    portfolio.retime()
    return portfolio


def _placements(request: Request) -> list[Placement]:
    ranks, per_rank = request.ranks, request.virtual_stages
    if per_rank == 1:
        return [linear(ranks)]
    shapes = [loop(ranks, per_rank), _consecutive(ranks, per_rank)]
    if per_rank == 2:
        shapes.insert(0, v_shape(ranks))
    return list(dict.fromkeys(shapes))


def _consecutive(ranks: int, per_rank: int) -> Placement:
    """Neighbouring stages on one rank: what one larger stage per rank would be."""
    return tuple((stage // per_rank,) for stage in range(ranks * per_rank))


def _uniform(request: Request) -> list[Plan]:
    """1F1B and ZB-H1 of the same model on the same ranks: with several stages a rank, one after the other."""
    merged = replace(request, virtual_stages=1, costs=Costs(), activation_limit=None)
    plans = []
    for known in (one_f_one_b.schedule(merged), zb_h1.schedule(merged)):
        actions = tuple(
            tuple(chain.from_iterable(_spread(action, request.virtual_stages) for action in row))
            for row in known.actions
        )
        plans.append(replace(known, placement=_consecutive(request.ranks, request.virtual_stages), actions=actions))
    return plans


def _spread(action: Action, per_rank: int) -> Iterator[Action]:
    """One action of a merged stage as the actions of its parts."""
    first = action.stage * per_rank
    stages = range(first, first + per_rank)
    for stage in stages if action.kind == "F" else reversed(stages):
        yield replace(action, stage=stage)


def _known(request: Request) -> list[Plan]:
    """Plans of all other schedules that take these numbers; of none where building them alone would take long."""
    from ultrascale.pipeline.schedules import registry  # it knows this schedule too

    plans: list[Plan] = []
    if request.stages * request.micro_batches > LARGE:
        return plans
    for entry in registry.SCHEDULES:
        if not entry.training or entry.name in SEARCHED:
            continue
        try:
            asked = registry.request(entry, request.ranks, request.micro_batches, request.virtual_stages, request.costs)
            plans.append(entry.build(asked))
        except ScheduleError:
            continue
    return plans


def _fits(plan: Plan, limits: tuple[int, ...]) -> bool:
    return all(peak <= limit for peak, limit in zip(peak_activations(plan), limits, strict=True))
