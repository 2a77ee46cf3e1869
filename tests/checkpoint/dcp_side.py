"""Checkpoints as other trainers write them: our parameters under their names and in their layouts, written by torch.

The layouts are written down here a second time, element by element, from their published descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from pool import Context
from ultrascale.config.model_section import Model
from ultrascale.models.hugging_face import logical_parameters
from ultrascale.models.hugging_face_families import of_model

Tensors = dict[str, torch.Tensor]


def parameters(model: Model, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Ours, by name: values that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    logical = logical_parameters(of_model(model), model)
    return {name: torch.randn(one.shape, generator=generator).mul(0.2).to(dtype) for name, one in logical.items()}


def neighbours(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head as a trainer has them that turns features 2i and 2i + 1, and not i and i + head_dim / 2."""
    rows = []
    for head in weight.split(head_dim):
        for pair in range(head_dim // 2):
            rows += [head[pair], head[pair + head_dim // 2]]
    return torch.stack(rows)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, model: Model) -> torch.Tensor:
    """For each head of keys: the heads of queries that it serves, itself, its values."""
    size, kv_heads = model.head_dim, model.num_key_value_heads
    assert size is not None
    assert kv_heads is not None
    per_group = model.num_attention_heads // kv_heads
    blocks = []
    for group in range(kv_heads):
        blocks += [q[(group * per_group + i) * size : (group * per_group + i + 1) * size] for i in range(per_group)]
        blocks += [k[group * size : (group + 1) * size], v[group * size : (group + 1) * size]]
    return torch.cat(blocks)


def torchtitan(ours: Mapping[str, torch.Tensor], model: Model, one_matrix: bool = False) -> Tensors:
    """As TorchTitan names them; queries, keys and values in one matrix or three."""
    short = {
        "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "attention.o_proj": "attention.wo",
        "attention.q_norm": "attention.q_norm", "attention.k_norm": "attention.k_norm",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
        "moe.router": "moe.router.gate",
    }  # fmt: skip
    experts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    theirs = {
        "tok_embeddings.weight": ours["embed_tokens.weight"],
        "norm.weight": ours["norm.weight"],
        "output.weight": ours.get("lm_head.weight", ours["embed_tokens.weight"]),
    }
    assert model.head_dim is not None
    for layer in range(model.num_hidden_layers):
        prefix = f"layers.{layer}."
        mine = {name.removeprefix(prefix): t for name, t in ours.items() if name.startswith(prefix)}
        q, k, v = (mine.pop(f"attention.{name}_proj.weight") for name in "qkv")
        if model.family == "llama":
            q, k = neighbours(q, model.head_dim), neighbours(k, model.head_dim)
        if one_matrix:
            theirs[f"{prefix}attention.qkv_linear.wqkv.weight"] = fused(q, k, v, model)
        else:
            theirs |= {f"{prefix}attention.w{name}.weight": t for name, t in zip("qkv", (q, k, v), strict=True)}
        for name, tensor in mine.items():
            stem = name.removesuffix(".weight")
            if stem.startswith("moe.experts."):
                theirs[f"{prefix}moe.experts.{experts[stem.split('.')[-1]]}"] = tensor
            else:
                theirs[f"{prefix}{short[stem]}.weight"] = tensor
    return theirs


def megatron(
    ours: Mapping[str, torch.Tensor],
    model: Model,
    *,
    stacked: bool = True,
    fused_norms: bool = True,
    experts: str = "one",
    rows: int = 0,
    prefix: str = "",
) -> Tensors:
    """As Megatron-Core names them in torch_dist.

    experts   one: all in one tensor; each: a tensor for each; apart: gate and up of each apart too
    rows      padding of the vocabulary
    """
    layers: list[Tensors] = []
    for layer in range(model.num_hidden_layers):
        start = f"layers.{layer}."
        mine = {name.removeprefix(start): t for name, t in ours.items() if name.startswith(start)}
        qkv = fused(*(mine[f"attention.{name}_proj.weight"] for name in "qkv"), model)
        block = {"self_attention.linear_qkv.weight": qkv}
        block["self_attention.linear_proj.weight"] = mine["attention.o_proj.weight"]
        first = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
        sparse = "moe.router.weight" in mine
        second = "mlp.linear_fc1.layer_norm_weight" if fused_norms and not sparse else "pre_mlp_layernorm.weight"
        block |= {first: mine["attention_norm.weight"], second: mine["mlp_norm.weight"]}
        for name in "qk":
            if f"attention.{name}_norm.weight" in mine:
                block[f"self_attention.{name}_layernorm.weight"] = mine[f"attention.{name}_norm.weight"]
        if not sparse:
            block["mlp.linear_fc1.weight"] = torch.cat([mine["mlp.gate_proj.weight"], mine["mlp.up_proj.weight"]])
            block["mlp.linear_fc2.weight"] = mine["mlp.down_proj.weight"]
        else:
            block["mlp.router.weight"] = mine["moe.router.weight"]
            gate, up, down = (mine[f"moe.experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
            if experts == "one":
                block["mlp.experts.experts.linear_fc1.weight"] = torch.cat([gate, up], dim=1)
                block["mlp.experts.experts.linear_fc2.weight"] = down
            for e in range(len(gate)) if experts != "one" else ():
                start = f"mlp.experts.experts.{e}" if experts == "apart" else f"mlp.experts.local_experts.{e}"
                block[f"{start}.linear_fc2.weight"] = down[e]
                if experts == "apart":
                    block |= {f"{start}.linear_fc1.weight_w": gate[e], f"{start}.linear_fc1.weight_v": up[e]}
                else:
                    block[f"{start}.linear_fc1.weight"] = torch.cat([gate[e], up[e]])
        layers.append(block)
    if stacked:
        theirs = {f"decoder.layers.{name}": torch.stack([one[name] for one in layers]) for name in layers[0]}
    else:
        theirs = {f"decoder.layers.{n}.{name}": t for n, block in enumerate(layers) for name, t in block.items()}
    padding = torch.full((rows, model.hidden_size), 7.0, dtype=ours["norm.weight"].dtype)
    theirs["embedding.word_embeddings.weight"] = torch.cat([ours["embed_tokens.weight"], padding])
    if "lm_head.weight" in ours:
        theirs["output_layer.weight"] = torch.cat([ours["lm_head.weight"], padding])
    theirs["decoder.final_layernorm.weight"] = ours["norm.weight"]
    return {f"{prefix}{name}": tensor for name, tensor in theirs.items()}


def write(state: dict[str, Any], path: Path) -> Path:
    """By torch, in this process."""
    dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    return path


def write_cut(context: Context, state: Tensors, path: str) -> None:
    """By torch, in all processes of a pool: tensors cut along their rows, their columns, or not at all, in turn."""
    mesh = init_device_mesh("cpu", (context.world_size,))
    cut = {}
    for number, (name, tensor) in enumerate(state.items()):
        ways: list[Placement] = [Shard(0), Shard(tensor.ndim - 1), Replicate()]
        cut[name] = distribute_tensor(tensor, mesh, [ways[number % 3]])
    dcp.save(cut, checkpoint_id=path)
