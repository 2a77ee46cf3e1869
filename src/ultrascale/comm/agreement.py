"""Work that succeeds on all ranks or fails on all: nobody is left waiting for one that gave up."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group

Result = TypeVar("Result")


def together(work: Callable[[], Result], group: Group, refusal: type[Exception]) -> Result:
    """What `work` returns on this rank; when it raises `refusal` on any rank, all ranks raise the first one's.

    Collective over the group; for start-up and checkpoints, never in a step.
    """
    text, results = "", []
    try:
        results.append(work())
    except refusal as error:
        text = str(error) or type(error).__name__
    texts = [other for other in gather_json(text, group) if other]
    if texts:
        raise refusal(texts[0])
    return results[0]


def alone(work: Callable[[], object], group: Group, refusal: type[Exception], seconds: float) -> None:
    """Lets the group's first rank work for as long as it takes, while the others wait; collective.

    seconds   between the calls that keep them waiting, each shorter than their time limit

    Whatever `work` raises, all ranks raise as `refusal`.
    """
    ended: list[str] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # on a thread of its own, it would be lost
            ended.append(str(error) or type(error).__name__)
        else:
            ended.append("")

    thread = Thread(target=run, name="alone", daemon=True)
    if group.index == 0:
        thread.start()
    while True:
        if group.index == 0:
            thread.join(seconds)
        texts: list[str] = gather_json(ended, group)[0]
        if texts:
            break
    if texts[0]:
        raise refusal(texts[0])
