"""`ultrascale checkpoint reshard`: what it writes is, byte for byte, what a run under the layout would have saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import header, state, whole_boxes

from pool import Context, pool
from small import assembled, config_of
from ultrascale import cli, reshard
from ultrascale.checkpoint import rewrite
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.manifest import MANIFEST, read_manifest
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.stored import stored_tensors
from ultrascale.checkpoint.workers import LEAST_BYTES, Workers
from ultrascale.checkpoint.write import save
from ultrascale.config.schema import Config

ROOT = Path(__file__).parents[2]
MODEL = {
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.vocab_size": 131,
    "model.num_hidden_layers": 4,
    "optimizer.name": "adamw",
    "precision.compute": "float32",
    "batch.global_size": 8,
}
TIED = {**MODEL, "model.tie_word_embeddings": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp4, heads replicated": {"tp": 4},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "dp2 zero1": {"dp": 2, "zero_stage": 1},
    "dp4 zero3": {"dp": 4, "zero_stage": 3},
    "dp4 zero2, two hosts": {"dp": 4, "zero_stage": 2, "dp_shard": 2},
    "dp2 tp2 zero2": {"dp": 2, "tp": 2, "zero_stage": 2},
    "pp2 dp2 zero1": {"pp": 2, "dp": 2, "zero_stage": 1},
    "pp2 tp2 interleaved": {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "cp2 zero1": {"cp": 2, "zero_stage": 1},
    "pp2 zb_v": {"pp": 2, "schedule": "zb_v"},
}


def world_of(layout: dict[str, Any]) -> int:
    return int(np.prod([layout.get(axis, 1) for axis in ("dp", "tp", "cp", "pp", "ep")]))


def config_under(layout: dict[str, Any], model: dict[str, Any]) -> Config:
    section = {"schedule": "pipeline", "virtual_stages": "pipeline"}
    keys = {f"{section.get(key, 'parallel')}.{key}": value for key, value in layout.items()}
    return config_of({**model, **keys}, world_of(layout))


def fill(config: Config, context: Context | None, source: Path | None) -> tuple[Any, Any]:
    """A rank's assembly, with a state in which no two elements are alike, or with that of a checkpoint."""
    assembly = assembled(config, context)
    assembly.optimizer.weights.settle()
    wanted = list(state_boxes(assembly.optimizer, owned=False))
    if source is not None:
        load(source, wanted)
    else:
        for number, box in enumerate(wanted):
            box.tensor.copy_(torch.arange(box.tensor.numel()).reshape(box.tensor.shape) + 1000 * number)
    return assembly, list(state_boxes(assembly.optimizer, owned=True))


def save_under(context: Context | None, config: Config, source: Path | None, target: Path) -> None:
    """A run's own save under its layout."""
    assembly, owned = fill(config, context, source)
    saved = {**header(3), "config": config.model_dump(mode="json"), "axes": dict(assembly.mesh.sizes)}
    save(target, owned, {**saved, "order": list(assembly.mesh.order)}, assembly.groups.world)


def saved_under(layout: dict[str, Any], model: dict[str, Any], source: Path | None, target: Path) -> Path:
    config, world = config_under(layout, model), world_of(layout)
    if world == 1:
        save_under(None, config, source, target)
    else:
        pool(world).run(save_under, config, source, target)
    return target


def resharded(source: Path, target: Path, layout: dict[str, Any], processes: int = 1) -> Path:
    with Workers(processes, processes * LEAST_BYTES) as workers:
        done = reshard.reshard(source, target, reshard.Layout(**{"schedule": "1f1b", **layout}), workers)
    assert done.verified
    return target


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The checkpoint of one process, of the model with and without tied embeddings."""
    root = tmp_path_factory.mktemp("origin")
    made = {tied: saved_under({}, TIED if tied else MODEL, None, root / str(tied)) for tied in (False, True)}
    return made.__getitem__


@pytest.fixture(scope="module")
def directly(origin: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tied model cut for a layout, from one process."""
    root = tmp_path_factory.mktemp("directly")
    return cache(lambda name: resharded(origin(True), root / str(list(LAYOUTS).index(name)), LAYOUTS[name]))


def same_files(a: Path, b: Path) -> None:
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for path in a.glob("*.safetensors"):
        assert path.read_bytes() == (b / path.name).read_bytes(), path.name
    one, two = read_manifest(a), read_manifest(b)
    assert one.files == two.files
    assert {n: (t.shape, t.dtype, set(t.shards)) for n, t in one.tensors.items()} == {
        n: (t.shape, t.dtype, set(t.shards)) for n, t in two.tensors.items()
    }
    for key in ("step", "axes", "order", "config"):
        assert one.header[key] == two.header[key], key


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_files_are_those_that_a_run_under_the_layout_saves(
    origin: Callable[[bool], Path], tmp_path: Path, name: str, tied: bool
) -> None:
    layout, source = LAYOUTS[name], origin(tied)
    expected = saved_under(layout, TIED if tied else MODEL, source, tmp_path / "saved")
    same_files(expected, resharded(source, tmp_path / "resharded", layout))
    # And back to one file.
    same_files(source, resharded(tmp_path / "resharded", tmp_path / "one", {}))


MIXTURE = {
    **MODEL,
    "model.family": "qwen3_moe",
    "model.num_hidden_layers": 2,
    "model.num_experts": 4,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 12,
    "model.router_bias_update_rate": 0.1,
    "precision.compute": "float32",
}


@pytest.mark.parametrize(
    "layout",
    [
        {"ep": 2, "tp": 2, "zero_stage": 1},
        {"dp": 2, "ep": 2, "zero_stage": 3},
        {"ep": 2, "cp": 2, "expert_axes": ("ep", "cp")},
        {"ep": 2, "tp": 2, "expert_axes": ("ep", "tp")},
        {"ep": 2, "tp": 2, "expert_tensor_axes": ()},
    ],
    ids=str,
)
def test_experts_and_biases_of_routers_are_cut_as_a_run_saves_them(tmp_path: Path, layout: dict[str, Any]) -> None:
    source = saved_under({}, MIXTURE, None, tmp_path / "one")
    expected = saved_under(layout, MIXTURE, source, tmp_path / "saved")
    assert "layers.1.moe.router.bias" in read_manifest(expected).tensors
    same_files(expected, resharded(source, tmp_path / "resharded", layout))
    as_it_was = {"expert_axes": ("ep",)} if "expert_axes" in layout or "expert_tensor_axes" in layout else {}
    same_files(source, resharded(tmp_path / "resharded", tmp_path / "back", as_it_was))


NAMES = list(LAYOUTS)
NEAR = [(a, NAMES[(place + step) % len(NAMES)]) for place, a in enumerate(NAMES) for step in (1, 2, 5, 7)]
REST = [(a, b) for a in NAMES for b in NAMES if a != b and (a, b) not in NEAR]


def test_enough_pairs_are_tried() -> None:
    assert len(set(NEAR)) >= 40
    assert len(NEAR) + len(REST) == len(NAMES) * (len(NAMES) - 1)


@pytest.mark.parametrize(("a", "b"), [*NEAR, *(pytest.param(*pair, marks=pytest.mark.prove) for pair in REST)])
def test_a_layout_reshards_into_another_without_a_detour(
    directly: Callable[[str], Path], tmp_path: Path, a: str, b: str
) -> None:
    same_files(directly(b), resharded(directly(a), tmp_path / "c", LAYOUTS[b]))


def test_a_schedule_stays_where_the_stages_do(directly: Callable[[str], Path], tmp_path: Path) -> None:
    source = directly("pp2 zb_v")
    same_files(source, resharded(source, tmp_path / "a", {"pp": 2, "schedule": None}))
    target = resharded(source, tmp_path / "b", {"pp": 4, "schedule": None})
    assert read_manifest(target).header["config"]["pipeline"]["schedule"] == "1f1b"


def test_several_processes_write_the_same_files(origin: Callable[[bool], Path], tmp_path: Path) -> None:
    layout = LAYOUTS["dp2 tp2 zero2"]
    alone = resharded(origin(False), tmp_path / "alone", layout)
    same_files(alone, resharded(origin(False), tmp_path / "together", layout, processes=2))


def test_tensors_that_no_layer_knows_and_the_header_go_along(tmp_path: Path, origin: Callable[[bool], Path]) -> None:
    config = config_under({}, MODEL)
    _, owned = fill(config, None, origin(False))
    own = {**header(3), "config": config.model_dump(mode="json"), "mine": {"loss_scale": 1024.0}}
    save(tmp_path / "a", [*owned, *whole_boxes({"router.counts": torch.arange(9)})], own)
    target = resharded(tmp_path / "a", tmp_path / "b", {"tp": 2})
    manifest = read_manifest(target)
    assert manifest.header["mine"] == {"loss_scale": 1024.0}
    assert [shard.file for shard in manifest.tensors["router.counts"].shards] == ["rank-00000.safetensors"]


MEMORY = """
import os, resource, sys
from ultrascale.cli import main
arguments = sys.argv[1:]
import torch, ultrascale.reshard

def high_water():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024

before = high_water()
assert main(arguments) == 0
print(high_water() - before, file=sys.stderr)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
def test_memory_stays_within_the_bound_however_large_a_tensor_is(tmp_path: Path) -> None:
    """One tensor of 64 MiB, among others, in 8 MiB of buffers; what Python and the manifest take is measured too."""
    large = torch.arange(16 << 20, dtype=torch.int32).view(torch.float32).reshape(1 << 10, 1 << 14)
    tensors = {"large.weight": large, "optimizer.exp_avg/large.weight": large.t().contiguous(), **state()}
    save(tmp_path / "a", whole_boxes(tensors), {**header(3), "config": config_of(MODEL).model_dump(mode="json")})
    total = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    words = ["checkpoint", "reshard", tmp_path / "a", tmp_path / "b", "--consolidated", "--memory", str(LEAST_BYTES)]
    answer = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, words), "--json"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    used = int(answer.stderr.splitlines()[-1])
    assert total > 128 << 20
    assert used < 2 * LEAST_BYTES
    assert json.loads(answer.stdout)["verified"]


def test_a_layout_that_the_model_does_not_fit_is_refused_and_nothing_is_left(
    origin: Callable[[bool], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, named in (
        (["--tp", "3"], "parallel.tp=3 does not divide model.num_attention_heads=4"),
        (["--pp", "8"], "parallel.pp=8"),
        (["--dp", "4", "--dp-shard", "3", "--zero-stage", "1"], "parallel.dp_shard=3 does not divide"),
        (["--schedule", "no_such"], "no_such"),
        (["--consolidated", "--tp", "2"], "--consolidated is one file"),
        (["--memory", "1MB"], "--memory 1000000 is too little"),
        (["--processes", "0"], "--processes 0: use 1 or more"),
    ):
        code = cli.main(["checkpoint", "reshard", str(origin(False)), str(tmp_path / "c"), *words])
        assert code == 2, words
        assert named in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "reshard", str(origin(False)), str(tmp_path / "c"), "--expert-axes", "ep,xp"])
    assert "xp: the axes are dp, tp, cp, pp, ep" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert cli.main(["checkpoint", "reshard", str(origin(False)), str(tmp_path / "there")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_damaged_source_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    source = saved_under({}, MODEL, None, tmp_path / "a")
    file = source / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: checksum of tensor"):
        resharded(source, tmp_path / "b", {"tp": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_comes_out_otherwise_than_it_was_read_is_not_kept(
    tmp_path: Path, origin: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two halves swapped, with checksums of their own that match: only a comparison of values sees it."""
    original = rewrite.write_piece

    def swapped(path: str, start: int, tensor: Any, piece: Any, block: int) -> str:
        if piece.name == "layers.1.mlp.up_proj.weight":
            offset = (piece.shape[0] - piece.offset[0], *piece.offset[1:])
            tensor = stored_tensors(origin(False), read_manifest(origin(False)))[piece.name]
            piece = rewrite.Piece(piece.key, piece.name, offset, piece.shape, piece.form, piece.dtype)
        return original(path, start, tensor, piece, block)

    monkeypatch.setattr(rewrite, "write_piece", swapped)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight came out otherwise"):
        resharded(origin(False), tmp_path / "b", {"tp": 2})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, origin: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rewrite, "write_piece", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        resharded(origin(False), tmp_path / "b", {"tp": 2})
    assert list(tmp_path.iterdir()) == []


def test_the_tool_is_the_command(origin: Callable[[bool], Path], tmp_path: Path) -> None:
    words = [str(origin(False)), str(tmp_path / "b"), "--dp", "2", "--tp", "2", "--zero-stage", "1", "--json"]
    answer = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reshard.py"), *words], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout)
    assert said["axes"] == {"dp": 2, "tp": 2, "cp": 1, "pp": 1, "ep": 1}
    assert (tmp_path / "b" / MANIFEST).exists()
    same_files(resharded(origin(False), tmp_path / "c", {"dp": 2, "tp": 2, "zero_stage": 1}), tmp_path / "b")
