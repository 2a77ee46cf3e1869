"""How many matrix products a block makes, and how large a tensor is ever made while a rank's shard is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from small import assembled, by_hand, config_of, step_batch_of, tokens
from ultrascale.config.schema import Config
from ultrascale.models.family import load_family
from ultrascale.parallel import store as store_module
from ultrascale.parallel import tensor
from ultrascale.parallel.init import initialise
from ultrascale.parallel.layout import Layout
from ultrascale.parallel.shards import Sharding
from ultrascale.parallel.store import Store

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "matmul", "linear", "_addmm_activation"}


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.made[tuple(out.shape)] += 1
        return out


def products(layers: int, training: bool) -> Counter[tuple[int, ...]]:
    config = config_of({"model.num_hidden_layers": layers, "batch.global_size": 1, "batch.sequence_length": 7})
    assembly = assembled(config)
    inputs, labels = tokens(config)
    engine = assembly.engine if training else assembly.evaluation
    with Products() as counted:
        engine.run(step_batch_of(assembly, inputs, labels))
    return counted.made


# hidden 16, 4 heads and 2 kv heads of 4, ffn 24, 7 tokens
QKV, HIDDEN, GATE_UP, FFN = 16 + 2 * 8, 16, 2 * 24, 24


def test_a_block_makes_one_product_for_qkv_and_one_for_gate_and_up() -> None:
    added = products(3, training=False) - products(2, training=False)
    assert added == {(7, QKV): 1, (7, GATE_UP): 1, (7, HIDDEN): 2}  # the two others: output and down projection


def test_backward_makes_one_input_and_one_weight_gradient_product_for_each() -> None:
    backward = products(3, training=True) - products(2, training=True)
    forward = products(3, training=False) - products(2, training=False)
    assert backward - forward == {
        (QKV, HIDDEN): 1,
        (GATE_UP, HIDDEN): 1,
        (HIDDEN, 16): 1,
        (HIDDEN, FFN): 1,
        (7, HIDDEN): 3,  # input gradients of QKV and gate-up, and of the output projection, which is as wide
        (7, FFN): 1,
    }


class Largest(TorchDispatchMode):
    """The most elements that any tensor made under it has, on meta devices too."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


HUGE: dict[str, dict[str, Any]] = {
    "vocabulary": {"model.vocab_size": 65_000, "model.hidden_size": 64},
    "qkv": {"model.num_attention_heads": 64, "model.num_key_value_heads": 64, "model.head_dim": 64},
    "gate and up, down": {"model.intermediate_size": 40_000},
}


def build_shard(config: Config, rank: int) -> tuple[Store, int]:
    """Builds a rank's stage without process groups; (its buckets, elements of the largest tensor ever made)."""
    with Largest() as largest:
        build = by_hand(config, rank)
        stage = load_family(config.model.family)(config).stage(
            build, range(config.model.num_hidden_layers), embedding=True, head=True
        )
        store = Store(
            {0: stage.units()},
            build.mesh,
            rank,
            build.policy,
            Sharding(0, ()),
            group_of=lambda axes: build.tensor_group,
            copies_of=lambda held: build.tensor_group,
            bucket_bytes=1,
        )
        store.materialise(torch.device("cpu"), config.run.seed)
    return store, largest.numel


def huge(kind: str, tp: int) -> Config:
    settings = {"model.num_hidden_layers": 1, "model.num_key_value_heads": 4, "parallel.tp": tp}
    return config_of({**settings, **HUGE[kind]}, tp)


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize("rank", [0, 3])
def test_building_a_shard_makes_no_tensor_larger_than_the_shard(kind: str, rank: int) -> None:
    gradients, largest = build_shard(huge(kind, tp=4), rank)
    largest_bucket = max(bucket.numel for bucket in gradients.buckets)
    assert largest == largest_bucket
    # A quarter, but for norms and the alignment of tensors: the model was really cut.
    _, uncut = build_shard(huge(kind, tp=1), 0)
    assert largest_bucket < 0.26 * uncut


def _full_then_sliced(target: torch.Tensor, layout: Layout, offset: tuple[int, ...], seed: int) -> None:
    full = torch.empty(layout.shape, dtype=target.dtype)
    initialise(full, layout, (0,) * full.dim(), seed)
    target.copy_(full[tuple(slice(o, o + n) for o, n in zip(offset, target.shape, strict=True))])


def test_a_full_tensor_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "initialise", _full_then_sliced)
    gradients, largest = build_shard(huge("vocabulary", tp=4), 1)
    assert largest > 2 * max(bucket.numel for bucket in gradients.buckets)


@pytest.fixture
def separate_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(x: torch.Tensor, weight: torch.Tensor, plain: Callable[..., torch.Tensor] = torch.nn.functional.linear):
        return torch.cat([plain(x, part) for part in weight.chunk(2)], dim=-1)

    monkeypatch.setattr(tensor.F, "linear", cut)


@pytest.mark.usefixtures("separate_gemms")
def test_separate_products_would_be_seen() -> None:
    added = products(3, training=False) - products(2, training=False)
    assert added[7, QKV] == 0
    assert added[7, QKV // 2] == 2
