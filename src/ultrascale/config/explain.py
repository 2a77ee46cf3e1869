"""pydantic's errors as sentences: key, value, rule, nearest fix."""

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ultrascale.config import rules
from ultrascale.config.problem import Problem, choices
from ultrascale.config.rules import Node, Path, dotted
from ultrascale.config.yaml_reader import scalar


def problems(
    error: ValidationError, tree: Mapping[str, Any], origins: Mapping[str, str], default_origin: str
) -> list[Problem]:
    """One problem for each key that is wrong, in the order of the schema."""
    schema = rules.root()
    found: dict[Path, str] = {}
    for detail in error.errors(include_url=False, include_context=False):
        kind = detail["type"]
        path = _path(detail["loc"], tree, missing=kind == "missing")
        if isinstance(path[-1], int) and kind == "missing":  # an item of a list of fixed length
            kind, path = "too_short", path[:-1]
        if kind.startswith("union_tag"):  # nothing can be said of a section before it says of which kind it is
            kind, path = "tag", (*path, str(rules.tag(rules.at(schema, path))))
        if kind == "extra_forbidden":
            found[path] = _other_kind(path, tree, schema) or _unknown(path, tree, schema)
        elif kind == "missing" or (kind == "tag" and path[-1] not in _value(tree, path[:-1])):
            found[path] = f"{dotted(path)} is missing; it must be {rules.rule(rules.at(schema, path, tree))}"
        elif kind == "tag" and (reason := _refused(_value(tree, path), rules.at(schema, path[:-1]))):
            found[path] = f"{dotted(path)}={_value(tree, path)} is refused: {reason}"
        else:
            found[path] = _wrong_value(path, _value(tree, path), rules.at(schema, path, tree))
    # A list with one wrong item is also no text: of an alternative's errors, the deepest is the news.
    deepest = [path for path in found if not any(other != path and other[: len(path)] == path for other in found)]
    return [Problem(dotted(path), found[path], origin=_origin(path, origins, default_origin)) for path in deepest]


def _path(location: Path, tree: Any, missing: bool) -> Path:
    """pydantic's location, without the names it gives to the alternatives of a union."""
    path: list[str | int] = []
    for part in location:
        inside = part in tree if isinstance(tree, dict) else isinstance(tree, list) and part in range(len(tree))
        if inside:
            path.append(part)
            tree = tree[part]
    return (*path, location[-1]) if missing else tuple(path)


def _value(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _origin(path: Path, origins: Mapping[str, str], default_origin: str) -> str:
    """Where the key was set; for a missing key, where its section was."""
    enclosing = (dotted(path[:end]) for end in range(len(path), 0, -1))
    return next((origins[key] for key in enclosing if key in origins), default_origin)


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong_value(path: Path, value: Any, nodes: list[Node]) -> str:
    sentence = f"{dotted(path)}={_show(value)} must be {rules.rule(nodes)}"
    default = next((node["default"] for node in nodes if "default" in node), None)
    fix = _fix(value, nodes)
    if fix is None and default is not None and not isinstance(default, dict):
        fix = f"its default is {_show(default)}"
    return sentence if fix is None else f"{sentence}; {fix}"


def _fix(value: Any, nodes: list[Node]) -> str | None:
    """The nearest value that would do, where one is near."""
    kinds = {node.get("type") for node in nodes}
    words = [word for node in nodes for word in rules.constants(node)]
    if isinstance(value, str):
        if kinds & {"integer", "number"} and (number := _number(value)):
            return f"write {number}, without quotes" if number == value else f"write {number}"
        if "boolean" in kinds and value.lower() in ("true", "yes", "on"):
            return "write true"
        if "boolean" in kinds and value.lower() in ("false", "no", "off"):
            return "write false"
        close = difflib.get_close_matches(value.lower(), words, n=1)
        return f"did you mean {close[0]}?" if close else None
    if value is None:
        return "leave it out when it sets nothing" if rules.names(nodes) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if "integer" in kinds and value != int(value):
        return f"use {math.floor(value)} or {math.ceil(value)}"
    for node in nodes:
        if value < node.get("minimum", value) or value > node.get("maximum", value):
            return f"the nearest is {node['minimum'] if value < node['minimum'] else node['maximum']}"
    return f'write "{value}", in quotes' if "string" in kinds and not words else None


def _number(text: str) -> str | None:
    """How a number that was read as text should be written: "20" → 20, 1_000 → 1000, 017 → 17."""
    plain = text.strip().replace("_", "")
    if plain.isdigit():
        plain = plain.lstrip("0") or "0"
    value = scalar(plain)
    return plain if isinstance(value, int | float) and not isinstance(value, bool) else None


def _refused(value: Any, nodes: list[Node]) -> str | None:
    """Why the schema does not take this kind of section, where it says so."""
    return next((node["refused"].get(value) for node in nodes if "refused" in node and isinstance(value, str)), None)


def _other_kind(path: Path, tree: Any, schema: Node) -> str | None:
    """For a key that sections of another kind have."""
    nodes, section = rules.at(schema, path[:-1]), _value(tree, path[:-1])
    tag, key = rules.tag(nodes), path[-1]
    having = [node["properties"][tag]["const"] for node in nodes if tag and key in node.get("properties", {})]
    if not having:
        return None
    own = rules.names(rules.of_kind(nodes, section))
    return (
        f"{dotted(path)} is a key of {tag}: {choices(having)}, and {tag} is {section[tag]}, which has the keys "
        f"{', '.join(own)}; leave it out"
    )


def _unknown(path: Path, tree: Any, schema: Node) -> str:
    """For a key that does not exist: the same name elsewhere, else the nearest here, else the nearest."""
    key, name = dotted(path), str(path[-1]).lower().replace("-", "_")
    section = dotted(path[:-1])
    siblings = rules.names(rules.of_kind(rules.at(schema, path[:-1]), _value(tree, path[:-1])))
    leaves: dict[str, list[str]] = {}
    for known in rules.keys(schema):
        leaves.setdefault(known.rsplit(".", 1)[-1], []).append(known)

    near_here = [f"{section}.{near}" if section else near for near in difflib.get_close_matches(name, siblings, n=1)]
    near_anywhere = [known for near in difflib.get_close_matches(name, leaves, n=1) for known in leaves[near]]
    if name in siblings:
        suggestions = near_here
    else:
        suggestions = leaves.get(name, []) or near_here or near_anywhere
    sentence = f"{key} is not a key of a config"
    outer, dot, inner = str(path[-1]).partition(".")
    if dot and path[-1] in rules.keys(schema):
        return f"{sentence}; write {outer}: {{{inner}: ...}}"
    if suggestions:
        return f"{sentence}; did you mean {choices(suggestions)}?"
    return f"{sentence}; {section or 'a config'} has the keys {', '.join(siblings)}"
