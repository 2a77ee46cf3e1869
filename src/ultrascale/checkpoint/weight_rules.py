"""What each tensor of a run that starts from another's weights begins with: the tensor of its name and shape, unless a
rule of `init.rules` says otherwise. Needs no torch.

Strict both ways: every tensor of the run has an origin, every tensor of the source has a use, every rule has an effect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ultrascale.checkpoint.boxes import CheckpointError, Dims
from ultrascale.checkpoint.manifest import refuse
from ultrascale.config.schema import WeightRule

Shapes = Mapping[str, Dims]
"""Logical name → global shape."""

_RANGE = re.compile(r"(?<![^.])(\d+)-(\d+)(?![^.])")
_WILD = re.compile(rf"\*|{_RANGE.pattern}")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor's first values come from.

    name   the source's tensor; None: drawn from run.seed, as without a source
    rows   of both tensors that are the same, where they have not equally many; those behind are drawn
    """

    name: str | None
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule, and the tensors that it decided."""

    text: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Origins:
    """Of every tensor of a run, and what each rule did."""

    of: Mapping[str, Origin]
    applied: tuple[Applied, ...]


class Pattern:
    """Names in which `*` stands for anything, and a part `8-15` for each of these numbers.

    Raises CheckpointError when a range is empty.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.ranges = [(int(a), int(b)) for a, b in _RANGE.findall(text)]
        for first, last in self.ranges:
            if first > last:
                raise CheckpointError(f"{text}: the range {first}-{last} is empty; use {last}-{first}")
        self.kinds = ["*" if found.group() == "*" else "-" for found in _WILD.finditer(text)]
        # Two groups of a range stand between the literal parts.
        self._literals = _WILD.split(text)[::3]
        wild = ["(.*)" if kind == "*" else r"(0|[1-9]\d*)" for kind in self.kinds]
        between = zip(map(re.escape, self._literals), [*wild, ""], strict=True)
        self._regex = re.compile("".join(a + b for a, b in between))

    def match(self, name: str) -> list[str] | None:
        """What the wild parts stand for in a name; None where it is not one of these names."""
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        values = list(found.groups())
        numbers = [int(value) for value, kind in zip(values, self.kinds, strict=True) if kind == "-"]
        return values if all(a <= n <= b for n, (a, b) in zip(numbers, self.ranges, strict=True)) else None

    def filled(self, values: Sequence[str], other: Pattern) -> str:
        """The name of this pattern that corresponds to one of `other`: stars to stars, ranges to ranges, in order."""
        stars = iter([value for value, kind in zip(values, other.kinds, strict=True) if kind == "*"])
        numbers = iter([int(value) for value, kind in zip(values, other.kinds, strict=True) if kind == "-"])
        ranges = iter(zip(self.ranges, other.ranges))
        parts = []
        for kind in self.kinds:
            if kind == "*":
                parts.append(next(stars))
            else:
                (first, _), (their_first, _) = next(ranges)
                parts.append(str(first + next(numbers) - their_first))
        return "".join(a + b for a, b in zip(self._literals, [*parts, ""], strict=True))


def text_of(rule: WeightRule) -> str:
    """A rule as it stands in a config."""
    source = "" if rule.source is None else f", source: {rule.source}"
    return f"{{match: {rule.match}, action: {rule.action}{source}}}"


def problems_of(rules: Sequence[WeightRule]) -> Iterator[tuple[int, str]]:
    """(number of the rule, what is wrong with it), whatever the tensors are."""
    for number, rule in enumerate(rules):
        try:
            match, source = Pattern(rule.match), None if rule.source is None else Pattern(rule.source)
        except CheckpointError as error:
            yield number, str(error)
            continue
        if rule.action == "copy" and source is None:
            yield number, "action: copy needs source, the names to copy from"
        if rule.action in ("fresh", "ignore") and source is not None:
            yield number, f"action: {rule.action} reads nothing; leave source out, or use action: copy"
        if source is None:
            continue
        if source.kinds.count("*") != match.kinds.count("*"):
            yield number, f"source: {rule.source} needs as many * as match: {rule.match}"
        lengths = [[last - first for first, last in pattern.ranges] for pattern in (match, source)]
        if source.ranges and lengths[0] != lengths[1]:
            yield number, f"source: {rule.source} needs ranges as long as those of match: {rule.match}, or a number"


def origins(where: str, rules: Sequence[WeightRule], wanted: Shapes, found: Shapes) -> Origins:
    """The origin of each wanted tensor among those found; the first rule that matches a name decides.

    where   what the source is called in messages

    Raises CheckpointError with all that no rule covers, and with the rule that would.
    """
    patterns = [Pattern(rule.match) for rule in rules]
    sources = [None if rule.source is None else Pattern(rule.source) for rule in rules]
    decided: dict[int, list[str]] = {number: [] for number in range(len(rules))}
    of: dict[str, Origin] = {}
    problems: list[str] = []
    for name, shape in wanted.items():
        number, values = _first(rules, patterns, name)
        rule = None if number is None else rules[number]
        if number is not None:
            decided[number].append(name)
        if rule is not None and rule.action == "fresh":
            of[name] = Origin(None)
            continue
        source, there = name, sources[number] if number is not None else None
        if there is not None:
            source = there.filled(values, patterns[number or 0])
        if source not in found:
            problems.append(_missing(where, name, source, rule, found))
        elif rule is not None and rule.action == "rows" and found[source][1:] == shape[1:] and shape:
            of[name] = Origin(source, min(shape[0], found[source][0]))
        elif found[source] != shape:
            problems.append(_other_shape(where, name, shape, source, found[source], rule))
        else:
            of[name] = Origin(source)
    used = {origin.name for origin in of.values()}
    for name in found:
        if name in used or of.get(name) == Origin(None):
            continue
        ignoring = next((n for n, r in enumerate(rules) if r.action == "ignore" and patterns[n].match(name)), None)
        if ignoring is not None:
            decided[ignoring].append(name)
        elif name not in wanted or name in of:
            fix = f"{{match: {name}, action: ignore}} leaves it out"
            problems.append(f"{where}: {name} has no place in this run; {fix}")
    for number, names in decided.items():
        if not names:
            problems.append(_idle(rules, patterns, number, wanted, found))
    refuse(problems)
    return Origins(of, tuple(Applied(text_of(rule), tuple(decided[number])) for number, rule in enumerate(rules)))


def _first(rules: Sequence[WeightRule], patterns: Sequence[Pattern], name: str) -> tuple[int | None, list[str]]:
    """The first rule that says what a tensor of the run begins with."""
    for number, (rule, pattern) in enumerate(zip(rules, patterns, strict=True)):
        values = pattern.match(name)
        if values is not None and rule.action != "ignore":
            return number, values
    return None, []


def _missing(where: str, name: str, source: str, rule: WeightRule | None, found: Iterable[str]) -> str:
    if rule is None:
        return f"{where}: {name} is missing there; {{match: {name}, action: fresh}} draws it from run.seed"
    near = difflib.get_close_matches(source, found, n=1)
    fix = f"; did you mean {near[0]}?" if near else ""
    return f"{where}: {name} is to come from {source} by {text_of(rule)}, which is missing there{fix}"


def _other_shape(where: str, name: str, shape: Dims, source: str, there: Dims, rule: WeightRule | None) -> str:
    said = f"{where}: {source} has shape {list(there)}, this run's {name} has {list(shape)}"
    if len(shape) == len(there) and shape and shape[1:] == there[1:]:
        again = "" if source == name else f", source: {source}"
        return f"{said}; {{match: {name}, action: rows{again}}} copies the rows that both have"
    by = "" if rule is None else f" and {text_of(rule)} cannot make one of the other"
    return f"{said}{by}; {{match: {name}, action: fresh}} draws it from run.seed"


def _idle(rules: Sequence[WeightRule], patterns: Sequence[Pattern], number: int, wanted: Shapes, found: Shapes) -> str:
    """Why a rule decided nothing."""
    rule = rules[number]
    names = found if rule.action == "ignore" else wanted
    said = f"init.rules[{number}] {text_of(rule)} has no effect"
    if matched := [name for name in names if patterns[number].match(name) is not None]:
        why = "is used" if rule.action == "ignore" else "is decided by an earlier rule"
        return f"{said}: {matched[0]} {why}; leave it out"
    near = difflib.get_close_matches(rule.match, names, n=1, cutoff=0.5)
    fix = f"; did you mean {near[0]}?" if near else ""
    return f"{said}: no tensor {'there' if rule.action == 'ignore' else 'of this run'} has such a name{fix}"
