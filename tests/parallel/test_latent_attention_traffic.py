"""What latent attention sends over tp, through the ledger: latents and the shared key, never hidden states before it.

The MLP behind it and the way out of both are those of any layer (test_collectives_per_layer.py).
"""

from __future__ import annotations

from collections import Counter

import pytest
from test_collectives_per_layer import NO_SP, SP, activation, per_layer

Q_LATENT, KV_LATENT, KEY, HIDDEN = 12, 10, 4, 16
MODEL = {
    "model.family": "deepseek_v3",
    "model.num_key_value_heads": None,
    "model.q_lora_rank": Q_LATENT,
    "model.kv_lora_rank": KV_LATENT,
    "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": KEY,
    "model.v_head_dim": 7,
    "parallel.tp": 2,
}


def calls(op: str, *widths: int) -> Counter[tuple[str, int]]:
    """One call for each of these widths, with the bytes that a ring of two sends; an all-reduce goes round twice."""
    trips = 2 if op == "all_reduce" else 1
    return Counter((op, trips * activation(2) * width // HIDDEN) for width in widths)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_gradients_of_latents_are_what_is_summed_without_sequence_parallelism(recompute: str) -> None:
    """Selective recomputation makes them again, and sends nothing again."""
    added = per_layer({**MODEL, **NO_SP, "recompute.mode": recompute})
    assert added == {
        "forward": calls("all_reduce", HIDDEN, HIDDEN),
        "backward": calls("all_reduce", Q_LATENT, KV_LATENT, KEY, HIDDEN),
    }


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_latents_are_what_is_gathered_under_sequence_parallelism(recompute: str) -> None:
    gathered = calls("all_gather", Q_LATENT, KV_LATENT, KEY)
    weights = calls("all_gather", Q_LATENT, KV_LATENT, HIDDEN)  # inputs that were kept in pieces, for their gradients
    added = per_layer({**MODEL, **SP, "recompute.mode": recompute})
    assert added == {
        "forward": gathered + calls("all_gather", HIDDEN) + calls("reduce_scatter", HIDDEN, HIDDEN),
        "backward": weights
        + calls("all_gather", HIDDEN, HIDDEN)
        + calls("reduce_scatter", Q_LATENT, KV_LATENT, KEY, HIDDEN)
        + (gathered if recompute == "selective" else Counter()),
    }
