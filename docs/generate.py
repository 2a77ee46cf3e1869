"""Writes the generated parts of the documentation; `make docs` runs it, and a test refuses stale ones.

docs/config.md        every key, from the schema's own docstrings
docs/zero.md          between its markers, what the ZeRO stages keep and send, from the formulas that tests check
docs/checkpoints.md   between its markers, how fast they are, from what benchmarks/checkpoint.py wrote down
docs/context_parallelism.md   between its markers, what attention over cp sends, likewise
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
from ultrascale.config.resolve import smallest_world
from ultrascale.config.schema import Config, json_schema
from ultrascale.models.sizes import llama_sizes
from ultrascale.parallel import sharing
from ultrascale.parallel.context import traffic

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
    tries = ["parallel.ep=2"]
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
                (f"{prefix}.{name}.{key}", shown, default, flat(about))
                for key, shown, default, about in inner_keys(definitions[inner], definitions)
            )


def inner_models(schema: dict[str, Any]) -> list[str]:
    """Names of the objects that a value may be, or may be a list of."""
    names = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *([schema["items"]] if "items" in schema else [])]
    return list(dict.fromkeys([*names, *(name for part in parts for name in inner_models(part))]))


def inner_keys(definition: dict[str, Any], definitions: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, description); a null that only means "not given" is left out."""
    for key, schema in definition["properties"].items():
        default = "" if schema.get("default") is None else f"`{literal(schema['default'])}`"
        default = "required" if key in definition.get("required", ()) else default
        yield key, kind(schema, definitions), default, schema.get("description", "")


def kind(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A type as people write it: `int ≥ 1`, `one of a, b`, `list of …`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "{" + ", ".join(definitions[name]["properties"]) + "}"
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(kind(option, definitions) for option in schema[union]))
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


# ---- docs/zero.md -----------------------------------------------------------------------------------------------

MARKERS = "<!-- from here on written by docs/generate.py -->\n", "<!-- up to here -->\n"
BFLOAT16 = sharing.Widths(compute=2, wide=4, moments=8)
REPLICAS, MICRO_BATCHES = 64, 4
"""Of the example."""


def with_table(page: str, table: str) -> str:
    """A page with what stands between its markers made anew."""
    begin, end = MARKERS
    before, _, rest = (ROOT / page).read_text().partition(begin)
    return before + begin + table + end + rest.partition(end)[2]


def zero_table() -> str:
    """Bytes per rank of every stage: the formula, and what it comes to for Llama 3 8B."""
    loaded = load(ROOT / "configs" / "llama3_8b.yaml", ["parallel.tp=1"])
    parameters = llama_sizes(collect.check(loaded, smallest_world(loaded.config))).parameters
    header = f"at rest, N = {REPLICAS} | sent, M = {MICRO_BATCHES}"
    rows = [f"| stage | shared out | bytes at rest | sent per step | {header} |", "|---|---|---|---|---|---|"]
    for name, stage, kept in (("0", 0, False), ("1", 1, False), ("2", 2, False), ("3", 3, False), ("3, kept", 3, True)):
        shared = [item for item, first in sharing.SHARED_FROM.items() if first <= stage]
        held = sum(sharing.held_bytes(stage, item, parameters, REPLICAS, BFLOAT16) for item in sharing.SHARED_FROM)
        sent = sharing.sent_bytes(stage, 2 * parameters, 4 * parameters, MICRO_BATCHES, REPLICAS, kept)
        columns = (", ".join(shared) or "nothing", held_text(stage), sent_text(stage, kept), giga(held), giga(sent))
        rows.append(f"| {name} | {' | '.join(columns)} |")
    return "\n".join(rows) + "\n"


def held_text(stage: int) -> str:
    """`2P + (4P + 12P)/N`: weights, gradients, then masters and moments together."""
    parts = (("weights",), ("gradients",), ("masters", "moments"))
    texts = [f"{sum(BFLOAT16.of(item) for item in items)}P" for items in parts]
    shared = [stage >= sharing.SHARED_FROM[items[0]] for items in parts]
    whole = [text for text, cut in zip(texts, shared, strict=True) if not cut]
    cut = [text for text, cut in zip(texts, shared, strict=True) if cut]
    together = f"({' + '.join(cut)})" if len(cut) > 1 else "".join(cut)
    return " + ".join([*whole, *([f"{together}/N"] if cut else [])])


def sent_text(stage: int, kept: bool) -> str:
    """`P + M·G`: what M micro-batches send, from what one and two do."""
    counts = {
        "P": [sharing.gathers(stage, m, kept) for m in (1, 2)],
        "G": [sharing.reductions(stage, m) for m in (1, 2)],
    }
    terms = []
    for symbol, (one, two) in counts.items():
        each = two - one
        terms += [f"{'' if each == 1 else each}M·{symbol}"] if each else []
        terms += [f"{'' if one - each == 1 else one - each}{symbol}"] if one - each else []
    return " + ".join(terms)


def giga(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


# ---- docs/context_parallelism.md --------------------------------------------------------------------------------

HEADS, HEAD_DIM = 32, 128
LENGTHS, KV_HEADS, RANKS = (8192, 131072), (8, 32), (2, 4, 8)


def context_table() -> str:
    """MiB that a rank sends per layer, for 32 query heads of 128 and several lengths, KV heads and ranks."""
    rows = [
        "| tokens | query heads | KV heads | cp | ring, allgather | ulysses | hybrid (ulysses_size = cp / 2) |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in LENGTHS:
        for kv_heads in KV_HEADS:
            for cp in RANKS:
                shape = traffic.Shape(length // cp, HEADS, kv_heads, HEAD_DIM, HEAD_DIM, bytes=2, wide_bytes=4)
                ways = [(cp, 1), (1, cp)] + ([(2, cp // 2)] if cp > 2 else [])
                sizes = [f"{sum(traffic.sent(shape, *way)) / 2**20:.0f}" for way in ways]
                columns = (f"{length:,}", HEADS, kv_heads, cp, *sizes, *(["as ring"] if cp == 2 else []))
                rows.append(f"| {' | '.join(map(str, columns))} |")
    return "\n".join(rows) + "\n"


# ---- docs/checkpoints.md ----------------------------------------------------------------------------------------

COMPARED = (
    ("save", "the raw disk (write and fsync)", "save against the raw disk"),
    ("save", "`torch.save`", "save against torch.save"),
    ("save", "DCP", "save against DCP"),
    ("asynchronous save: time that training waits", "DCP's `async_save`", "stall against DCP"),
    ("load, every checksum compared", "`torch.load`, which compares nothing", "load against torch.load"),
    ("load, every checksum compared", "DCP, which compares nothing", "load against DCP"),
    ("reshard, every value compared at the end", "DCP's load and save, which compare nothing", "reshard against DCP"),
)
"""Ours, the other, and the ratio's name in the benchmark's figures."""


def checkpoint_table() -> str:
    """How many times as fast as others checkpoints are."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "checkpoint_cpu.json").read_text())
    ratios, seconds = figures["ratios"], figures["seconds"]
    rows = [f"| {ours} | {other} | {ratios[name]:.2f} |" for ours, other, name in COMPARED]
    text = (
        f"{figures['date']}, torch {figures['torch']}, {figures['cores']} cores, {figures['bytes'] / 1e9:.1f} GB on a "
        f"disk that writes {figures['bytes'] / seconds['raw write'] / 1e9:.1f} GB/s:"
    )
    stall = f"An asynchronous save keeps training for {ratios['stall against a memory copy']:.2f} × a copy in memory."
    return "\n".join([text, "", "| ours | beside | times as fast |", "|---|---|---|", *rows, "", stall, ""])


GENERATED = {
    "docs/config.md": config_page,
    "docs/zero.md": lambda: with_table("docs/zero.md", zero_table()),
    "docs/checkpoints.md": lambda: with_table("docs/checkpoints.md", checkpoint_table()),
    "docs/context_parallelism.md": lambda: with_table("docs/context_parallelism.md", context_table()),
    "configs/schema.json": lambda: json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
}
"""File → what it must hold."""


def main() -> None:
    for name, content in GENERATED.items():
        (ROOT / name).write_text(content())
        print(name)


if __name__ == "__main__":
    main()
