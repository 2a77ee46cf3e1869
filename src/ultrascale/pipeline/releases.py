"""Which sends are known to have arrived, and when: so that their memory can be freed without asking the transport.

A rank that receives something from another knows that the other has run everything up to that send, and with it what
the other knew of third ranks. A message has arrived once its receiver has run the action that needed it. (Vector
clocks: Fidge 1988, Mattern 1989.) gloo's works do not answer whether they are done, so this is not a luxury.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import COMPUTE, SENDS, Action, Kind, Message, Plan


def releases(plan: Plan) -> list[dict[int, tuple[int, ...]]]:
    """For each rank: index of an action → indices of earlier sends that have certainly arrived once it is done.

    Sends that no later action of their rank proves arrived are in no list: they are awaited at the end of the step.
    """
    sent_at = {
        a.message: (rank, i) for rank, row in enumerate(plan.actions) for i, a in enumerate(row) if a.kind in SENDS
    }
    used_at = {
        message: (rank, i)
        for rank, row in enumerate(plan.actions)
        for i, action in enumerate(row)
        for message in _needs(action)
        if message in sent_at
    }
    # known[rank][other]: how many actions of `other` this rank knows to be done.
    known = [[0] * plan.ranks for _ in range(plan.ranks)]
    at_send: dict[Message, list[int]] = {}
    open_sends: list[list[tuple[int, Message]]] = [[] for _ in range(plan.ranks)]
    result: list[dict[int, tuple[int, ...]]] = [{} for _ in range(plan.ranks)]
    position = [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(plan.actions):
            while position[rank] < len(row):
                index, action = position[rank], row[position[rank]]
                needs = [m for m in _needs(action) if m in sent_at]
                if any(m not in at_send for m in needs):
                    break
                for message in needs:
                    known[rank] = [max(a, b) for a, b in zip(known[rank], at_send[message], strict=True)]
                position[rank] = known[rank][rank] = index + 1
                moved = True
                if action.kind in SENDS:
                    at_send[action.message] = list(known[rank])
                    open_sends[rank].append((index, action.message))
                elif needs:
                    arrived = [(i, m) for i, m in open_sends[rank] if _arrived(m, used_at, known[rank])]
                    if arrived:
                        result[rank][index] = tuple(i for i, _ in arrived)
                        open_sends[rank] = [s for s in open_sends[rank] if s not in arrived]
    return result


def _arrived(message: Message, used_at: dict[Message, tuple[int, int]], known: list[int]) -> bool:
    if message not in used_at:
        return False
    rank, index = used_at[message]
    return known[rank] > index


def _needs(action: Action) -> list[Message]:
    """Messages that a compute action waits for, were they to come from another rank. (A receive is only posted.)"""
    needs = []
    for part in action.computes if action.kind in COMPUTE else ():
        if part.kind is Kind.F:
            needs.append(Message("activation", part.stage - 1, part.micro_batch))
        elif part.kind in (Kind.B, Kind.BI):
            needs.append(Message("gradient", part.stage, part.micro_batch))
    return needs
