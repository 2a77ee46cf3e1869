"""From files and the command line to a `Config`, remembering where each value came from."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ultrascale.config import explain, rules
from ultrascale.config.problem import ConfigError, Problem
from ultrascale.config.schema import Config
from ultrascale.config.yaml_reader import Document, Value, read_file, read_text

COMMAND_LINE = "command line"
DEFAULT = "default"
DERIVED = "derived"


@dataclass
class Loaded:
    """A config that is valid key by key; `collect.check` says whether its keys fit each other.

    `origins`: dotted key → "file:line" or "command line", for what was set; `origin()` answers for every key.
    `notices`: sentences for the user, about things that are allowed but without effect.
    """

    config: Config
    path: Path
    origins: dict[str, str]
    notices: list[str] = field(default_factory=list)

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read `path`, what it extends, and `a.b=value` overrides. Raises ConfigError with all problems."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError([Problem("", f"there is no such file{_nearest_file(path)}", origin=str(path))])
    document = _read(path, extended_by=())
    notices: list[str] = []
    given: dict[str, str] = {}
    for text in overrides:
        key, override = _override(text)
        if key in given:
            notices.append(f"{given[key]} is overruled by {text}, which comes after it on the command line")
        given[key] = text
        document = _merge(document, override)
    assert isinstance(document.tree, dict)
    # So that what is missing is called run.steps, and not run.
    tree = {**{section: {} for section in Config.model_fields}, **document.tree}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = explain.problems(error, tree, document.origins, default_origin=str(path))
        raise ConfigError(problems) from None
    return Loaded(config, path, document.origins, notices)


def _read(path: Path, extended_by: tuple[Path, ...]) -> Document:
    document = read_file(path)
    if document.tree is None:
        document.tree = {}
    if not isinstance(document.tree, dict):
        message = "a config is a mapping of sections, for example run: {steps: 100}"
        raise ConfigError([Problem("", message, origin=f"{path}:1")])
    if "extends" not in document.tree:
        return document

    other, origin = document.tree.pop("extends"), document.origins.pop("extends")
    if not isinstance(other, str) or not other:
        raise ConfigError([Problem("extends", "extends must be the path of one config file", origin=origin)])
    base = Path(os.path.normpath(path.parent / other))
    chain = (*extended_by, path)
    if any(base.resolve() == seen.resolve() for seen in chain):
        circle = " → ".join(str(file) for file in (*chain, base))
        raise ConfigError([Problem("extends", f"extends goes in a circle: {circle}", origin=origin)])
    if not base.is_file():
        message = f"extends: {other}: there is no such file{_nearest_file(base)}"
        raise ConfigError([Problem("extends", message, origin=origin)])
    return _merge(_read(base, chain), document)


def _override(text: str) -> tuple[str, Document]:
    """`a.b=value` → a document that sets just that; the value is read by the rules of the files."""
    key, equals, value = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        message = f"{text!r} is not an override; write section.key=value, for example run.steps=100"
        raise ConfigError([Problem("", message, origin=COMMAND_LINE)])
    if key == "extends":
        raise ConfigError([Problem(key, "extends is for files; give its file as --config", origin=COMMAND_LINE)])
    document = read_text(value, COMMAND_LINE, numbered=False, prefix=key)
    document.origins[key] = COMMAND_LINE
    names = key.split(".")
    for depth in range(len(names) - 1, -1, -1):
        document.tree = {names[depth]: document.tree}
        document.origins.setdefault(".".join(names[:depth]), COMMAND_LINE)
    return key, document


def _merge(base: Document, top: Document) -> Document:
    """`top` over `base`: sections are merged key by key; one of another kind, and anything else, is replaced."""
    shared: set[str] = set()
    replaced: list[str] = []

    def merge(below: Value, above: Value, key: str) -> Value:
        if isinstance(below, dict) and isinstance(above, dict) and not _of_another_kind(below, above):
            shared.add(key)
            merged = dict(below)
            for name, value in above.items():
                inner = f"{key}.{name}" if key else name
                merged[name] = merge(below[name], value, inner) if name in below else value
            return merged
        replaced.append(key)
        return above

    tree = merge(base.tree, top.tree, "")
    gone = tuple(f"{key}{mark}" for key in replaced for mark in (".", "["))
    kept = {key: origin for key, origin in base.origins.items() if not key.startswith(gone)}
    new = {key: origin for key, origin in top.origins.items() if key not in shared}
    return Document(tree, kept | new)


def _of_another_kind(below: dict[str, Value], above: dict[str, Value]) -> bool:
    """Whether a section says that it is of another kind than the one below: it has other keys, and none in common."""
    return any(tag in below and tag in above and below[tag] != above[tag] for tag in rules.tags())


def _nearest_file(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""
