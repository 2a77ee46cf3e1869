"""Checkpoints of TorchTitan and Megatron-Core come in bit for bit, or not at all."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dcp_side import Tensors, megatron, neighbours, parameters, torchtitan, write, write_cut
from torch.distributed.checkpoint import FileSystemReader

from pool import pool
from small import assembled, config_of, step_batch_of, tokens
from ultrascale import cli
from ultrascale.assembly import Assembly
from ultrascale.checkpoint.boxes import Box, CheckpointError, slices
from ultrascale.checkpoint.convert_dcp import Imported, Options, from_dcp
from ultrascale.checkpoint.manifest import read_manifest
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.workers import Workers
from ultrascale.config.schema import Config
from ultrascale.generation import load_model
from ultrascale.models.batch import MicroBatch
from ultrascale.parallel.passes import Pass
from ultrascale.step import train_step

LLAMA = {"model.num_attention_heads": 6, "model.num_key_value_heads": 2, "model.head_dim": 4, "model.hidden_size": 24}
MIXTURE = {
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 10,
    "model.norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "model.tie_word_embeddings": True},
    "qwen3": {**LLAMA, "model.family": "qwen3", "model.head_dim": 6},
    "qwen3_moe": {**LLAMA, **MIXTURE, "model.family": "qwen3_moe"},
    "mixtral": {**LLAMA, **MIXTURE, "model.family": "mixtral"},
}


def config_for(name: str, **more: Any) -> Config:
    keys = {"precision.compute": "float32", "optimizer.name": "adamw", **MODELS[name]}
    return config_of(keys | {key.replace("__", "."): value for key, value in more.items()})


def bring(source: Path, target: Path, config: Config, **options: Any) -> Imported:
    with Workers(1, 16 << 20) as workers:
        return from_dcp(source, target, config, workers, Options(**options))


def held(path: Path, names: Tensors) -> Tensors:
    """The checkpoint's tensors; names that are missing or left over are errors."""
    manifest = read_manifest(path)
    found = {}
    for name, entry in manifest.tensors.items():
        found[name] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
    load(path, [Box(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in found.items()], claimed=names)
    return found


def same(path: Path, expected: Tensors) -> None:
    found = held(path, expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), f"{name} is another tensor"


@pytest.mark.parametrize(
    ("name", "one_matrix", "dtype"),
    [
        ("llama", False, torch.float32),
        ("llama", True, torch.bfloat16),
        ("tied", False, torch.float32),
        ("qwen3", True, torch.float32),
        ("qwen3_moe", False, torch.bfloat16),
    ],
)
def test_weights_of_torchtitan_come_in_bit_for_bit(
    tmp_path: Path, name: str, one_matrix: bool, dtype: torch.dtype
) -> None:
    config = config_for(name)
    ours = parameters(config.model, dtype)
    write(torchtitan(ours, config.model, one_matrix), tmp_path / "theirs")
    done = bring(tmp_path / "theirs", tmp_path / "c", config)
    same(tmp_path / "c", ours)
    assert (done.trainer, done.step, done.moments) == ("TorchTitan", 0, False)
    assert done.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", {"stacked": True, "rows": 5}),
        ("llama", {"stacked": False, "fused_norms": False, "prefix": "model."}),
        ("tied", {"rows": 1, "prefix": "module."}),
        ("qwen3", {"stacked": True, "fused_norms": False}),
        ("qwen3_moe", {"stacked": True, "experts": "one", "rows": 3}),
        ("qwen3_moe", {"stacked": False, "experts": "apart"}),
        ("mixtral", {"stacked": True, "experts": "each"}),
    ],
)
def test_weights_of_megatron_come_in_bit_for_bit(tmp_path: Path, name: str, way: dict[str, Any]) -> None:
    config = config_for(name)
    ours = parameters(config.model, torch.bfloat16)
    state: dict[str, Any] = dict(megatron(ours, config.model, **way))
    start = way.get("prefix", "")
    state |= {f"{start}decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2": {"a": 1}, "rng_state": [1]}
    write(state, tmp_path / "theirs")
    (tmp_path / "theirs" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "theirs" / "common.pt").write_bytes(b"never opened")
    done = bring(tmp_path / "theirs", tmp_path / "c", config)
    same(tmp_path / "c", ours)
    assert (done.trainer, done.step) == ("Megatron-Core", 0)
    assert "rng_state" in done.left_out


def test_names_of_hugging_face_in_a_dcp_folder_are_read_too(tmp_path: Path) -> None:
    config = config_for("llama")
    ours = parameters(config.model)
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    theirs = {}
    for name, tensor in ours.items():
        for a, b in names.items():
            name = name.replace(a, b)
        name = name.replace(".attention.", ".self_attn.")
        theirs[name if name.startswith("lm_head") else f"model.{name}"] = tensor
    write({f"model.{name}": tensor for name, tensor in theirs.items()}, tmp_path / "theirs")
    assert bring(tmp_path / "theirs", tmp_path / "c", config).trainer == "Hugging Face"
    with pytest.raises(CheckpointError, match="leave --rope out"):
        bring(tmp_path / "theirs", tmp_path / "d", config, paired=True)
    same(tmp_path / "c", ours)


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_shards_of_two_processes_make_whole_tensors(tmp_path: Path, name: str, trainer: str) -> None:
    """Rows that two do not divide, columns, and what both ranks hold."""
    config = config_for(name)
    ours = parameters(config.model, torch.bfloat16)
    theirs = torchtitan(ours, config.model) if trainer == "torchtitan" else megatron(ours, config.model, rows=2)
    pool(2).run(write_cut, theirs, str(tmp_path / "theirs"))
    assert len(list((tmp_path / "theirs").glob("*.distcp"))) == 2
    with Workers(1, 8 << 20) as workers:
        from_dcp(tmp_path / "theirs", tmp_path / "c", config, workers, Options())
    same(tmp_path / "c", ours)


def interleaved_logits(theirs: Tensors, config: Config, ids: torch.Tensor) -> torch.Tensor:
    """[batch, seq, vocabulary] of a Llama whose heads are complex numbers, from TorchTitan's tensors alone."""
    model = config.model
    batch, length = ids.shape
    size, heads, groups = model.head_dim, model.num_attention_heads, model.num_key_value_heads
    assert size is not None
    assert groups is not None
    turns = torch.outer(
        torch.arange(length), model.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    )
    unit = torch.polar(torch.ones_like(turns), turns)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.rms_norm_eps) * weight

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * unit[:, None]).flatten(-2)

    t = {name: tensor.double() for name, tensor in theirs.items()}
    x = t["tok_embeddings.weight"][ids]
    mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    for layer in range(model.num_hidden_layers):
        p = f"layers.{layer}"
        y = norm(x, t[f"{p}.attention_norm.weight"])
        q, k, v = ((y @ t[f"{p}.attention.w{name}.weight"].T).unflatten(-1, (-1, size)) for name in "qkv")
        q, k = turned(q), turned(k).repeat_interleave(heads // groups, dim=2)
        v = v.repeat_interleave(heads // groups, dim=2)
        scores = torch.einsum("bshd,bthd->bhst", q, k) / size**0.5 + mask
        mixed = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).reshape(batch, length, -1)
        x = x + mixed @ t[f"{p}.attention.wo.weight"].T
        y = norm(x, t[f"{p}.ffn_norm.weight"])
        up = F.silu(y @ t[f"{p}.feed_forward.w1.weight"].T) * (y @ t[f"{p}.feed_forward.w3.weight"].T)
        x = x + up @ t[f"{p}.feed_forward.w2.weight"].T
    return norm(x, t["norm.weight"]) @ t["output.weight"].T


def our_logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    assembly = load_model(checkpoint, torch.device("cpu"))
    (stage,) = assembly.stages.values()
    positions = torch.arange(ids.shape[1]).unsqueeze(1).expand(-1, ids.shape[0]).contiguous()
    with torch.no_grad():
        out = stage(None, MicroBatch(ids.t().contiguous(), (), positions), Pass(0, 0, None))
    return out["logits"].transpose(0, 1)


def test_logits_are_those_of_a_model_that_turns_neighbouring_features(tmp_path: Path) -> None:
    config = config_for("llama", precision__compute="float64")
    theirs = torchtitan(parameters(config.model), config.model)
    ids = torch.randint(config.model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(3))
    expected = interleaved_logits(theirs, config, ids)
    write(theirs, tmp_path / "theirs")
    bring(tmp_path / "theirs", tmp_path / "c", config)
    torch.testing.assert_close(our_logits(tmp_path / "c", ids), expected, rtol=1e-9, atol=1e-9)
    bring(tmp_path / "theirs", tmp_path / "unturned", config, paired=False)
    assert (our_logits(tmp_path / "unturned", ids) - expected).abs().max() > 1e-3, "the order of rows shows in logits"


def test_a_trainer_that_turns_otherwise_than_usual_is_said_on_the_command(tmp_path: Path) -> None:
    """Norms of heads are dealt out anew with the rows that they scale."""
    config = config_for("qwen3")
    ours = parameters(config.model)
    theirs = torchtitan(ours, config.model)
    for name in theirs:
        if name.endswith(("wq.weight", "wk.weight", "q_norm.weight", "k_norm.weight")):
            theirs[name] = neighbours(theirs[name], 6)
    write(theirs, tmp_path / "theirs")
    bring(tmp_path / "theirs", tmp_path / "c", config, paired=True)
    same(tmp_path / "c", ours)


# ---- moments --------------------------------------------------------------------------------------------------------


def state_of(assembly: Assembly) -> Tensors:
    """Masters and moments, whole, by their names in a checkpoint."""
    found: Tensors = {}
    for box in state_boxes(assembly.optimizer, owned=True):
        whole = found.setdefault(box.name, torch.zeros(box.shape, dtype=box.tensor.dtype))
        whole[slices(box.offset, tuple(box.tensor.shape), (0,) * len(box.shape))] = box.tensor
    return found


def trained(config: Config, assembly: Assembly, steps: range) -> Assembly:
    for step in steps:
        train_step(assembly, step_batch_of(assembly, *tokens(config, seed=step)), step)
    return assembly


def under_their_names(trainer: str, config: Config, ours: Tensors, step: int) -> dict[str, Any]:
    """Weights, masters and moments as they save them, and what else they save."""
    parts = {"": {name: tensor for name, tensor in ours.items() if "/" not in name}}
    for moment in ("exp_avg", "exp_avg_sq"):
        start = f"optimizer.{moment}/"
        parts[moment] = {name.removeprefix(start): t for name, t in ours.items() if name.startswith(start)}
    if trainer == "torchtitan":
        state: dict[str, Any] = {}
        for moment, tensors in parts.items():
            for name, tensor in torchtitan(tensors, config.model).items():
                state[f"optimizer.state.{name}.{moment}" if moment else name] = tensor
                state[f"optimizer.state.{name}.step"] = torch.tensor(float(step))
        more = {"optimizer.param_groups.norm.weight.lr": 0.1, "dataloader.dp_rank_0": b"pickled"}
        return state | more | {"train_state.step": torch.tensor(step), "lr_scheduler": {"last_epoch": step}}
    state = dict(megatron({name: tensor.bfloat16() for name, tensor in parts[""].items()}, config.model))
    for moment, tensors in (("fp32_param", parts.pop("")), *parts.items()):
        there = megatron(tensors, config.model)
        state |= {f"chained_0.optimizer.state.{moment}.{name}": tensor for name, tensor in there.items()}
    return state


@pytest.mark.parametrize("trainer", ["torchtitan", "megatron"])
def test_a_run_goes_on_from_their_masters_moments_and_step_as_if_it_had_been_ours(tmp_path: Path, trainer: str) -> None:
    config = config_for("llama")
    assembly = trained(config, assembled(config), range(1, 4))
    before = state_of(assembly)
    source = write(under_their_names(trainer, config, before, 3), tmp_path / "iter_0000003")
    done = bring(source, tmp_path / "c", config)
    same(tmp_path / "c", before)
    assert (done.step, done.moments, done.dtype) == (3, True, "float32")
    assert done.left_out == (("dataloader", "lr_scheduler", "train_state") if trainer == "torchtitan" else ())

    other = assembled(config)
    header = {"config": config.model_dump(mode="json"), "data": {}}
    snapshots = Snapshots(other.optimizer, tmp_path / "run", header, other.groups.world, None, "full")
    step = snapshots.restore(tmp_path / "c").step
    went_on, unbroken = (trained(config, one, range(step + 1, 6)) for one in (other, assembly))
    expected = state_of(unbroken)
    for name, tensor in state_of(went_on).items():
        assert torch.equal(tensor, expected[name]), f"{name} after two more steps"


def saved_state(trainer: str) -> tuple[Config, Tensors, dict[str, Any]]:
    """Ours, and the same as they save it at step 3; nobody trained."""
    config = config_for("llama")
    names = parameters(config.model)
    ours = names | {f"optimizer.{m}/{n}": t.abs() for m in ("exp_avg", "exp_avg_sq") for n, t in names.items()}
    return config, ours, under_their_names(trainer, config, ours, 3)


def test_moments_stay_where_they_are_when_asked_or_when_another_optimizer_is_configured(tmp_path: Path) -> None:
    config, expected, state = saved_state("torchtitan")
    write(state, tmp_path / "theirs")
    weights = {name: tensor for name, tensor in expected.items() if "/" not in name}
    done = bring(tmp_path / "theirs", tmp_path / "c", config, weights_only=True)
    assert (done.step, done.left_out) == (0, ("dataloader", "lr_scheduler", "optimizer", "train_state"))
    same(tmp_path / "c", weights)
    bring(tmp_path / "theirs", tmp_path / "sgd", config_for("llama", optimizer__name="sgd"))
    same(tmp_path / "sgd", weights)


def test_moments_of_a_part_of_the_model_or_without_one_step_are_refused(tmp_path: Path) -> None:
    config, _, state = saved_state("torchtitan")
    less = {name: value for name, value in state.items() if name != "optimizer.state.norm.weight.exp_avg"}
    write(less, tmp_path / "less")
    with pytest.raises(CheckpointError, match=r"state\.norm\.weight\.exp_avg is missing(.|\n)*--weights-only"):
        bring(tmp_path / "less", tmp_path / "c", config)
    write({**state, "optimizer.state.norm.weight.step": torch.tensor(8.0)}, tmp_path / "two")
    with pytest.raises(CheckpointError, match="2 different numbers of steps; give --step N"):
        bring(tmp_path / "two", tmp_path / "c", config)
    assert bring(tmp_path / "two", tmp_path / "c", config, step=9).step == 9
    with pytest.raises(CheckpointError, match="--step 9 has no effect"):
        bring(tmp_path / "two", tmp_path / "w", config, step=9, weights_only=True)
    config, _, state = saved_state("megatron")
    write(state, tmp_path / "unnumbered")
    with pytest.raises(CheckpointError, match="does not say its step; give --step N"):
        bring(tmp_path / "unnumbered", tmp_path / "d", config)


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    config = config_for("llama")
    return write(torchtitan(parameters(config.model), config.model), tmp_path / "theirs")


def changed(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Writes the folder again with other tensors."""
    config = config_for("llama")
    state = torchtitan(parameters(config.model), config.model)
    edit(state)
    shutil.rmtree(path)
    write(state, path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda s: s.update({"layers.0.attention.wq.bias": torch.ones(24)}), r"wq\.bias is no tensor of this model"),
        (lambda s: s.pop("layers.1.ffn_norm.weight"), r"layers\.1\.ffn_norm\.weight is missing, which holds layers"),
        (
            lambda s: s.update({"layers.1.attention.wk.weight": torch.ones(8, 23)}),
            r"wk\.weight has shape \[8, 23\]; the config makes it \[8, 24\]",
        ),
        (
            lambda s: s.update({"layers.1.attention.wv.weight": torch.ones(9, 24)}),
            r"wv\.weight has shape \[9, 24\]; the config makes it \[8, 24\]",
        ),
        (lambda s: s.update({"output.weight": torch.ones(132, 24)}), r"output\.weight has shape \[132, 24\]"),
        (lambda s: s.update({"norm.weight": torch.ones(24, dtype=torch.int32)}), "norm.weight has dtype int32"),
        (lambda s: s.update({"norm.weight": torch.ones(24, dtype=torch.float64)}), "use precision.compute=float64"),
        (lambda s: s.update({"output.weight": s["output.weight"].T.contiguous().T}), "not row-major"),
    ],
)
def test_what_does_not_fit_is_named(
    theirs: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], said: str
) -> None:
    changed(theirs, edit)
    with pytest.raises(CheckpointError, match=said):
        bring(theirs, tmp_path / "c", config_for("llama"))
    assert not (tmp_path / "c").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"], "nothing is left behind"


def test_a_vocabulary_may_be_padded_and_not_cut(tmp_path: Path) -> None:
    config = config_for("llama")
    theirs = megatron(parameters(config.model), config.model)
    theirs["output_layer.weight"] = theirs["output_layer.weight"][:-1]
    write(theirs, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=r"output_layer\.weight has shape \[130, 24\]; the config makes it \[131"):
        bring(tmp_path / "theirs", tmp_path / "c", config)


def test_unknown_names_come_with_what_to_run_there(theirs: Path, tmp_path: Path) -> None:
    changed(theirs, lambda s: s.update({"layers.0.attention.sinks": torch.ones(6)}))
    with pytest.raises(CheckpointError, match=r"sinks is no tensor(.|\n)*convert_to_hf\.py(.|\n)*convert from-hf"):
        bring(theirs, tmp_path / "c", config_for("llama"))
    with pytest.raises(CheckpointError, match=r"names for model\.family=mixtral are not known here"):
        bring(theirs, tmp_path / "c", config_for("mixtral"))


def test_a_head_that_differs_from_what_it_is_tied_to_is_refused(theirs: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"output\.weight and tok_embeddings\.weight differ"):
        bring(theirs, tmp_path / "c", config_for("tied"))


def metadata_edit(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        metadata = FileSystemReader(path).read_metadata()
        metadata.storage_meta = None
        edit(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))

    return change


def info(metadata: Any, name: str) -> Any:
    return next(value for index, value in metadata.storage_data.items() if index.fqn == name)


def rest_of(name: str) -> Callable[[Path], None]:
    """Cuts the file where this tensor's archive is."""

    def change(path: Path) -> None:
        place = info(FileSystemReader(path).read_metadata(), name)
        file = path / place.relative_path
        file.write_bytes(file.read_bytes()[: place.offset + place.length - 1])

    return change


def flip(name: str) -> Callable[[Path], None]:
    """One bit of this tensor's values."""

    def change(path: Path) -> None:
        place = info(FileSystemReader(path).read_metadata(), name)
        file = path / place.relative_path
        data = bytearray(file.read_bytes())
        data[data.index(b"data/0", place.offset) + 80] ^= 4
        file.write_bytes(data)

    return change


def chunk_of(metadata: Any, name: str) -> Any:
    return metadata.state_dict_metadata[name].chunks[0]


NORM = "norm.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            metadata_edit(lambda m: setattr(info(m, NORM), "relative_path", "../outside.distcp")),
            "refused: a plain name",
        ),
        (metadata_edit(lambda m: setattr(info(m, NORM), "relative_path", "/etc/hostname")), "refused: a plain name"),
        (
            metadata_edit(lambda m: setattr(info(m, NORM), "relative_path", "__9_0.distcp")),
            "__9_0.distcp: the file is m",
        ),
        (metadata_edit(lambda m: setattr(info(m, NORM), "offset", 1 << 40)), "it was truncated, or is another"),
        (metadata_edit(lambda m: setattr(info(m, NORM), "offset", 3)), "archive of norm.weight at byte 3 is damaged"),
        (metadata_edit(lambda m: setattr(info(m, NORM), "length", 90)), "archive of norm.weight at byte .* is damaged"),
        (metadata_edit(lambda m: m.state_dict_metadata[NORM].chunks.clear()), "norm.weight of shape .* is in no chunk"),
        (
            metadata_edit(lambda m: m.state_dict_metadata[NORM].chunks.append(chunk_of(m, NORM))),
            r"norm.weight of shape \[24\]: element \[0\] is in 2 chunks",
        ),
        (
            metadata_edit(lambda m: setattr(chunk_of(m, NORM), "sizes", torch.Size([23]))),
            r"norm.weight of shape \[24\]: element \[23\] is in no chunk",
        ),
        (
            metadata_edit(lambda m: setattr(chunk_of(m, NORM), "offsets", torch.Size([1]))),
            "does not lie inside the shape",
        ),
        (
            metadata_edit(lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, info(m, "output.weight")))),
            "one of the two is of another checkpoint",
        ),
        (
            metadata_edit(lambda m: setattr(m.state_dict_metadata[NORM].properties, "dtype", torch.bfloat16)),
            "holds float32 .* says bfloat16",
        ),
        (metadata_edit(lambda m: m.storage_data.clear()), "is stored nowhere"),
        (rest_of("tok_embeddings.weight"), "it was truncated, or is another"),
        (flip("layers.1.feed_forward.w2.weight"), r"checksum of layers\.1\.feed_forward\.w2\.weight does not match"),
        (lambda path: (path / "__0_0.distcp").unlink(), "the file is missing"),
        (
            lambda path: (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-9]),
            "damaged, or no pickle",
        ),
        (lambda path: (path / ".metadata").write_bytes(b"{}"), "damaged, or no pickle|the instruction"),
    ],
)
def test_damaged_and_hostile_folders_are_refused_with_the_name_of_what_is_wrong(
    theirs: Path, tmp_path: Path, damage: Callable[[Path], Any], said: str
) -> None:
    damage(theirs)
    with pytest.raises(CheckpointError, match=said):
        bring(theirs, tmp_path / "c", config_for("llama"))
    assert not (tmp_path / "c").exists()


def test_archives_without_checksums_are_read_when_asked(theirs: Path, tmp_path: Path) -> None:
    flip(NORM)(theirs)
    with pytest.raises(CheckpointError, match="--verify off"):
        bring(theirs, tmp_path / "c", config_for("llama"))
    bring(theirs, tmp_path / "c", config_for("llama"), verify="off")
    assert (tmp_path / "c").is_dir()


def test_a_flipped_bit_is_refused_or_changes_nothing(theirs: Path, tmp_path: Path) -> None:
    """Anywhere in the two files: archives have bytes that nobody reads."""
    config = config_for("llama")
    expected = parameters(config.model)
    whole = {path: path.read_bytes() for path in theirs.iterdir()}
    draw = np.random.default_rng(0)
    refused = 0
    for number in range(60):
        path = sorted(whole)[number % 2]
        data = bytearray(whole[path])
        data[draw.integers(len(data))] ^= 1 << int(draw.integers(8))
        path.write_bytes(data)
        try:
            bring(theirs, tmp_path / f"c{number}", config)
        except CheckpointError:
            refused += 1
        else:
            same(tmp_path / f"c{number}", expected)
        path.write_bytes(whole[path])
    assert refused > 30


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["mp_rank_00/model_optim_rng.pt"], "--ckpt-convert-format torch_dist"),
        (["iter_0000010/mp_rank_00_000/model_optim_rng.pt"], "Megatron's older format"),
        (["pytorch_model.bin"], "save_pretrained"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "convert from-hf"),
        (["global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"], "zero_to_fp32.py"),
        (["config.json", "model.safetensors"], "convert from-hf"),
        (["__0_0.distcp"], "was not finished"),
        (["step-5/.metadata", "step-10/.metadata"], "step-5"),
        (["manifest.json"], "ours already"),
        (["decoder.weight/.zarray"], "zarr"),
        (["consolidated.00.pth"], "safetensors"),
        (["readme"], "no folder of torch.distributed.checkpoint"),
        ([], "no such folder"),
    ],
)
def test_other_formats_are_refused_unopened_with_what_to_run_there(tmp_path: Path, files: list[str], said: str) -> None:
    for name in files:
        (tmp_path / "them" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "them" / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=said):
        bring(tmp_path / "them", tmp_path / "c", config_for("llama"))


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_checkpoint_and_says_what_it_left(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    lines = [
        "run: {steps: 1}",
        "batch: {global_size: 1, micro_size: 1, sequence_length: 8}",
        "data: {train: builtin:uneven}",
    ]
    sizes = {**MODELS["llama"], "model.num_hidden_layers": 2, "model.intermediate_size": 24, "model.vocab_size": 131}
    model = {key.removeprefix("model."): value for key, value in sizes.items()}
    lines += [f"model: {json.dumps(model)}", "optimizer: {lr: 0.1}"]
    config.write_text("\n".join(lines) + "\n")
    command = ["convert", "from-dcp", str(theirs), str(tmp_path / "c"), "--config", str(config), "model.family=llama"]
    assert cli.main([*command, "--json", "--processes", "1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["trainer"], said["step"], said["moments"]) == ("TorchTitan", 0, False)
    same(tmp_path / "c", parameters(config_for("llama").model))
    assert cli.main([*command, "--rope", "halves"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli.main([*command, "model.vocab_size=0"]) == 2
    assert "model.vocab_size" in capsys.readouterr().err


def test_a_second_import_uses_several_processes_and_gives_the_same_files(theirs: Path, tmp_path: Path) -> None:
    config = config_for("llama")
    bring(theirs, tmp_path / "one", config)
    with Workers(2, 32 << 20) as workers:
        from_dcp(theirs, tmp_path / "two", config, workers, Options())
    assert (tmp_path / "one/rank-00000.safetensors").read_bytes() == (
        tmp_path / "two/rank-00000.safetensors"
    ).read_bytes()
