"""Layers that predict further tokens, in Hugging Face folders: names, copies, and what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from checkpoint_cases import header
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from small import assembled, boxes, config_of, whole
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.convert import from_hf, to_hf
from ultrascale.checkpoint.folder import folder_name
from ultrascale.checkpoint.hugging_face import open_folder
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.workers import Workers
from ultrascale.checkpoint.write import save
from ultrascale.data.loader import Data
from ultrascale.step import step_batch, train_step

KEYS: dict[str, Any] = {
    "model.family": "deepseek_v3",
    "model.num_hidden_layers": 2,
    "model.num_key_value_heads": None,
    "model.q_lora_rank": 12,
    "model.kv_lora_rank": 10,
    "model.qk_nope_head_dim": 6,
    "model.qk_rope_head_dim": 4,
    "model.v_head_dim": 7,
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 20,
    "model.n_shared_experts": 1,
    "model.first_k_dense_replace": 1,
    "model.scoring_func": "sigmoid",
    "model.router_bias_update_rate": 0.01,
    "model.num_nextn_predict_layers": 2,
    "batch.micro_size": 4,
}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def exported(tmp_path: Path, **more: Any) -> Path:
    """A run's first weights as a folder."""
    config = config_of({**KEYS, **more})
    assembly = assembled(config)
    for kept in assembly.store.kept:
        kept.tensor.copy_(torch.arange(4.0) / 100)
    saved = {**header(3), "config": config.model_dump(mode="json")}
    save(tmp_path / folder_name(3), list(state_boxes(assembly.optimizer, owned=True)), saved)
    with Workers(1, 16 << 20) as workers:
        to_hf(tmp_path / folder_name(3), tmp_path / "hf", workers)
    return tmp_path / "hf"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def edited(path: Path, **tensors: torch.Tensor | None) -> None:
    """With some tensors set, or taken away."""
    now = {name: value for name, value in (tensors_of(path) | tensors).items() if value is not None}
    save_file(now, path / "model.safetensors", {"format": "pt"})


def test_names_and_copies_are_those_of_the_published_folder(tmp_path: Path) -> None:
    tensors = tensors_of(exported(tmp_path))
    last = {name.split("layers.1.")[1] for name in tensors if name.startswith("model.layers.1.")}
    for number in (2, 3):
        found = {name.split(f"layers.{number}.")[1] for name in tensors if name.startswith(f"model.layers.{number}.")}
        assert found == {*last, "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", *COPIES}
        assert torch.equal(tensors[f"model.layers.{number}.{COPIES[0]}"], tensors["model.embed_tokens.weight"])
        assert torch.equal(tensors[f"model.layers.{number}.{COPIES[1]}"], tensors["lm_head.weight"])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize("tie", [False, True])
def test_the_round_trip_is_bit_for_bit(tie: bool, tmp_path: Path) -> None:
    path = exported(tmp_path, **{"model.tie_word_embeddings": tie})
    with Workers(1, 16 << 20) as workers:
        from_hf(path, tmp_path / "back", workers)
        to_hf(tmp_path / "back", tmp_path / "again", workers)
    before, after = tensors_of(path), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert ("lm_head.weight" in before) is not tie
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    written = json.loads((tmp_path / "back" / "manifest.json").read_text())["ties"]
    assert [len(names) for names in written.values()] == ([6] if tie else [3, 3])


def test_a_folder_without_their_tensors_has_none_whatever_its_config_says(tmp_path: Path) -> None:
    path = exported(tmp_path)
    behind = [name for name in tensors_of(path) if name.startswith(("model.layers.2.", "model.layers.3."))]
    edited(path, **dict.fromkeys(behind))
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert open_folder(path).model.num_nextn_predict_layers == 0


def test_a_copy_that_differs_or_a_tensor_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path)
    name = "model.layers.3.shared_head.head.weight"
    edited(path, **{name: tensors_of(path)[name] + 1})
    with pytest.raises(CheckpointError, match=r"layers\.3\.shared_head\.head\.weight and lm_head\.weight differ"):
        open_folder(path)
    edited(path, **{name: None})
    open_folder(path)  # a copy need not be there
    edited(path, **{"model.layers.2.eh_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight is missing, which holds mtp\.0\.eh_proj\.weight"):
        open_folder(path)


def test_transformers_own_model_of_them_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs rounds norms, scores and angles to float32 inside, so the losses agree to that."""
    path = exported(tmp_path)
    kind = transformers.DeepseekV3ForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[23]\..*"])
    theirs = kind.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    further = MtpModel.from_pretrained(theirs)
    config = config_of(KEYS)
    assembly = assembled(config)
    for kept in assembly.store.kept:
        kept.tensor.copy_(torch.arange(4.0) / 100)
    (arrays,) = Data(config).batch(1, 0, 1, config.batch.micro_size)
    places = torch.arange(arrays.inputs.shape[0]).unsqueeze(0)
    losses = {}
    with torch.no_grad():
        hidden = theirs.model(input_ids=torch.from_numpy(arrays.inputs.T.copy())).last_hidden_state
        for depth, (ids, labels) in enumerate(zip(arrays.further_inputs, arrays.further_labels, strict=True)):
            ahead = torch.from_numpy(ids.T.copy())
            hidden = further.forward_layer(depth, hidden, places, None, input_ids=ahead)
            logits = theirs.lm_head(hidden).flatten(0, 1)
            target = torch.from_numpy(np.ascontiguousarray(labels.T)).flatten()
            losses[f"aux_mtp_{depth + 1}"] = F.cross_entropy(logits, target, ignore_index=-100).item()
    report = train_step(assembly, step_batch(assembly, [arrays]), 1).report
    assert {name: report[name] for name in losses} == pytest.approx(losses, rel=1e-6)
    assert whole([boxes(assembly, "masters")]).keys() >= {"mtp.1.eh_proj.weight", "mtp.0.norm.weight"}
