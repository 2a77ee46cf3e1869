"""A section of several kinds: which keys it has is decided by rope_type, and every mistake is answered by that kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import DEBUG, checked, refusal

from ultrascale.config import rules
from ultrascale.config.load import load
from ultrascale.config.model_section import LinearScaling, YarnScaling
from ultrascale.config.render import to_yaml

YARN = "rope_type: yarn, factor: 4, original_max_position_embeddings: 64"
LLAMA3 = "rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64"


def scaled(text: str) -> str:
    return f"model.rope_scaling={{{text}}}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{YARN}, low_freq_factor: 1", "low_freq_factor is a key of rope_type: llama3, and rope_type is yarn, which"),
        (f"{LLAMA3}, truncate: true", "truncate is a key of rope_type: yarn, and rope_type is llama3, which has"),
        ("rope_type: linear, factor: 2, original_max_position_embeddings: 64", "is a key of rope_type: yarn or llama3"),
        (f"{YARN}, beta_fst: 16", "beta_fst is not a key of a config; did you mean model.rope_scaling.beta_fast?"),
        (f"{YARN}, rope_theta: 1e4", "rope_theta is not a key of a config; did you mean model.rope_theta?"),
        ("factor: 2", "model.rope_scaling.rope_type is missing; it must be linear, yarn or llama3"),
        ("rope_type: yran, factor: 2", 'rope_type="yran" must be linear, yarn or llama3; did you mean yarn?'),
        ("rope_type: dynamic, factor: 2", "rope_type=dynamic is refused: its frequencies change with the length"),
        ("rope_type: default", "rope_type=default is refused: it scales nothing; write rope_scaling: null"),
        ("rope_type: yarn, factor: 4", "original_max_position_embeddings is missing; it must be a whole number"),
        ("rope_type: linear, factor: 0.5", "model.rope_scaling.factor=0.5 must be a number of at least 1; the nearest"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_is_answered_by_its_kind(text: str, sentence: str) -> None:
    assert sentence in refusal(scaled(text))


def test_no_section_at_all_is_answered_with_the_kinds() -> None:
    assert "must be a section with rope_type: linear, a section with rope_type: yarn" in refusal("model.rope_scaling=x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{YARN}, beta_fast: 1", "beta_fast=1 must be above beta_slow=1; the paper has 32 and 1"),
        (f"{YARN}, mscale: 1", "mscale=1 has no effect without mscale_all_dim; give both"),
        (f"{YARN}, mscale_all_dim: 1", "mscale_all_dim=1 has no effect without mscale; give both"),
        (f"{YARN}, mscale: 1, mscale_all_dim: 1, attention_factor: 2", "have no effect beside attention_factor=2"),
        (f"{YARN.replace('64', '6')}", "no frequency turns beta_slow=1 times in it; use at least 7"),
        (f"{YARN.replace('64', '1000000')}", "every frequency turns beta_fast=32 times in it, and yarn divides none"),
        (LLAMA3.replace("high_freq_factor: 4", "high_freq_factor: 1"), "high_freq_factor=1.0 must be above low_freq"),
    ],
)  # fmt: skip
def test_numbers_for_which_the_formulas_have_no_answer_are_refused(text: str, sentence: str) -> None:
    assert sentence in refusal(scaled(text))


def test_a_base_of_one_has_no_pairs_to_choose_from() -> None:
    assert "model.rope_theta=1 must be above 1 under rope_type: yarn" in refusal(scaled(YARN), "model.rope_theta=1")


def test_the_shortest_context_that_the_message_offers_is_taken() -> None:
    config, _ = checked(scaled(YARN.replace("64", "7")))
    assert isinstance(config.model.rope_scaling, YarnScaling)


def test_a_section_of_another_kind_replaces_the_one_below_and_one_of_the_same_kind_adds_to_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"extends: {DEBUG}\nmodel: {{rope_scaling: {{{LLAMA3}}}}}\n")
    other = load(path, [scaled("rope_type: linear, factor: 2")])
    assert other.config.model.rope_scaling == LinearScaling(rope_type="linear", factor=2.0)
    assert "model.rope_scaling.low_freq_factor" not in other.origins
    same = load(path, ["model.rope_scaling.factor=2"]).config.model.rope_scaling
    assert same is not None
    assert (same.rope_type, same.factor) == ("llama3", 2.0)


@pytest.mark.parametrize("text", [YARN, LLAMA3, "rope_type: linear, factor: 2"])
def test_each_kind_reads_back_from_what_is_written(text: str, tmp_path: Path) -> None:
    config, _ = checked(scaled(text))
    path = tmp_path / "written.yaml"
    path.write_text(to_yaml(config))
    assert load(path).config == config


def test_the_schema_names_every_key_of_every_kind_once() -> None:
    keys = rules.keys(rules.root())
    assert len(keys) == len(set(keys))
    assert {"model.rope_scaling.beta_fast", "model.rope_scaling.low_freq_factor", "model.rope_scaling"} <= set(keys)
