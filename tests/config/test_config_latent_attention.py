"""Latent attention: what it cannot do without, what its heads leave no choice in, and who has it."""

from __future__ import annotations

import pytest
from config_cases import checked, refusal

from ultrascale.config.meaning import SHAPES

FAMILY = ("model.family=deepseek_v3", "model.num_key_value_heads=null")
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}


def given(*but: str) -> list[str]:
    return [*FAMILY, *(f"model.{name}={value}" for name, value in LATENT.items() if name not in but)]


def test_a_head_is_what_positions_turn_and_what_they_leave() -> None:
    model = checked(*given())[0].model
    assert model.head_dim == 10
    assert model.num_key_value_heads == model.num_attention_heads
    assert checked(*given(), "model.head_dim=10", "model.q_lora_rank=12")[0].model.head_dim == 10


def test_an_odd_head_may_have_an_even_part_that_is_turned() -> None:
    assert checked(*given(), "model.qk_nope_head_dim=5")[0].model.head_dim == 9


@pytest.mark.parametrize("name", LATENT)
def test_what_is_needed_and_missing_is_named_with_the_published_value(name: str) -> None:
    assert f"model.{name} is not set, and model.family=deepseek_v3 needs it; DeepSeek-V3 has" in refusal(*given(name))


@pytest.mark.parametrize("name", [*LATENT, "q_lora_rank"])
def test_a_family_without_latents_refuses_their_keys(name: str) -> None:
    assert f"model.{name}=8 has no effect under model.family=llama" in refusal(f"model.{name}=8")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.head_dim=4", "model.head_dim=4 is not model.qk_nope_head_dim + model.qk_rope_head_dim = 10; leave it"),
        ("model.num_key_value_heads=2", "model.num_key_value_heads=2 is not model.num_attention_heads=8, and latents"),
        ("model.qk_rope_head_dim=3", "model.qk_rope_head_dim=3 is odd, and rotary embeddings turn pairs; use 2 or 4"),
    ],
)
def test_heads_of_another_size_or_number_are_refused(override: str, sentence: str) -> None:
    assert sentence in refusal(*given(), override)


def test_yarn_is_checked_on_the_part_that_is_turned() -> None:
    """With 64 features there would be slower pairs, that the scaling divides."""
    scaling = "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 4096}"
    rope = ("model.qk_rope_head_dim=2", "model.qk_nope_head_dim=62")
    assert "yarn divides none of them" in refusal(*given(), *rope, scaling)
    checked(*given(), "model.qk_rope_head_dim=64", scaling)


def test_no_permission_changes_the_shapes_of_saved_tensors() -> None:
    assert {f"model.{name}" for name in [*LATENT, "q_lora_rank"]} <= set(SHAPES)
