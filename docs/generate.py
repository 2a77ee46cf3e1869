"""Writes the generated parts of the documentation; `make docs` runs it, and a test refuses stale ones.

docs/config.md        every key, from the schema's own docstrings
configs/schema.json   the JSON Schema that editors read through the modeline of a config
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrascale.config import collect
from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError
from ultrascale.config.schema import Config, json_schema

ROOT = Path(__file__).parents[1]

HEAD = """\
# Config keys

A run is one YAML file. This page lists every key it may have; `docs/generate.py` writes it from the schema in
`src/ultrascale/config/schema.py`.

A key is written as `section: {key: value}` in the file and as `section.key=value` on the command line, where it comes
on top of the file. `extends: other.yaml` takes another file first, relative to this one. `ultrascale config show
--config F` prints what a run will use, with the origin of each value:

```bash
ultrascale config show --config configs/debug.yaml parallel.tp=2 batch.micro_size=4
```

An unknown key, a wrong type, a duplicate key, a value that does not fit another: each is refused before torch is
imported, with file, line, rule and the nearest value that works:

```bash fails
python -m ultrascale.train --config configs/debug.yaml parallel.tpp=2
```

A key without a default is required. Where the default is null, the text says what null means.
"""

REFUSED = """\
## Not in this version

The schema has these values already; a config that uses one is refused with what to use instead.
"""


def config_page() -> str:
    """docs/config.md."""
    schema = json_schema()
    parts = [HEAD]
    for section, field in Config.model_fields.items():
        definition = schema["$defs"][section.capitalize()]
        parts.append(f"## {section}\n\n{flat(definition['description'])}\n")
        parts.append(table(section, field.annotation, schema["$defs"]))
    return "\n".join([*parts, REFUSED, "\n".join(f"- {message}" for message in refused(schema)), ""])


def refused(schema: dict[str, Any]) -> list[str]:
    """What the packages' checks say about values that are not in this version: each choice of each key, tried."""
    tries = ["parallel.cp=2", "parallel.ep=2", "init.from_hf=folder"]
    for section in Config.model_fields:
        for key, values in schema["$defs"][section.capitalize()]["properties"].items():
            choices = values.get("enum", [True] if values.get("type") == "boolean" else [])
            if values.get("maximum", 10) < 10:
                choices = range(1, values["maximum"] + 1)
            tries += [f"{section}.{key}={literal(choice)}" for choice in choices]
    messages = []
    for override in tries:
        world = 2 if override.endswith("p=2") else 1
        try:
            collect.check(load(ROOT / "configs" / "debug.yaml", [override]), world)
        except ConfigError as error:
            messages += [problem.message for problem in error.problems if "in this version" in problem.message]
    return list(dict.fromkeys(messages))


def table(section: str, model: Any, definitions: dict[str, Any]) -> str:
    """One section's keys; those of a section inside it follow under their dotted names."""
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key, shown, default, text in keys(section, model, definitions):
        rows.append(f"| `{key}` | {shown} | {default} | {text} |")
    return "\n".join(rows) + "\n"


def keys(prefix: str, model: Any, definitions: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, description) of every key below a section's model."""
    properties = definitions[model.__name__]["properties"]
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{literal(field.get_default(call_default_factory=True))}`"
        text = flat(properties[name].get("description", ""))
        yield f"{prefix}.{name}", kind(properties[name], definitions), default, text
        for inner in inner_models(properties[name]):
            yield from (
                (f"{prefix}.{name}.{key}", shown, "required" if required else "", flat(about))
                for key, shown, required, about in inner_keys(definitions[inner], definitions)
            )


def inner_models(schema: dict[str, Any]) -> list[str]:
    """Names of the objects that a value may be, or may be a list of."""
    options = [schema, *schema.get("anyOf", ())]
    options += [option["items"] for option in options if "items" in option]
    return list(dict.fromkeys(option["$ref"].rpartition("/")[2] for option in options if "$ref" in option))


def inner_keys(definition: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[str, str, bool, str]]:
    for key, schema in definition["properties"].items():
        yield key, kind(schema, definitions), key in definition.get("required", ()), schema.get("description", "")


def kind(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A type as people write it: `int ≥ 1`, `one of a, b`, `list of …`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "{" + ", ".join(definitions[name]["properties"]) + "}"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(option, definitions) for option in schema["anyOf"]))
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        items = schema["items"] if "items" in schema else schema["prefixItems"][0]
        return f"list of {kind(items, definitions)}"
    names = {"integer": "int", "number": "float", "string": "text", "boolean": "true \\| false", "object": "map"}
    bounds = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    limits = [f"{sign} {bound(schema[word])}" for word, sign in bounds if word in schema]
    return " ".join([names.get(schema.get("type", ""), schema.get("type", "any")), ", ".join(limits)]).strip()


def bound(value: float) -> str:
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value > 10**9 else f"{value:g}"


def literal(value: Any) -> str:
    """A default as it would stand in YAML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def flat(text: str) -> str:
    """On one line, and safe in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


GENERATED = {
    "docs/config.md": config_page,
    "configs/schema.json": lambda: json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
}
"""File → what it must hold."""


def main() -> None:
    for name, content in GENERATED.items():
        (ROOT / name).write_text(content())
        print(name)


if __name__ == "__main__":
    main()
