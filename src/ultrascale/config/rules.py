"""The schema in words: which keys there are, and what each of them must be.

Read off the JSON Schema, so that error messages are never at odds with what editors and the reference say.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from ultrascale.config.problem import choices
from ultrascale.config.schema import json_schema

Path = tuple[str | int, ...]
Node = dict[str, Any]


def dotted(path: Path) -> str:
    """("data", "train", 0, "weight") → "data.train[0].weight"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


@cache
def root() -> Node:
    """The JSON Schema with its references written out."""
    schema = json_schema()

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        rest = {name: inline(value) for name, value in node.items() if name not in ("$ref", "$defs")}
        return {**inline(schema["$defs"][node["$ref"].rsplit("/", 1)[1]]), **rest} if "$ref" in node else rest

    return inline(schema)


def at(schema: Node, path: Path, tree: Any = None) -> list[Node]:
    """What may stand at `path`: the alternatives of a union, or [] where the schema says nothing.

    tree   a config: where it says of which kind a section is, what may stand in that kind
    """
    nodes = _alternatives(schema)
    for part in path:
        nodes = [
            inner for node in of_kind(nodes, tree) for child in _child(node, part) for inner in _alternatives(child)
        ]
        if isinstance(part, int):
            tree = tree[part] if isinstance(tree, list) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return nodes


def _alternatives(node: Node) -> list[Node]:
    union = next((word for word in ("anyOf", "oneOf") if word in node), None)
    if union is None:
        return [node]
    common = {name: value for name, value in node.items() if name != union}
    return [inner for part in node[union] for inner in _alternatives({**part, **common})]


def tag(nodes: list[Node]) -> str | None:
    """The key that says of which kind a section is, where there are kinds: rope_type."""
    return next((node["discriminator"]["propertyName"] for node in nodes if "discriminator" in node), None)


def of_kind(nodes: list[Node], section: Any) -> list[Node]:
    """The alternatives that a section may be, by its tag; all of them where it has none, or an unknown one."""
    name = tag(nodes)
    if name is None or not isinstance(section, dict) or name not in section:
        return nodes
    return [n for n in nodes if n.get("properties", {}).get(name, {}).get("const") == section[name]] or nodes


@cache
def tags() -> frozenset[str]:
    """Every key that says of which kind a section is."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict) and "discriminator" in node:
            yield node["discriminator"]["propertyName"]
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from walk(inner)

    return frozenset(walk(root()))


def _child(node: Node, part: str | int) -> list[Node]:
    if isinstance(part, str):
        return [node["properties"][part]] if part in node.get("properties", {}) else []
    if "prefixItems" in node:
        return node["prefixItems"][part : part + 1]
    return [node["items"]] if "items" in node else []


def names(nodes: list[Node]) -> list[str]:
    """The keys of a section."""
    return list(dict.fromkeys(name for node in nodes for name in node.get("properties", {})))


def keys(schema: Node) -> list[str]:
    """Every dotted key that holds a value, in the schema's order."""

    def walk(path: Path) -> Iterator[str]:
        nodes = at(schema, path)
        for name in names(nodes):
            yield from walk((*path, name))
        if path and not all("properties" in node for node in nodes):
            yield dotted(path)

    return list(walk(()))


def rule(nodes: list[Node]) -> str:
    """What a value must be: "a whole number of at least 1 or null", "true, false or auto"."""
    lists_last = sorted(nodes, key=lambda node: node.get("type") == "array")
    return choices(list(dict.fromkeys(word for node in lists_last for word in (constants(node) or [_rule(node)]))))


def constants(node: Node) -> list[str]:
    """The values that may be taken, where they can be listed."""
    if node.get("type") == "boolean":
        return ["true", "false"]
    return [node["const"]] if "const" in node else node.get("enum", [])


def _rule(node: Node) -> str:
    kind = node.get("type")
    if kind in ("integer", "number"):
        return " ".join(filter(None, ["a whole number" if kind == "integer" else "a number", _range(node)]))
    if kind == "array":
        if "prefixItems" in node:
            return f"a list of {len(node['prefixItems'])} values, each {rule(node['prefixItems'][:1])}"
        fields = names([node["items"]])
        return f"a list of {{{', '.join(fields)}}}" if fields else f"a list, each {rule([node['items']])}"
    if kind == "object" and (name := tag([node])):
        return f"a section with {name}: {node['properties'][name]['const']}"
    if kind == "object":
        fields = names([node])
        return f"a section with the keys {', '.join(fields)}" if fields else "a section"
    return {"string": "text", "null": "null"}[str(kind)]


def _range(node: Node) -> str:
    if "minimum" in node and "maximum" in node:
        return f"from {node['minimum']} to {node['maximum']}"
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    return " and ".join(f"{word} {json.dumps(node[bound])}" for bound, word in words.items() if bound in node)
