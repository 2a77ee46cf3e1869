"""Whether lists of actions run: a second opinion beside the validator, following each tensor as the engine would."""

from __future__ import annotations

from collections import Counter, deque

from ultrascale.pipeline.actions import MESSAGES, SENDS, Action, Kind, Message, Plan

Key = tuple[int, int, int]
"""(rank, stage, micro-batch)"""


class _Run:
    """Every rank's tensors; anything that an engine could not do sets `broken`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.broken = False
        self.outputs: set[Key] = set()  # of forwards
        self.gradients: set[Key] = set()  # of inputs
        self.weights: Counter[Key] = Counter()
        self.posted: dict[tuple[int, Message], None] = {}
        self.arrived: set[tuple[int, Message]] = set()
        self.used: set[tuple[int, Message]] = set()
        self.sends: dict[tuple[int, int, str], deque[Message]] = {}
        self.receives: dict[tuple[int, int, str], deque[Message]] = {}
        self.reduced: dict[tuple[int, int], int] = {}

    def able(self, rank: int, action: Action) -> bool:
        """Whether what an action waits for has come; False also when it never will."""
        return all(self._input_is_there(rank, part) for part in action.computes)

    def _input_is_there(self, rank: int, part: Action) -> bool:
        message = self._input(part)
        if message is None:
            return True
        source = part.stage - 1 if part.kind is Kind.F else part.stage + 1
        made = self.outputs if part.kind is Kind.F else self.gradients
        return (rank, source, part.micro_batch) in made or (rank, message) in self.arrived

    def _input(self, part: Action) -> Message | None:
        if part.kind is Kind.F and part.stage > 0:
            return Message("activation", part.stage - 1, part.micro_batch)
        if part.kind in (Kind.B, Kind.BI) and part.stage < self.plan.stages - 1:
            return Message("gradient", part.stage, part.micro_batch)
        return None

    def do(self, rank: int, action: Action) -> None:
        if action.kind in MESSAGES:
            self._message(rank, action)
        elif action.kind is Kind.REDUCE:
            self.broken |= (rank, action.stage) in self.reduced
            held = [key for key in self.weights if key[:2] == (rank, action.stage)]
            self.reduced[rank, action.stage] = len(held)
        else:
            before = (set(self.outputs), set(self.gradients))  # both parts of a pair start from here
            for part in action.computes:
                self._compute(rank, part, *before)

    def _compute(self, rank: int, part: Action, outputs: set[Key], gradients: set[Key]) -> None:
        key = (rank, part.stage, part.micro_batch)
        self.broken |= rank not in self.plan.placement[part.stage]
        if (message := self._input(part)) is not None and (rank, message) in self.arrived:
            self.used.add((rank, message))
        if part.kind is Kind.F:
            self.broken |= any(key[1:] == other[1:] for other in self.outputs)
            self.outputs.add(key)
            return
        if part.kind in (Kind.B, Kind.BI):
            self.broken |= key not in outputs or key in self.gradients
            self.gradients.add(key)
        if part.kind in (Kind.B, Kind.BW):
            self.broken |= part.kind is Kind.BW and key not in gradients
            self.weights[key] += 1

    def _message(self, rank: int, action: Action) -> None:
        message, peer = action.message, action.peer
        assert peer is not None
        if action.kind in SENDS:
            stage = message.boundary if message.payload == "activation" else message.boundary + 1
            made = self.outputs if message.payload == "activation" else self.gradients
            self.broken |= (rank, stage, message.micro_batch) not in made
            self.sends.setdefault((rank, peer, message.payload), deque()).append(message)
        else:
            self.broken |= (rank, message) in self.posted
            self.posted[rank, message] = None
            self.receives.setdefault((peer, rank, message.payload), deque()).append(message)

    def deliver(self) -> None:
        for channel, waiting in self.receives.items():
            sent = self.sends.get(channel, deque())
            while waiting and sent:
                first, second = sent.popleft(), waiting.popleft()
                self.broken |= first != second  # the transport has no names: it would be taken for another
                self.arrived.add((channel[1], second))

    def whole(self) -> bool:
        """Everything was done, once, and nothing is left under way."""
        plan = self.plan
        each = plan.stages * plan.micro_batches
        done = len(self.outputs) == len(self.gradients) == len(self.weights) == each
        reduced = all(
            self.reduced.get((rank, stage)) == sum(key[:2] == (rank, stage) for key in self.weights)
            for stage, ranks in enumerate(plan.placement)
            for rank in ranks
        )
        left = any(self.sends.values()) or any(self.receives.values()) or self.arrived != self.used
        return done and max(self.weights.values()) == 1 and reduced and not left and self._copies_meet()

    def _copies_meet(self) -> bool:
        orders: dict[tuple[int, ...], list[list[int]]] = {}
        for rank in range(self.plan.ranks):
            by_holders: dict[tuple[int, ...], list[int]] = {}
            for other, stage in self.reduced:
                holders = tuple(sorted(self.plan.placement[stage]))
                if other == rank and len(holders) > 1:
                    by_holders.setdefault(holders, []).append(stage)
            for holders, order in by_holders.items():
                orders.setdefault(holders, []).append(order)
        return all(order == found[0] for found in orders.values() for order in found)


def runs(plan: Plan) -> bool:
    """Whether the engine would come to the end of a plan with messages and reductions, with everything right."""
    run, done = _Run(plan), [0] * plan.ranks
    stages_exist = all(
        0 <= part.stage < plan.stages and part.micro_batch < plan.micro_batches
        for row in plan.actions
        for action in row
        for part in action.computes or (action,)
    )
    if not stages_exist:
        return False
    moved = True
    while moved and not run.broken:
        moved = False
        for rank, row in enumerate(plan.actions):
            while done[rank] < len(row) and run.able(rank, row[done[rank]]) and not run.broken:
                run.do(rank, row[done[rank]])
                done[rank] += 1
                moved = True
        run.deliver()
    finished = all(count == len(row) for count, row in zip(done, plan.actions, strict=True))
    return finished and not run.broken and run.whole()
