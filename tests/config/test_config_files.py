"""The files in configs/: they check, they say what the contract says, and their schema is up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_cases import ROOT

from ultrascale.config import collect, rules
from ultrascale.config.load import load
from ultrascale.config.resolve import smallest_world
from ultrascale.config.schema import Config, flatten, json_schema

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_checks_and_begins_with_the_editors_modeline(path: Path) -> None:
    assert path.read_text().splitlines()[0] == "# yaml-language-server: $schema=schema.json"
    loaded = load(path)
    collect.check(loaded, smallest_world(loaded.config))


def test_the_schema_file_is_what_the_command_prints() -> None:
    """When this fails: `ultrascale config schema > configs/schema.json`."""
    assert json.loads((ROOT / "configs" / "schema.json").read_text()) == json_schema()


@pytest.mark.parametrize("name", ["debug", "debug_moe"])
def test_a_debug_config_holds_at_least_what_the_contract_shows_and_cuts_nothing(name: str) -> None:
    contract = load(ROOT / "tests" / "reference" / f"contract_{name}.yaml")
    shipped = load(ROOT / "configs" / f"{name}.yaml")
    ours = flatten(shipped.config)
    theirs = flatten(contract.config)
    assert {key: ours[key] for key in contract.origins if key in ours} == {
        key: theirs[key] for key in contract.origins if key in theirs
    }
    assert not [key for key in shipped.origins if key.startswith(("parallel", "pipeline", "context"))]


@pytest.mark.parametrize(("name", "billions"), [("8b", 8.03), ("70b", 70.55), ("405b", 405.85)])
def test_the_llama_3_configs_have_the_published_parameter_counts(name: str, billions: float) -> None:
    model = load(ROOT / "configs" / f"llama3_{name}.yaml").config.model
    assert model.num_key_value_heads is not None
    hidden, head_dim = model.hidden_size, model.hidden_size // model.num_attention_heads
    attention = 2 * hidden * head_dim * (model.num_attention_heads + model.num_key_value_heads)
    layer = attention + 3 * hidden * model.intermediate_size + 2 * hidden
    parameters = model.num_hidden_layers * layer + hidden + 2 * model.vocab_size * hidden
    assert round(parameters / 1e9, 2) == billions


def test_every_key_has_a_description_and_every_section_too() -> None:
    schema = rules.root()
    for key in rules.keys(schema):
        assert rules.at(schema, tuple(key.split(".")))[0].get("description"), key
    for section in Config.model_fields:
        assert rules.at(schema, (section,))[0].get("description"), section
