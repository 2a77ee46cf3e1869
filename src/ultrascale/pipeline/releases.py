"""Which sends are known to have arrived, and when: so that their memory can be freed without asking the transport.

A rank that receives something from another knows that the other has run everything up to that send, and with it what
the other knew of third ranks. A message has arrived once its receiver has run the action that needed it. (Vector
clocks: Fidge 1988, Mattern 1989.) gloo's works do not answer whether they are done, so this is not a luxury.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import SENDS, Action, Kind, Message, Plan


def releases(plan: Plan) -> list[dict[int, tuple[int, ...]]]:
    """For each rank: index of an action → indices of earlier sends that have certainly arrived once it is done.

    Sends that no later action of their rank proves arrived are in no list: they are awaited at the end of the step.
    """
    width = plan.micro_batches
    sent = {a.tag(width) for row in plan.actions for a in row if a.kind in SENDS}
    needs = [[[tag for tag in _needs(action, width) if tag in sent] for action in row] for row in plan.actions]
    used_at = {tag: (rank, index) for rank, row in enumerate(needs) for index, tags in enumerate(row) for tag in tags}
    # known[rank][other]: how many actions of `other` this rank knows to be done.
    known = [[0] * plan.ranks for _ in range(plan.ranks)]
    at_send: dict[int, list[int]] = {}  # tag of a message → what its sender knew
    open_sends: list[list[tuple[int, int]]] = [[] for _ in range(plan.ranks)]  # (index, tag)
    result: list[dict[int, tuple[int, ...]]] = [{} for _ in range(plan.ranks)]
    position = [0] * plan.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(plan.actions):
            while position[rank] < len(row):
                index, action = position[rank], row[position[rank]]
                tags = needs[rank][index]
                if any(tag not in at_send for tag in tags):
                    break
                for tag in tags:
                    known[rank] = list(map(max, known[rank], at_send.pop(tag)))  # it is used this once
                position[rank] = known[rank][rank] = index + 1
                moved = True
                if action.kind in SENDS:
                    at_send[action.tag(width)] = list(known[rank])
                    open_sends[rank].append((index, action.tag(width)))
                elif tags:
                    arrived = [send for send in open_sends[rank] if _arrived(send[1], used_at, known[rank])]
                    if arrived:
                        result[rank][index] = tuple(sent_index for sent_index, _ in arrived)
                        open_sends[rank] = [send for send in open_sends[rank] if send not in arrived]
    return result


def _arrived(tag: int, used_at: dict[int, tuple[int, int]], known: list[int]) -> bool:
    if tag not in used_at:
        return False
    rank, index = used_at[tag]
    return known[rank] > index


def _needs(action: Action, micro_batches: int) -> list[int]:
    """Tags of the messages that a compute action waits for, were they to come from another rank. (A receive is only
    posted.)"""
    tags = []
    for part in action.computes:
        if part.kind is Kind.F:
            tags.append(Message("activation", part.stage - 1, part.micro_batch).tag(micro_batches))
        elif part.kind is not Kind.BW:
            tags.append(Message("gradient", part.stage, part.micro_batch).tag(micro_batches))
    return tags
