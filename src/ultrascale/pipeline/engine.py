"""Executes a plan: the one loop that runs every schedule, a single stage's gradient accumulation included.

Receives are posted where the plan says and awaited by the action that needs them; sends never block. Nothing is kept
longer than its last use: a stage's input and graph until its backward, an output until it has been sent, a message
until something received proves that it arrived (`releases.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from ultrascale.comm import p2p
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.comm.turns import take_turns
from ultrascale.models.batch import StepBatch
from ultrascale.models.family import StageModule
from ultrascale.parallel.experts.load import ExpertLoad
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.objective import Objective
from ultrascale.parallel.passes import Pass, Visit
from ultrascale.parallel.weights import Weights
from ultrascale.pipeline.actions import COMPUTE, SENDS, Action, Kind, Message, Payload, Plan
from ultrascale.pipeline.releases import releases

Outputs = list[dict[str, torch.Tensor]]
"""The terms (or logits) that stages of this rank returned, detached, in the order in which their forwards ran."""


ONE_WAY_SENDS = 2
"""Sends that an evaluation over stages in rank order leaves under way."""


class Timed(NamedTuple):
    """One executed action, for the timeline, from when its inputs were there. Seconds of `time.perf_counter`."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float
    action: str
    """Text form of the whole action: of an FB both parts, where the fields above say its forward's."""


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    input: torch.Tensor | None
    roots: tuple[Any, ...]
    """Where backward starts: the edge into the graph that made the output, without the output's memory (not on the last
    stage), and the scalar of the stage's own terms of the objective, if it has any."""


Key = tuple[int, int]
"""(stage, micro-batch)"""


class Engine:
    """Runs one plan over the stages of this rank.

    stages         stage → module, those that the plan places here
    pipeline       the group over pp; its index is this rank's row of the plan
    gradients      the sink; None when the plan is forward-only
    weights        gathers parameters that replicas share out; None when they share none out
    buffer         makes an empty tensor of the form that stages hand on, [seq (/ tp), batch, hidden], for a micro-batch
    load           where routers say how many tokens each expert got; None when nobody asks
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, StageModule],
        pipeline: Group,
        objective: Objective,
        gradients: Gradients | None,
        weights: Weights | None,
        buffer: Callable[[int], torch.Tensor],
        load: ExpertLoad | None = None,
    ) -> None:
        self.plan, self.stages, self.pipeline = plan, stages, pipeline
        self.objective, self.gradients, self.weights, self.buffer = objective, gradients, weights, buffer
        self.load = load
        self.ledger = pipeline.ledger
        self.actions = plan.actions[pipeline.index]
        self.last_stage = plan.stages - 1
        self.timeline: list[Timed] | None = None
        """Set to a list to have executed actions recorded."""
        self._releases = releases(plan)[pipeline.index]
        self._last_backward = {
            a.stage: a.micro_batch for action in self.actions for a in action.computes if a.kind in (Kind.B, Kind.BW)
        }
        # Nothing comes back that proves arrival; but who is waited for cannot be waiting for this rank.
        self._one_way = plan.forward_only and all(
            action.peer is None or action.peer > rank
            for rank, row in enumerate(plan.actions)
            for action in row
            if action.kind in SENDS
        )
        self._crossing = {action.message for action in self.actions if action.kind in SENDS}
        """What this rank makes for others."""
        self._execute: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.BI: self._input_backward,
            Kind.BW: self._weight_backward,
            Kind.FB: self._pair,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.REDUCE: self._reduce,
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
        }
        self._visits = list(self._units_in_order())
        self._began = 0.0
        """When the action that runs had what it waits for."""
        self._reset()

    def _units_in_order(self) -> Iterator[Visit]:
        """The units that the actions pass through, each time: what is gathered ahead."""
        for action in self.actions:
            for part in action.computes:
                if part.kind is not Kind.BW:  # needs no weights
                    units = [name for name, _ in self.stages[part.stage].units()]
                    backward = part.kind is not Kind.F
                    for unit in reversed(units) if backward else units:
                        yield Visit(part.stage, part.micro_batch, unit, backward)

    def _reset(self) -> None:
        self._batch: StepBatch | None = None
        self._outputs: Outputs = []
        self._in_flight: dict[Key, _InFlight] = {}
        self._ready: dict[tuple[str, int, int], torch.Tensor] = {}
        """("activation" | "gradient", stage that needs it, micro-batch) → on this rank, not yet used."""
        self._awaited: dict[tuple[str, int, int], Pending] = {}
        self._to_send: dict[tuple[str, int, int], torch.Tensor] = {}
        self._sent: dict[int, Pending] = {}

    def run(self, batch: StepBatch) -> Outputs:
        """One step's forward and backward: afterwards all gradients are accumulated and their reductions issued.

        Raises ValueError when the batch has another number of micro-batches than the plan.
        """
        if len(batch.micro_batches) != self.plan.micro_batches:
            raise ValueError(
                f"the plan has {self.plan.micro_batches} micro-batches, the batch {len(batch.micro_batches)}"
            )
        self._reset()
        self._batch = batch
        if self.gradients is not None:
            self.gradients.begin_step(self._last_backward)
        if self.weights is not None:
            self.weights.follow(self._visits)
        for index, action in enumerate(self.actions):
            self._began = time.perf_counter()
            self._execute[action.kind](action)
            if self.timeline is not None and action.kind in COMPUTE:
                end = time.perf_counter()
                kind, stage, micro_batch = str(action.kind), action.stage, action.micro_batch
                self.timeline.append(Timed(kind, stage, micro_batch, self._began, end, str(action)))
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                self._sent[index] = self._awaited.pop(("sent", action.stage, action.micro_batch))
                if self._one_way and len(self._sent) > ONE_WAY_SENDS:
                    self._sent.pop(min(self._sent)).wait()
            for sent in self._releases.get(index, ()):
                self._sent.pop(sent).wait()
        for pending in self._sent.values():
            pending.wait()
        outputs = self._outputs
        assert not self._in_flight, f"the plan left {sorted(self._in_flight)} without a backward"
        self._reset()
        return outputs

    # ---- compute --------------------------------------------------------------------------------------------------

    def _take(self, payload: str, stage: int, micro_batch: int) -> torch.Tensor:
        """An input or a gradient that this stage needs: received, or made on this rank."""
        self._await(payload, stage, micro_batch)
        return self._ready.pop((payload, stage, micro_batch))

    def _await(self, payload: str, stage: int, micro_batch: int) -> None:
        """Waits for a message, if this is one; from then on the action runs."""
        key = (payload, stage, micro_batch)
        if key in self._awaited:
            self._ready[key] = self._awaited.pop(key).wait()
            self._began = time.perf_counter()

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        assert self._batch is not None
        training = self.gradients is not None
        hidden = self._take("activation", stage, number) if stage > 0 else None
        if hidden is not None and training:
            hidden.requires_grad_()
        batch = self._batch.micro_batches[number]
        current = Pass(
            stage, number, self.gradients, self.weights, places=batch.places, samples=batch.samples, load=self.load
        )
        with self.ledger.during("forward"), torch.set_grad_enabled(training):
            out: Any = self.stages[stage](hidden, batch, current)
            onward, terms = _parts(out)
            scalar = self.objective.scalar(terms, self._batch.denominators) if terms and training else None
        if terms:
            self._outputs.append({name: value.detach() for name, value in terms.items()})
        if training:
            edge = None if onward is None else get_gradient_edge(onward)
            roots = tuple(root for root in (edge, scalar) if root is not None)
            self._in_flight[stage, number] = _InFlight(hidden, roots)
        if onward is not None:
            self._hand_over("activation", stage, stage + 1, number, onward.detach())

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        held = self._in_flight.pop((stage, number))
        gradient = None if stage == self.last_stage else self._take("gradient", stage, number)
        with self.ledger.during("backward"):
            torch.autograd.backward(held.roots, (gradient, None)[: len(held.roots)])
        if self.weights is not None:
            self.weights.end(stage, number)
        if stage > 0:
            assert held.input is not None
            assert held.input.grad is not None
            self._hand_over("gradient", stage, stage - 1, number, held.input.grad)

    def _input_backward(self, action: Action) -> None:
        """Backward without the weight gradients, which wait for the BW of this stage and micro-batch."""
        assert self.gradients is not None
        self.gradients.split(action.stage, action.micro_batch)
        self._backward(action)

    def _weight_backward(self, action: Action) -> None:
        assert self.gradients is not None
        with self.ledger.during("backward"):
            self.gradients.run_deferred(action.stage, action.micro_batch)

    def _pair(self, action: Action) -> None:
        """A forward and a backward, of which one goes on while the other waits for a collective."""
        forward, backward = action.parts
        self._await("activation", forward.stage, forward.micro_batch)
        self._await("gradient", backward.stage, backward.micro_batch)
        take_turns(self.ledger, lambda: self._forward(forward), lambda: self._execute[backward.kind](backward))

    def _hand_over(self, payload: Payload, source: int, target: int, micro_batch: int, tensor: torch.Tensor) -> None:
        """To a stage on this rank at once; to another rank when the SEND that follows says so."""
        if Message(payload, min(source, target), micro_batch) in self._crossing:
            self._to_send[payload, source, micro_batch] = tensor
        else:
            self._ready[payload, target, micro_batch] = tensor

    # ---- messages and parameters ----------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        assert action.peer is not None
        payload = "activation" if action.kind is Kind.SEND_F else "gradient"
        tensor = self._to_send.pop((payload, action.stage, action.micro_batch))
        tag = action.message.tag(self.plan.micro_batches)
        with self.ledger.during("forward" if action.kind is Kind.SEND_F else "backward"):
            pending = p2p.send(tensor.contiguous(), self.pipeline, action.peer, tag)
        self._awaited["sent", action.stage, action.micro_batch] = pending

    def _receive(self, action: Action) -> None:
        assert action.peer is not None
        assert self._batch is not None
        payload = "activation" if action.kind is Kind.RECV_F else "gradient"
        buffer = self.buffer(self._batch.micro_batches[action.micro_batch].inputs.shape[1])
        tag = action.message.tag(self.plan.micro_batches)
        with self.ledger.during("forward" if action.kind is Kind.RECV_F else "backward"):
            pending = p2p.receive(buffer, self.pipeline, action.peer, tag)
        self._awaited[payload, action.stage, action.micro_batch] = pending

    def _reduce(self, action: Action) -> None:
        assert self.gradients is not None
        micro_batch = action.micro_batch
        self.gradients.reduce(action.stage, self._last_backward[action.stage] if micro_batch < 0 else micro_batch)

    def _unshard(self, action: Action) -> None:
        assert self.weights is not None
        self.weights.unshard(action.stage)

    def _reshard(self, action: Action) -> None:
        assert self.weights is not None
        self.weights.reshard(action.stage)


def _parts(out: Any) -> tuple[torch.Tensor | None, Mapping[str, torch.Tensor]]:
    """(what goes on to the next stage, terms of the objective) of what a stage returned."""
    if isinstance(out, tuple):
        return out
    return (out, {}) if isinstance(out, torch.Tensor) else (None, out)
