"""Work that succeeds on all ranks or fails on all: nobody is left waiting for one that gave up."""

from __future__ import annotations

from collections.abc import Callable
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
