"""The YAML that configs are written in: PyYAML's safe parser, read more strictly than PyYAML does.

- A key given twice is refused; PyYAML keeps the last one and says nothing.
- Scalars follow YAML 1.2: 3e-4 and 1e6 are numbers, only true and false are booleans. To PyYAML 3e-4 is
  text, and yes, 017, 1:30 and 2024-01-01 are true, 15, 90 and a date; here they are text.
- Anchors, aliases, tags, several documents, more than 64 levels or 1 MiB are refused.

Reading goes over the parser's events, which never recurse, so that deep input is refused at its 65th level.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ultrascale.config.problem import ConfigError, Problem

MAX_BYTES = 2**20
MAX_DEPTH = 64

Scalar = bool | int | float | str | None
Value = Scalar | list["Value"] | dict[str, "Value"]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {"": None, "~": None, "null": None, "true": True, "false": False}
# Python refuses to convert longer strings of digits, and no key wants them.
_MAX_DIGITS = 400


@dataclass
class Document:
    """What a file or a value of the command line says, and where each of its keys stands ("file:line")."""

    tree: Value
    origins: dict[str, str] = field(default_factory=dict)


def scalar(text: str) -> Scalar:
    """What an unquoted scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) <= _MAX_DIGITS:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


def read_file(path: Path) -> Document:
    """Raises ConfigError when the file cannot be read, is too large, or is not the YAML described above."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}", origin=str(path))]) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError([Problem("", f"is larger than {MAX_BYTES} bytes; a config never is", origin=str(path))])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError([Problem("", "is not UTF-8 text", origin=f"{path}:{line}")]) from None
    return read_text(text, source=str(path))


def read_text(text: str, source: str, numbered: bool = True, prefix: str = "") -> Document:
    """Parse `text`. Origins are "source:line", or "source" when not `numbered`; keys start with `prefix`."""
    return _Reader(text, source, numbered).document(prefix)


class _Reader:
    def __init__(self, text: str, source: str, numbered: bool) -> None:
        self.text, self.source, self.numbered = text, source, numbered
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        self.line = 1
        self.origins: dict[str, str] = {}

    def document(self, prefix: str) -> Document:
        subject = f"{prefix}: " if prefix else ""
        try:
            tree: Value = None
            self._next()  # the stream starts
            if isinstance(self._next(), yaml.DocumentStartEvent):
                tree = self._value(self._next(), prefix, depth=1)
                self._next()  # the document ends
                if not isinstance(self._next(), yaml.StreamEndEvent):
                    raise self._error("a second document starts here; a config is one", prefix)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.line = mark.line + 1 if mark else self.line
            what = ", ".join(filter(None, (error.context, error.problem)))
            raise self._error(f"{subject}is not YAML: {what}", prefix) from None
        except yaml.reader.ReaderError as error:
            self.line = self.text[: error.position].count("\n") + 1
            raise self._error(
                f"{subject}is not YAML: the character U+{error.character:04X} is not allowed", prefix
            ) from None
        return Document(tree, self.origins)

    def _next(self) -> yaml.Event:
        event = next(self.events)
        self.line = event.start_mark.line + 1 if event.start_mark else self.line
        return event

    def _where(self) -> str:
        return f"{self.source}:{self.line}" if self.numbered else self.source

    def _error(self, message: str, key: str) -> ConfigError:
        return ConfigError([Problem(key, message, origin=self._where())])

    def _value(self, event: yaml.Event, key: str, depth: int) -> Value:
        """The value that starts with `event`. Leaves the events just behind it."""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise self._error(f"{key}: anchors and aliases are not read; write the value out, or use extends", key)
        if (tag := getattr(event, "tag", None)) is not None:
            raise self._error(f"{key}: the tag {tag} is not read; write a plain value", key)
        if depth > MAX_DEPTH:
            raise self._error(f"is nested deeper than {MAX_DEPTH} levels; a config never is", key)
        self.origins.setdefault(key, self._where())
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(key, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Value] = []
            while not isinstance(event := self._next(), yaml.SequenceEndEvent):
                items.append(self._value(event, f"{key}[{len(items)}]", depth + 1))
            return items
        assert isinstance(event, yaml.ScalarEvent)
        return scalar(event.value) if event.implicit[0] else event.value

    def _mapping(self, prefix: str, depth: int) -> dict[str, Value]:
        mapping: dict[str, Value] = {}
        first: dict[str, str] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._error(f"{prefix or 'a config'}: keys must be plain words", prefix)
            name = event.value
            key = f"{prefix}.{name}" if prefix else name
            if name in mapping:
                raise self._error(f"{key} is given twice, first at {first[name]}; keep one of them", key)
            first[name] = self.origins[key] = self._where()
            mapping[name] = self._value(self._next(), key, depth + 1)
        return mapping
