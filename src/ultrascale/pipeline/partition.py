"""Which layers lie on which stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ITEM = re.compile(r"\s*(?:(E)|(L)|t(?:\s*\*\s*(\d{1,6}))?)", re.ASCII)
_FORM = "write for example 'E t*7 | t*8 | t*8 | t*7 L'"


class PartitionError(ValueError):
    """Layers that do not fit the stages; the message is a whole sentence."""


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What one stage is built of: a run of layers (numbered through the model, or none), embedding, head."""

    layers: range
    embedding: bool = False
    head: bool = False


Split = tuple[StageLayers, ...]
"""One entry per stage, in the order of the model."""


def uniform(num_layers: int, stages: int) -> Split:
    """The same number of layers on each stage, and one more on some where that does not come out even.

    The extra ones go to the first stages after the first, which has the embedding; to the first when those do
    not suffice; never to the last, which has the head, the heavier of the two. Raises PartitionError with
    fewer layers than stages: an empty stage is never a default.
    """
    if stages < 1:
        raise PartitionError(f"{stages} stages: give 1 or more")
    if num_layers < stages:
        raise PartitionError(f"{num_layers} layers are too few for {stages} stages, which need one each")
    least, extra = divmod(num_layers, stages)
    longer = [*range(1, stages - 1), 0][:extra]
    return _split([least + (stage in longer) for stage in range(stages)])


def from_list(counts: Sequence[int], num_layers: int, stages: int) -> Split:
    """The given number of layers on each stage; 0 is a stage without layers.

    Raises PartitionError when the list is not as long as there are stages, or does not add up to the model.
    """
    if len(counts) != stages:
        raise PartitionError(f"{list(counts)} lays out {len(counts)} stages, but there are {stages}")
    for stage, count in enumerate(counts):
        if count < 0:
            raise PartitionError(f"{list(counts)} gives stage {stage} {count} layers; give 0 or more")
    if sum(counts) != num_layers:
        raise PartitionError(f"{list(counts)} adds up to {sum(counts)} layers, but the model has {num_layers}")
    return _split(counts)


def from_text(text: str, num_layers: int, stages: int) -> Split:
    """A compact layout: `|` between stages, `t` a layer, `t*7` seven, `E` the embedding, `L` head and loss.

    `E` and `L` may be left out; where they are written they begin the first and end the last stage, since
    nothing comes before the one or after the other. Raises PartitionError that quotes what it does not
    understand, or when stages or layers do not add up.
    """
    pieces = text.split("|")
    counts = []
    for stage, piece in enumerate(pieces):
        items, position = [], 0
        while piece[position:].strip():
            match = _ITEM.match(piece, position)
            if match is None:
                rest = _short(piece[position:].strip())
                raise PartitionError(f"{_short(text)}: {rest} on stage {stage} is not E, t, t*N or L; {_FORM}")
            items.append(match)
            position = match.end()
        for place, item in enumerate(items):
            if item[1] and (stage, place) != (0, 0):
                raise PartitionError(f"{_short(text)}: E on stage {stage} must begin the first stage; {_FORM}")
            if item[2] and (stage, place) != (len(pieces) - 1, len(items) - 1):
                raise PartitionError(f"{_short(text)}: L on stage {stage} must end the last stage; {_FORM}")
        counts.append(sum(int(item[3] or 1) for item in items if not (item[1] or item[2])))
    if len(counts) != stages:
        raise PartitionError(f"{_short(text)} lays out {len(counts)} stages, but there are {stages}")
    if sum(counts) != num_layers:
        raise PartitionError(f"{_short(text)} adds up to {sum(counts)} layers, but the model has {num_layers}")
    return _split(counts)


def partition(layout: Sequence[int] | str | None, num_layers: int, stages: int) -> Split:
    """The split that a config asks for: its list or text, or the uniform one when it gives none.

    Raises PartitionError as the three forms do.
    """
    if layout is None:
        return uniform(num_layers, stages)
    if isinstance(layout, str):
        return from_text(layout, num_layers, stages)
    return from_list(layout, num_layers, stages)


def to_text(split: Split) -> str:
    """The compact form: from_text of it gives the split again."""
    pieces = []
    for stage in split:
        count = len(stage.layers)
        layers = f"t*{count}" if count > 1 else "t" * count
        pieces.append(" ".join(filter(None, ("E" * stage.embedding, layers, "L" * stage.head))))
    return " | ".join(pieces)


def table(split: Split) -> str:
    """One line per stage, for people: number of layers, which, embedding and head; then the sum."""
    lines = ["stage  layers  which"]
    for number, stage in enumerate(split):
        which = []
        if stage.embedding:
            which.append("embedding")
        if stage.layers:
            first, last = stage.layers[0], stage.layers[-1]
            which.append(str(first) if first == last else f"{first}–{last}")
        if stage.head:
            which.append("head")
        lines.append(f"{number:>5}  {len(stage.layers):>6}  {', '.join(which) or '(nothing)'}")
    lines.append(f"  all  {sum(len(stage.layers) for stage in split):>6}")
    return "\n".join(lines)


def _split(counts: Sequence[int]) -> Split:
    split, start = [], 0
    for stage, count in enumerate(counts):
        layers = range(start, start + count)
        split.append(StageLayers(layers, embedding=stage == 0, head=stage == len(counts) - 1))
        start += count
    return tuple(split)


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
