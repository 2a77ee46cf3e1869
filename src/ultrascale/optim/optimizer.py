"""The optimizer: algorithms over flat memory, segment by segment, and clipping by the one global norm.

State is flat like the masters; its elements are named through the buckets' spans, so that a checkpoint stores moments
per logical parameter. Building an optimizer changes no parameter and makes no step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import torch

from ultrascale.config.schema import Config
from ultrascale.optim.adamw import AdamW
from ultrascale.optim.algorithm import Algorithm
from ultrascale.optim.groups import check_groups, rule_of, uses
from ultrascale.optim.muon import Muon
from ultrascale.optim.offload import Offloaded, Resident
from ultrascale.optim.segments import Segment, State, segments
from ultrascale.optim.sgd import SGD
from ultrascale.parallel.buckets import Bucket, Span
from ultrascale.parallel.layout import Layout
from ultrascale.parallel.weights import Weights
from ultrascale.precision.policy import DTYPES

ORDER = ("muon", "adamw", "sgd")
"""Of algorithms in a step: what Muon sends travels while the others update."""


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; 1 when it is within or no bound is set."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class Optimizer:
    """Every element of this rank's shards, updated by the algorithm of its segment's rule.

    algorithms   by name, in the order of a step
    segments     of all buckets, in the order of algorithms
    memory       where state is held
    """

    def __init__(
        self, weights: Weights, algorithms: Mapping[str, Algorithm], segments: Sequence[Segment], memory: Resident
    ) -> None:
        self.weights, self.store = weights, weights.store
        self.algorithms, self.segments, self.memory = algorithms, segments, memory
        for segment in segments:
            memory.hold(segment, algorithms[segment.rule.optimizer].state_names(segment))

    @torch.no_grad()
    def step(self, step: int, lr: float, coefficient: float) -> None:
        """Optimizer step number `step` (from 1) with gradients scaled by `coefficient` (clipping)."""
        visits = self.memory.visit(self.segments)
        for name, algorithm in self.algorithms.items():
            count = sum(segment.rule.optimizer == name for segment in self.segments)
            for segment, state in islice(visits, count):
                algorithm.update(segment, state, step, lr, coefficient)
            algorithm.exchange()
        assert next(visits, None) is None  # only now is the last segment's state back in its place
        for algorithm in self.algorithms.values():
            algorithm.finish(lr)
        self.weights.publish()

    @property
    def state(self) -> list[State]:
        """Of every segment, as it is held."""
        self.memory.settle()
        return [segment.state for segment in self.segments]

    def state_pieces(self, bucket: Bucket, span: Span) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """(name, global offset, values) of what is held of a span's state, as `Store.pieces` has its masters; views."""
        self.memory.settle()
        for segment in self.segments:
            if segment.bucket is bucket and segment.holds(span):
                for name, flat in segment.state.items():
                    for offset, values in self.store.pieces(bucket, span, flat, segment.start):
                        yield name, offset, values


def make_optimizer(config: Config, weights: Weights, layouts: Sequence[Layout] = ()) -> Optimizer:
    """What `optimizer.*` says.

    layouts   of the whole model, needed where there are groups: each must hold for one of them

    Raises ConfigError when a group holds for no parameter, or Muon is to update what is no matrix.
    """
    settings, store = config.optimizer, weights.store
    spans = [(bucket, span) for bucket in store.buckets for span in bucket.spans]
    check_groups(settings, layouts or [span.layout for _, span in spans])
    rule = partial(rule_of, settings=settings)
    made = sorted(segments(store.buckets, rule), key=lambda segment: ORDER.index(segment.rule.optimizer))
    device = store.buckets[0].masters.device if store.buckets else torch.device("cpu")
    master = store.policy.master

    algorithms: dict[str, Algorithm] = {}
    if uses(settings, "muon"):
        algorithms["muon"] = Muon(
            store.mesh,
            [(bucket, span) for bucket, span in spans if rule(span.layout).optimizer == "muon"],
            [segment for segment in made if segment.rule.optimizer == "muon"],
            store.group_of(("dp", "ep", "cp", "tp")),
            master if master == torch.float64 else DTYPES[settings.newton_schulz_dtype],
            device,
        )
    algorithms |= {"adamw": AdamW(), "sgd": SGD()}
    dtype = DTYPES[settings.state_dtype] if settings.state_dtype else master
    # On a CPU the host's memory is where state lies anyway.
    memory = Offloaded if settings.offload and device.type != "cpu" else Resident
    return Optimizer(weights, algorithms, made, memory(dtype, device))
