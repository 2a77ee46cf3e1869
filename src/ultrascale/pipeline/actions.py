"""The vocabulary of a pipeline: actions, and plans made of them.

A *plan* gives every pp coordinate (here: rank) one list of actions. The same plan is validated (validate.py),
simulated (simulate.py), drawn (draw.py) and executed (engine.py); nothing else says what a rank does when.

Stages are numbered along the model; a rank may hold several (virtual stages), and a stage may lie on several
ranks (two parameter copies, as DualPipe has). Micro-batches are numbered through the step: where two streams
run in opposite directions, each has numbers of its own, so (stage, micro-batch) is run once in the whole
pipeline.

Text form, one action: `F0.3` forward of stage 0, micro-batch 3 · `B0.3` whole backward · `BI0.3` `BW0.3`
gradient of the input, of the weights · `FB(F0.3,B5.1)` both at once · `SEND_F0.3>1` `RECV_F1.3<0` activation
to, from a rank · `SEND_B1.3>0` `RECV_B0.3<1` gradient · `REDUCE0` `UNSHARD0` `RESHARD0` of a stage's
parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple


class Kind(StrEnum):
    """What an action does; engine.py executes one of each."""

    F = "F"
    B = "B"
    BI = "BI"
    BW = "BW"
    FB = "FB"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE = "REDUCE"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.BI, Kind.BW, Kind.FB})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
MESSAGES = SENDS | RECEIVES
PARAMETERS = frozenset({Kind.REDUCE, Kind.UNSHARD, Kind.RESHARD})
BACKWARDS = frozenset({Kind.B, Kind.BI, Kind.BW})

_CARRIED = {Kind.SEND_F: (0, 0), Kind.RECV_F: (0, -1), Kind.SEND_B: (1, -1), Kind.RECV_B: (1, 0)}
"""Whether a message is a gradient, and its boundary from the action's stage."""

WHOLE_STEP = -1
"""The micro-batch of an action that belongs to a stage and not to one of its micro-batches (REDUCE)."""

_COMPUTE_TEXT = re.compile(r"(F|BI|BW|B)(\d{1,9})\.(\d{1,9})", re.ASCII)
_PAIR_TEXT = re.compile(r"FB\(([^,()]+),([^,()]+)\)")
_SEND_TEXT = re.compile(r"(SEND_[FB])(\d{1,9})\.(\d{1,9})>(\d{1,9})", re.ASCII)
_RECEIVE_TEXT = re.compile(r"(RECV_[FB])(\d{1,9})\.(\d{1,9})<(\d{1,9})", re.ASCII)
_PARAMETER_TEXT = re.compile(r"(REDUCE|UNSHARD|RESHARD)(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)


class ScheduleError(ValueError):
    """A schedule that does not exist, does not take these arguments, or whose plan is wrong.

    `rank`, `index` and `action` say where in a plan, when there is such a place; the message says it too.
    """

    def __init__(
        self, message: str, rank: int | None = None, index: int | None = None, action: Action | None = None
    ) -> None:
        where = ""
        if rank is not None:
            where = f"rank {rank}"
            if index is not None:
                where += f", action {index}"
            if action is not None:
                where += f" ({action})"
            where += ": "
        super().__init__(where + message)
        self.rank = rank
        self.index = index
        self.action = action


Payload = Literal["activation", "gradient"]


class Message(NamedTuple):
    """One tensor on its way: the same value at both ends.

    `boundary` s is the cut between stage s and stage s + 1.
    """

    payload: Payload
    boundary: int
    micro_batch: int

    def __str__(self) -> str:
        cut = f"between stages {self.boundary} and {self.boundary + 1}"
        return f"the {self.payload} of micro-batch {self.micro_batch} {cut}"

    def tag(self, micro_batches: int) -> int:
        """A number for the transport that no other message of the same step has."""
        return 2 * (self.boundary * micro_batches + self.micro_batch) + (self.payload == "gradient")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does.

    SEND_F(stage=s) sends the output of stage s to rank `peer`, which runs s + 1; RECV_F(stage=s) receives the
    input of stage s; SEND_B(stage=s) sends the gradient of stage s's input to `peer`, which runs s − 1;
    RECV_B(stage=s) receives the gradient of stage s's output. FB carries its forward and its backward as
    `parts`, and the stage and micro-batch of the forward.

    Raises ScheduleError when the fields do not fit the kind.
    """

    kind: Kind
    stage: int
    micro_batch: int = WHOLE_STEP
    peer: int | None = None
    parts: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind in MESSAGES) != (self.peer is not None):
            rule = "needs a peer" if self.peer is None else f"has no peer, {self.peer} was given"
            raise ScheduleError(f"{self.kind} of stage {self.stage} {rule}")
        if self.micro_batch < 0 and self.kind not in PARAMETERS:
            raise ScheduleError(f"{self.kind} of stage {self.stage} needs a micro-batch, {self.micro_batch} is none")
        if self.kind is Kind.FB:
            kinds = tuple(part.kind for part in self.parts)
            if kinds not in ((Kind.F, Kind.B), (Kind.F, Kind.BI)):
                raise ScheduleError(
                    f"FB is one F and one B or BI, in this order; {', '.join(kinds) or 'nothing'} is not"
                )
            if (self.stage, self.micro_batch) != (self.parts[0].stage, self.parts[0].micro_batch):
                raise ScheduleError(
                    f"FB({self.parts[0]},{self.parts[1]}) must carry the stage and micro-batch of its F"
                )
        elif self.parts:
            raise ScheduleError(f"{self.kind} of stage {self.stage} has no parts; only FB has")

    @property
    def computes(self) -> tuple[Action, ...]:
        """The F, B, BI and BW in it: two for FB, none for messages and parameter actions."""
        if self.parts:
            return self.parts
        return (self,) if self.kind in COMPUTE else ()

    @property
    def message(self) -> Message:
        """What a SEND or RECV carries. Raises ScheduleError for other kinds."""
        if self.kind not in _CARRIED:
            raise ScheduleError(f"{self} carries no message")
        gradient, shift = _CARRIED[self.kind]
        return Message("gradient" if gradient else "activation", self.stage + shift, self.micro_batch)

    def tag(self, micro_batches: int) -> int:
        """That of the message which a SEND or RECV carries, for long lists: `message.tag(micro_batches)`."""
        gradient, shift = _CARRIED[self.kind]
        return 2 * ((self.stage + shift) * micro_batches + self.micro_batch) + gradient

    def __str__(self) -> str:
        if self.kind is Kind.FB:
            return f"FB({self.parts[0]},{self.parts[1]})"
        if self.kind in SENDS:
            return f"{self.kind}{self.stage}.{self.micro_batch}>{self.peer}"
        if self.kind in RECEIVES:
            return f"{self.kind}{self.stage}.{self.micro_batch}<{self.peer}"
        if self.kind in PARAMETERS and self.micro_batch == WHOLE_STEP:
            return f"{self.kind}{self.stage}"
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def forward(stage: int, micro_batch: int) -> Action:
    """F of one stage and micro-batch."""
    return Action(Kind.F, stage, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """B, the whole backward of one stage and micro-batch."""
    return Action(Kind.B, stage, micro_batch)


def pair(first: Action, second: Action) -> Action:
    """FB: a forward and a backward that run together."""
    return Action(Kind.FB, first.stage, first.micro_batch, parts=(first, second))


def parse_action(text: str) -> Action:
    """The action that `text` says, in the form of `str(action)`; raises ScheduleError for anything else."""
    if match := _COMPUTE_TEXT.fullmatch(text):
        return Action(Kind(match[1]), int(match[2]), int(match[3]))
    if match := _SEND_TEXT.fullmatch(text) or _RECEIVE_TEXT.fullmatch(text):
        return Action(Kind(match[1]), int(match[2]), int(match[3]), peer=int(match[4]))
    if match := _PARAMETER_TEXT.fullmatch(text):
        return Action(Kind(match[1]), int(match[2]), WHOLE_STEP if match[3] is None else int(match[3]))
    if match := _PAIR_TEXT.fullmatch(text):
        return pair(parse_action(match[1]), parse_action(match[2]))
    raise ScheduleError(
        f"{text!r} is not an action; write F0.3, BI0.3, FB(F0.3,B5.1), SEND_F0.3>1, RECV_F1.3<0 or REDUCE0"
    )


Pass = Literal["communication", "reduce"]


@dataclass(frozen=True)
class Plan:
    """What every rank of a pipeline does in one step.

    placement     stage → the ranks that hold it: one, or two when the schedule keeps two copies
    actions       rank → its actions, in order
    forward_only  an evaluation: no backward, and a forward keeps nothing
    passes        what has been put into a list of compute actions: "communication" (SEND and RECV), "reduce".
                  Said, not guessed from the actions, so that a plan which lost all of one kind is not taken
                  for one that never had it.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False
    passes: tuple[Pass, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages, virtual ones included."""
        return len(self.placement)

    @property
    def ranks(self) -> int:
        """Number of pp coordinates."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, ranks in enumerate(self.placement) if rank in ranks)

    def computes(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, index, F, B, BI or BW) of all compute actions; both parts of an FB have its index."""
        for rank, actions in enumerate(self.actions):
            for index, action in enumerate(actions):
                if action.parts:
                    for part in action.parts:
                        yield rank, index, part
                elif action.kind in COMPUTE:
                    yield rank, index, action

    def runners(self) -> dict[tuple[int, int], int]:
        """(stage, micro-batch) → the rank that runs its forward (and so its backward)."""
        return {(part.stage, part.micro_batch): rank for rank, _, part in self.computes() if part.kind is Kind.F}

    def compute_only(self) -> Plan:
        """The same plan without messages and parameter actions."""
        actions = tuple(tuple(action for action in row if action.kind in COMPUTE) for row in self.actions)
        return replace(self, actions=actions, passes=())
