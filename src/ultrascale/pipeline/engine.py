"""Executes a plan: the one loop that runs every schedule, a single stage's gradient accumulation included.

Receives are posted where the plan says and awaited by the action that needs them; sends never block. Nothing is kept
longer than its last use: a stage's input and graph until its backward, an output until it has been sent, a message
until something received proves that it arrived (`releases.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ultrascale.comm import p2p
from ultrascale.comm.collectives import Pending
from ultrascale.comm.group import Group
from ultrascale.models.batch import StepBatch
from ultrascale.models.family import StageModule
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.objective import Objective
from ultrascale.parallel.passes import Pass
from ultrascale.pipeline.actions import COMPUTE, Action, Kind, Plan
from ultrascale.pipeline.releases import releases

Outputs = list[dict[str, torch.Tensor]]
"""What the last stage returned, micro-batch by micro-batch, detached; empty on other ranks."""


FORWARD_ONLY_SENDS = 2
"""Sends that an evaluation leaves under way."""


class Timed(NamedTuple):
    """One executed action, for the timeline. Seconds of `time.perf_counter`."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    input: torch.Tensor | None
    root: torch.Tensor | GradientEdge
    """The objective's scalar on the last stage; elsewhere the edge into the graph, without its output's memory."""


Key = tuple[int, int]
"""(stage, micro-batch)"""


class Engine:
    """Runs one plan over the stages of this rank.

    stages         stage → module, those that the plan places here
    pipeline       the group over pp; its index is this rank's row of the plan
    gradients      the sink; None when the plan is forward-only
    buffer         makes an empty tensor of the form that stages hand on, [seq (/ tp), batch, hidden], for a micro-batch
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, StageModule],
        pipeline: Group,
        objective: Objective,
        gradients: Gradients | None,
        buffer: Callable[[int], torch.Tensor],
    ) -> None:
        self.plan, self.stages, self.pipeline = plan, stages, pipeline
        self.objective, self.gradients, self.buffer = objective, gradients, buffer
        self.ledger = pipeline.ledger
        self.actions = plan.actions[pipeline.index]
        self.last_stage = plan.stages - 1
        self.timeline: list[Timed] | None = None
        """Set to a list to have executed actions recorded."""
        self._releases = releases(plan)[pipeline.index]
        self._last_backward = {
            a.stage: a.micro_batch for action in self.actions for a in action.computes if a.kind is Kind.B
        }
        self._execute: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.REDUCE: self._reduce,
        }
        self._reset()

    def _reset(self) -> None:
        self._batch: StepBatch | None = None
        self._outputs: Outputs = []
        self._in_flight: dict[Key, _InFlight] = {}
        self._ready: dict[tuple[str, int, int], torch.Tensor] = {}
        """("activation" | "gradient", stage that needs it, micro-batch) → made on this rank, not yet used."""
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
        for index, action in enumerate(self.actions):
            start = time.perf_counter()
            self._execute[action.kind](action)
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                self._sent[index] = self._awaited.pop(("sent", action.stage, action.micro_batch))
                if self.plan.forward_only and len(self._sent) > FORWARD_ONLY_SENDS:
                    # Nothing comes back that proves arrival. Messages go one way here: who is waited for does not
                    # wait for this rank.
                    self._sent.pop(min(self._sent)).wait()
            for sent in self._releases.get(index, ()):
                self._sent.pop(sent).wait()
            if self.timeline is not None and action.kind in COMPUTE:
                self.timeline.append(
                    Timed(str(action.kind), action.stage, action.micro_batch, start, time.perf_counter())
                )
        for pending in self._sent.values():
            pending.wait()
        outputs = self._outputs
        assert not self._in_flight, f"the plan left {sorted(self._in_flight)} without a backward"
        self._reset()
        return outputs

    # ---- compute --------------------------------------------------------------------------------------------------

    def _take(self, payload: str, stage: int, micro_batch: int) -> torch.Tensor:
        """An input or a gradient that this stage needs: received, or made on this rank."""
        key = (payload, stage, micro_batch)
        pending = self._awaited.pop(key, None)
        return self._ready.pop(key) if pending is None else pending.wait()

    def _forward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        assert self._batch is not None
        training = self.gradients is not None
        hidden = self._take("activation", stage, number) if stage > 0 else None
        if hidden is not None and training:
            hidden.requires_grad_()
        current = Pass(stage, number, self.gradients)
        with self.ledger.during("forward"), torch.set_grad_enabled(training):
            out: Any = self.stages[stage](hidden, self._batch.micro_batches[number], current)
            if stage == self.last_stage:
                self._outputs.append({name: value.detach() for name, value in out.items()})
                if training:
                    scalar = self.objective.scalar(out, self._batch.denominators)
                    self._in_flight[stage, number] = _InFlight(hidden, scalar)
                return
        if training:
            self._in_flight[stage, number] = _InFlight(hidden, get_gradient_edge(out))
        self._hand_over("activation", stage, stage + 1, number, out.detach())

    def _backward(self, action: Action) -> None:
        stage, number = action.stage, action.micro_batch
        held = self._in_flight.pop((stage, number))
        gradient = None if stage == self.last_stage else self._take("gradient", stage, number)
        with self.ledger.during("backward"):
            torch.autograd.backward(held.root, gradient)
        if stage > 0:
            assert held.input is not None
            assert held.input.grad is not None
            self._hand_over("gradient", stage, stage - 1, number, held.input.grad)

    def _hand_over(self, payload: str, source: int, target: int, micro_batch: int, tensor: torch.Tensor) -> None:
        """To a stage on this rank at once; to another rank when the SEND that follows says so."""
        if target in self.stages:
            self._ready[payload, target, micro_batch] = tensor
        else:
            self._to_send[payload, source, micro_batch] = tensor

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
        self.gradients.reduce(action.stage)
