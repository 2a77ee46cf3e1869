"""What layers, embedding and head of a configured model cost, in closed form; and the split that follows from it.

Times are FLOPs of matrix products, which is what the parts of a model compare by on one device: an embedding is a
look-up and costs none, the head costs as much as several layers (2.4 in Llama 3 8B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ultrascale.models.sizes import attention_sizes, mean_keys
from ultrascale.pipeline.actions import Kind, Plan
from ultrascale.pipeline.balance import LayerCosts, Memory, Stages, balanced
from ultrascale.pipeline.costs import Costs, parse_costs
from ultrascale.pipeline.partition import Split, from_list, partition, table, uniform
from ultrascale.pipeline.schedules.registry import Schedule, virtual_stages
from ultrascale.pipeline.simulate import simulate

if TYPE_CHECKING:
    from ultrascale.config.schema import Config

BALANCED = "balanced"
"""pipeline.layout that asks for the split computed here."""

STATE_BYTES = 16.0
"""Of a parameter: weight, gradient and the two moments of Adam in float32."""

ACTIVATION_BYTES = 34.0
"""Of a layer, per token and hidden element, in 16 bits and without the attention matrix, which a fused kernel does not
keep (Korthikanti et al. 2022, equation 2)."""


def layer_costs(config: Config) -> LayerCosts:
    """Costs of one micro-batch of a resolved config: times in FLOPs of forward and backward, memory in bytes.

    Closed form of the Llama family, which others are taken to be like. Bytes are those of one tensor-parallel rank
    without ZeRO, which only shrinks them.
    """
    model, recompute = config.model, config.recompute.mode
    attention = attention_sizes(model)
    layers, further, tp = model.num_hidden_layers, model.num_nextn_predict_layers, config.parallel.tp
    tokens = config.batch.micro_size * config.batch.sequence_length // config.parallel.cp
    vocabulary = model.vocab_size * model.hidden_size
    matmul = attention.matrices + 3 * model.hidden_size * model.intermediate_size
    passes = 4 if recompute == "full" else 3  # forward, twice as much backward, and the forward again
    kept = 2.0 if recompute == "full" else ACTIVATION_BYTES
    parameters = matmul + 2 * model.hidden_size
    # Layers that predict further tokens lie with the head, and each of them uses it again.
    joined = 2 * model.hidden_size**2
    *times, behind = (
        passes * 2 * tokens * (matmul + attention.width * mean_keys(config, layer)) / tp for layer in range(layers + 1)
    )
    return LayerCosts(
        time=tuple(times),
        embedding=0.0,
        head=3 * 2 * tokens * ((1 + further) * vocabulary + further * joined) / tp + further * behind,
        parameter_bytes=(STATE_BYTES * parameters / tp,) * layers,
        activation_bytes=(kept * tokens * model.hidden_size / tp,) * layers,
        embedding_bytes=(STATE_BYTES * vocabulary / tp, 0.0),
        head_bytes=(
            STATE_BYTES * (vocabulary + further * (parameters + joined)) / tp,
            4.0 * (1 + further) * tokens * model.vocab_size / tp + further * kept * tokens * model.hidden_size / tp,
        ),
    )


def stage_costs(costs: LayerCosts, split: Split, P2P: float = 0.0) -> Costs:
    """Costs of the actions of each stage of a split: a third of its time each for F, BI and BW."""
    ends = [stage.layers for stage in split]
    stages = Stages(costs, tuple((stage,) for stage in range(len(split))), Memory())
    thirds = tuple(stages.time(stage, layers.start, layers.stop) / 3 for stage, layers in enumerate(ends))
    return Costs(thirds, thirds, thirds, P2P)


def planned_costs(config: Config, entry: Schedule) -> Costs | None:
    """What a searched schedule orders by: `pipeline.costs`, or else the FLOPs of the stages; None for all others.

    Raises ScheduleError when pipeline.costs is not understood, or given for another number of stages.
    """
    pipeline, layers = config.pipeline, config.model.num_hidden_layers
    if not entry.searched:
        return None
    stages = config.parallel.pp * virtual_stages(entry, pipeline.virtual_stages)
    if pipeline.costs is not None:
        costs = parse_costs(pipeline.costs)
        costs.check(stages)
        return costs
    # A balanced layout needs the plan first; even stages are near enough to it.
    split = partition(None if pipeline.layout == BALANCED else pipeline.layout, layers, stages)
    flops = layer_costs(config)
    layer = sum(flops.time) / layers / 3
    times = replace(flops, time=tuple(time / layer for time in flops.time), head=flops.head / layer)
    return stage_costs(times, split)


def in_flight(plan: Plan) -> tuple[int, ...]:
    """Stage → micro-batches that it holds at most, from F to the end of B or BW."""
    held, most = [0] * plan.stages, [0] * plan.stages
    for _, _, part in plan.computes():
        if part.kind is Kind.F:
            held[part.stage] += 1
            most[part.stage] = max(most[part.stage], held[part.stage])
        elif part.kind in (Kind.B, Kind.BW):
            held[part.stage] -= 1
    return tuple(most)


def refined(costs: LayerCosts, plan: Plan, split: Split, P2P: float = 0.0) -> Split:
    """The split after moving single layers between stages as long as that shortens the simulated makespan of `plan`.

    The makespan counts also what the fill and the drain wait for, which the slowest rank does not. Stages keep a layer.
    """
    counts = [len(stage.layers) for stage in split]
    layers = sum(counts)

    def makespan(tried: Sequence[int]) -> float:
        split = from_list(tried, layers, len(tried))
        return float(simulate(plan, stage_costs(costs, split, P2P)).makespan)

    best = makespan(counts)
    while True:
        moves = []
        for source in range(len(counts)):
            for target in range(len(counts)):
                if source != target and counts[source] > 1:
                    tried = list(counts)
                    tried[source], tried[target] = tried[source] - 1, tried[target] + 1
                    moves.append((makespan(tried), tried))
        shortest, tried = min(moves, default=(best, counts))
        if shortest >= best * (1 - 1e-9):
            return from_list(counts, layers, len(counts))
        best, counts = shortest, tried


@dataclass(frozen=True)
class Balance:
    """A computed split beside the uniform one; times relative to a layer."""

    split: Split
    uniform: Split
    slowest: float
    uniform_slowest: float
    mean: float

    @property
    def gain(self) -> float:
        """Share of the uniform split's slowest rank that is saved, 0 to 1."""
        return 1 - self.slowest / self.uniform_slowest if self.uniform_slowest else 0.0

    def text(self) -> str:
        """The table and what it gains, for people."""
        counts = " | ".join(str(len(stage.layers)) for stage in self.uniform)
        return (
            f"slowest rank {self.slowest:.3g} layers' time, {self.uniform_slowest:.3g} with the uniform split "
            f"({counts}): {self.gain:.1%} less; {self.mean:.3g} is the mean\n{table(self.split)}"
        )


def balance(costs: LayerCosts, plan: Plan, limit: float | None = None) -> Balance:
    """The balanced split for the stages and the memory of a plan; `limit` in bytes per rank.

    Raises PartitionError as `balanced` does.
    """
    placement = plan.placement
    memory = Memory(limit, in_flight(plan))
    split = balanced(costs, placement, memory)
    even = uniform(len(costs.time), plan.stages)
    layer = sum(costs.time) / len(costs.time) or 1.0
    stages = Stages(costs, placement, memory)
    ranks = [max(stages.loads([len(stage.layers) for stage in each])[1]) / layer for each in (split, even)]
    mean = (sum(costs.time) + costs.embedding + costs.head) / layer / stages.ranks
    return Balance(split, even, ranks[0], ranks[1], mean)


def split_of(config: Config, plan: Plan) -> Split:
    """The split that a resolved config asks for; every rank finds the same.

    Raises PartitionError as `partition` and `balanced` do.
    """
    if config.pipeline.layout == BALANCED:
        return balance(layer_costs(config), plan).split
    return partition(config.pipeline.layout, config.model.num_hidden_layers, plan.stages)


def balance_text(config: Config, plan: Plan) -> str | None:
    """What the balanced split of a resolved config looks like and gains; None where another split is asked for."""
    if config.pipeline.layout != BALANCED:
        return None
    return balance(layer_costs(config), plan).text()
