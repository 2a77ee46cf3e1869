"""Checkpoints that others lost values in: fused tensors cut as one block, files that were not all there, exports whose
rows lay otherwise, files that ran code or came from elsewhere.

Held elsewhere:

| report | where |
|---|---|
| BL-076 training begins from scratch after a conversion | `tests/trainer/test_trainer_reshard.py`: the steps after a reshard are those of the unbroken run; `tests/parity/test_reshard_matrix.py`: moments bit for bit |
| BL-085, BL-096 samples skipped or read twice on other workers or ranks | position is a count of samples: `tests/data/test_data_loader.py`; `tests/trainer/test_trainer_resume.py`: going on under another layout |
| BL-086, BL-097 an epoch repeated or dropped | the order is computed from (seed, epoch, number): `tests/data/test_data_loader.py`: an epoch has every chunk once |
| BL-089 a new schedule ignored on resume | the rate is a formula of step and config: `test_trainer_resume.py`; another schedule is refused or named: `tests/trainer/test_allowed_changes.py` |
| BL-090 the first step after a resume has another weight decay | `test_trainer_resume.py`: 2N steps equal N, a resume, and N |
| BL-092, BL-093 state of experts, or fp32 masters, lost | `tests/parity/test_reshard_matrix.py`: mixtures, and bfloat16 with its masters |
| BL-147 rows of queries and keys permuted, or not, whatever the model turns together | `tests/checkpoint/test_hugging_face.py`: DeepSeek-V3 with pairs and with halves |
| BL-150 buffers left as zeros, defaults over the folder's config | the same: logits of what was imported; `init.from_hf` refuses another base |
| BL-151 as many heads as groups in the one model that was tested | the same: heads 12 of 4, 6 of 2, 4 of 1, 4 of 4, and wide ones |
| BL-154 converted models say garbage | the same: an export is read back and compared before it gets its name |
| BL-169 tied weights drift apart | `tests/parity/test_reshard_matrix.py`: tied, pp to one process and back; `tests/trainer/test_trainer_replicas.py` |
"""  # noqa: E501

from __future__ import annotations

import ast
import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pool import Context, pool
from small import assembled, boxes, by_hand, config_of, whole
from ultrascale import cli
from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.convert import from_hf, to_hf
from ultrascale.checkpoint.hugging_face import open_folder
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.workers import LEAST_BYTES, Workers
from ultrascale.checkpoint.write import save
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.config.schema import Config, Init
from ultrascale.models.transformer import matrix
from ultrascale.parallel.layout import BATCH_AXES
from ultrascale.parallel.module import Module
from ultrascale.parallel.shards import Sharding
from ultrascale.parallel.store import Store

ROOT = Path(__file__).parents[2]
# BL-071: as many kv heads as would be lost by cutting a fused qkv as one block.
MODEL = {"optimizer.name": "adamw", "model.num_hidden_layers": 2, "precision.compute": "float32"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"parallel.tp": 2}),
    "tp4": (4, {"parallel.tp": 4}),
    "pp2": (2, {"parallel.pp": 2}),
    "dp4": (4, {"parallel.dp": 4, "parallel.zero_stage": 1}),
    "tp2 dp2 zero3": (4, {"parallel.tp": 2, "parallel.dp": 2, "parallel.zero_stage": 3}),
}


def header(config: Config) -> dict[str, Any]:
    return {"step": 1, "config": config.model_dump(mode="json"), "data_position": {}, "axes": {}, "ties": {}}


def each_element_its_own_number(box: Box, place: int) -> torch.Tensor:
    """Its index in the whole tensor, and a little that tells tensors apart."""
    index = np.ravel_multi_index(np.indices(box.tensor.shape).reshape(len(box.shape), -1), box.tensor.shape)
    inner = np.unravel_index(index, box.tensor.shape)
    there = np.ravel_multi_index([i + o for i, o in zip(inner, box.offset)], box.shape)
    return torch.from_numpy(there + 10_000.0 * place).reshape(box.tensor.shape)


def names(config: Config) -> list[str]:
    return sorted(box.name for box in state_boxes(assembled(config).optimizer, owned=True))


def save_numbered(context: Context | None, config: Config, order: list[str], target: Path) -> None:
    """This rank's part of a checkpoint of numbered elements, whatever the layout: written without reading one."""
    assembly = assembled(config, context)
    assembly.optimizer.weights.settle()
    owned = list(state_boxes(assembly.optimizer, owned=True))
    for box in owned:
        box.tensor.copy_(each_element_its_own_number(box, order.index(box.name)))
    save(target, owned, header(config), assembly.groups.world)


def wrong_after_load(context: Context | None, config: Config, order: list[str], source: Path) -> list[str]:
    """Names of this rank's boxes, replicas too, that do not hold their own numbers after a load."""
    assembly = assembled(config, context)
    assembly.optimizer.weights.settle()
    wanted = list(state_boxes(assembly.optimizer, owned=False))
    for box in wanted:
        box.tensor.fill_(-1)
    load(source, wanted)
    expected = [each_element_its_own_number(box, order.index(box.name)) for box in wanted]
    return [box.name for box, values in zip(wanted, expected) if not torch.equal(box.tensor.double(), values.double())]


def everywhere(world: int, function: Any, *arguments: Any) -> list[Any]:
    return [function(None, *arguments)] if world == 1 else pool(world).run(function, *arguments)


@pytest.mark.parametrize("saved", LAYOUTS)
def test_numbered_elements_are_in_their_places_under_every_other_layout(tmp_path: Path, saved: str) -> None:
    """BL-070, BL-071: q, k, v and gate, up are fused in memory and moments are flat; none of it is in the file."""
    world, layout = LAYOUTS[saved]
    order = names(config_of(MODEL))
    assert sum(name.startswith("optimizer.") for name in order) == 2 * sum("/" not in name for name in order)
    everywhere(world, save_numbered, config_of({**MODEL, **layout}, world), order, tmp_path / "c")
    for other, (size, cut) in LAYOUTS.items():
        wrong = everywhere(size, wrong_after_load, config_of({**MODEL, **cut}, size), order, tmp_path / "c")
        assert not any(wrong), f"{saved} → {other}: {wrong}"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_unequal_blocks_of_a_fused_tensor_are_cut_each_by_itself(tp: int) -> None:
    """BL-072: 64 + 4 rows in one stored tensor. A cut of the 68 rows as one would give the first rank no gate row."""
    config = config_of({"parallel.tp": tp}, tp)
    held: dict[str, np.ndarray] = {"a.weight": np.zeros((64, 8), int), "gate.weight": np.zeros((4, 8), int)}
    for rank in range(tp):
        build = by_hand(config, rank)
        module = Module(build)
        split = {0: ("tp",)}
        module.declare("weight", matrix("a.weight", 64, 8, split, 0.1), matrix("gate.weight", 4, 8, split, 0.1))
        sharding = Sharding.on(build.mesh, 0, BATCH_AXES)
        alone = Group((), (rank,), 0, None, Ledger())
        of = partial(lambda group, held: group, alone)
        store = Store({0: [("unit", module)]}, build.mesh, rank, build.policy, sharding, of, of, 1)
        rows = []
        for bucket in store.buckets:
            for span in bucket.spans:
                for box in bucket.held(span, build.mesh, rank):
                    held[span.layout.name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape))] += 1
                    rows.append(box.shape[0])
        assert sorted(rows) == [4 // tp, 64 // tp]
    assert all((count == 1).all() for count in held.values())


def test_a_checkpoint_or_folder_of_which_a_part_is_gone_is_not_loaded_by_what_is_left(tmp_path: Path) -> None:
    """BL-073: complete by the names of its tensors, and not by their elements."""
    order, config = names(config_of(MODEL)), config_of({**MODEL, "parallel.tp": 2}, 2)
    everywhere(2, save_numbered, config, order, tmp_path / "c")
    (tmp_path / "c" / "rank-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: the file is missing"):
        wrong_after_load(None, config_of(MODEL), order, tmp_path / "c")
    save_numbered(None, config_of(MODEL), order, tmp_path / "d")
    folder = tmp_path / "hf"
    with Workers(1, LEAST_BYTES) as workers:
        to_hf(tmp_path / "d", folder, workers, shard_bytes=2000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / index["weight_map"]["model.norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match=r"the file is missing; model\.safetensors\.index\.json names it"):
        open_folder(folder)


def test_moments_of_parameters_that_never_moved_are_saved_too() -> None:
    """BL-078: state that comes into being with the first step would be missing for what is frozen."""
    frozen = {**MODEL, "optimizer.groups": [{"match": "layers.0.*", "lr_scale": 0.0}]}
    assert names(config_of(frozen)) == names(config_of(MODEL))


def exported_from(context: Context | None, config: Config, folder: Path, target: Path) -> None:
    """Starts from a Hugging Face folder under a layout, and saves."""
    assembly = assembled(config, context)
    snapshots = Snapshots(assembly.optimizer, target.parent, {}, assembly.groups.world, None, "full")
    snapshots.start_from(Init(from_hf=str(folder)))
    save(target, state_boxes(assembly.optimizer, owned=True), header(config), assembly.groups.world)


def test_what_goes_in_and_out_under_any_layout_is_the_same_file(tmp_path: Path) -> None:
    """BL-152: layers off by two, and parts added up, when the importer knew the layout only half."""
    config = config_of(MODEL)
    save(tmp_path / "origin", state_boxes(assembled(config).optimizer, owned=True), header(config))
    with Workers(1, LEAST_BYTES) as workers:
        to_hf(tmp_path / "origin", tmp_path / "hf", workers)
        expected = (tmp_path / "hf" / "model.safetensors").read_bytes()
        for name, (world, layout) in LAYOUTS.items():
            under = config_of({**MODEL, **layout, "run.seed": 99}, world)
            everywhere(world, exported_from, under, tmp_path / "hf", tmp_path / name)
            to_hf(tmp_path / name, tmp_path / f"{name}-hf", workers)
            assert (tmp_path / f"{name}-hf" / "model.safetensors").read_bytes() == expected, name
        from_hf(tmp_path / "hf", tmp_path / "in", workers)
        to_hf(tmp_path / "in", tmp_path / "out", workers)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    values = whole([boxes(assembled(config), "masters")])
    assert max(np.abs(v).max() for v in values.values()) > 0


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def refuse(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


@pytest.mark.parametrize("path", ["meta-llama/Llama-3.1-8B", "no/such/folder", "https://example.org/model"])
def test_a_path_that_is_not_there_is_not_looked_for_elsewhere(
    path: str, tmp_path: Path, no_network: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """BL-188: taken for the name of a repository, downloaded, and run."""
    assert cli.main(["convert", "from-hf", path, str(tmp_path / "c")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert cli.main(["convert", "to-hf", path, str(tmp_path / "c")]) == 2
    assert no_network == []


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path) -> None:
    """BL-188: auto_map names a module beside the weights."""
    config = config_of(MODEL)
    save(tmp_path / "one", state_boxes(assembled(config).optimizer, owned=True), header(config))
    with Workers(1, LEAST_BYTES) as workers:
        to_hf(tmp_path / "one", tmp_path / "hf", workers)
        described = json.loads((tmp_path / "hf" / "config.json").read_text())
        described["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.Mine"}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
        (tmp_path / "hf" / "modeling_mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        from_hf(tmp_path / "hf", tmp_path / "in", workers)
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "in").rglob("*.py"))


DANGEROUS = {"eval", "exec", "torch.load", "torch.save", "os.system", "yaml.load", "pickle.load", "pickle.loads"}


def dangers(text: str) -> Iterator[str]:
    """Calls that run what they read, and shells, in a program's text."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        if (name := ast.unparse(node.func)) in DANGEROUS:
            yield f"{node.lineno}: {name}"
        for option in node.keywords:
            value = ast.unparse(option.value)
            if (option.arg, value) in (("shell", "True"), ("allow_pickle", "True"), ("trust_remote_code", "True")):
                yield f"{node.lineno}: {option.arg}=True"


def test_no_program_runs_what_it_reads() -> None:
    """BL-186, BL-189: in the package, and in the tools that only a test of the package would not see."""
    files = [path for part in ("src", "tools", "benchmarks", "docs") for path in sorted((ROOT / part).rglob("*.py"))]
    assert len(files) > 100
    found = [f"{path.relative_to(ROOT)}:{danger}" for path in files for danger in dangers(path.read_text())]
    # What we are measured beside, on files of its own.
    beside = re.compile(r"benchmarks/checkpoint\.py:\d+: torch\.(save|load)")
    assert [one for one in found if not beside.fullmatch(one)] == []
    assert len(list(dangers("eval(x)\nimport os\nos.system(x)\nrun(x, shell=True)\ntorch.load(f)"))) == 4
