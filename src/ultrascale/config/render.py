"""A config as text: YAML that reads back to the same config, with a note on where each value came from."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ultrascale.config.schema import Config
from ultrascale.config.yaml_reader import scalar

# Text that YAML takes as it stands, in a list too; everything else is quoted.
_PLAIN = re.compile(r"[A-Za-z_./][\w./+-]*(:[\w./+-]+)*")


def to_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """YAML of the config, section by section; with `origins` (dotted key → origin), one comment a line."""
    lines = list(_lines(config, origins or {}, prefix="", indent=""))
    width = max((len(line) for line, origin in lines if origin and len(line) <= 60), default=0)
    return "".join(f"{line:<{width}}  # {origin}\n" if origin else f"{line}\n" for line, origin in lines)


def _lines(section: BaseModel, origins: Mapping[str, str], prefix: str, indent: str) -> Iterator[tuple[str, str]]:
    for name in type(section).model_fields:
        value, key = getattr(section, name), prefix + name
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:", ""
            yield from _lines(value, origins, f"{key}.", f"{indent}  ")
        else:
            yield f"{indent}{name}: {_value(value)}", origins.get(key, "")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and scalar(value) == value else _quoted(value)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(name)}: {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)


def _quoted(text: str) -> str:
    """Double-quoted YAML. Not JSON's, whose escapes of rare characters YAML reads differently."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in escaped) + '"'
