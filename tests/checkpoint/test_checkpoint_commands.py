"""`ultrascale checkpoint inspect | check | diff | prune`: what they say is what numpy says, and nothing needs torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import HEADER, boxes_of, cut, header, state, whole_boxes
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale import cli
from ultrascale.checkpoint import scan, stored
from ultrascale.checkpoint.boxes import intersection
from ultrascale.checkpoint.folder import folder_name
from ultrascale.checkpoint.manifest import read_manifest
from ultrascale.checkpoint.stored import Place, Places, Reader, StoredTensor, stored_tensors
from ultrascale.checkpoint.write import save


def finite(seed: int = 0) -> dict[str, torch.Tensor]:
    tensors = state(seed)
    tensors["embedding.weight"].nan_to_num_(0.5, 0.5, 0.5)
    return tensors


def save_step(root: Path, step: int, tensors: dict[str, torch.Tensor] | None = None, pieces: int = 1) -> Path:
    """A checkpoint whose tensors are cut into so many boxes, at random."""
    random = np.random.default_rng(step)
    tensors = finite() if tensors is None else tensors
    boxes = [b for n, t in tensors.items() for b in boxes_of(n, t, cut(tuple(t.shape), pieces, random))]
    save(root / folder_name(step), boxes, header(step))
    return root / folder_name(step)


def run(capsys, *words) -> tuple[int, str]:
    code = cli.main(["checkpoint", *map(str, words)])
    return code, capsys.readouterr().out


def run_json(capsys, *words):
    code, out = run(capsys, *words, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize("short_run", [1, 40, 1 << 20], ids=["each run by itself", "some together", "all together"])
def test_any_box_of_any_cut_is_read_as_it_was_written(tmp_path, monkeypatch, short_run):
    monkeypatch.setattr(stored, "SHORT_RUN", short_run)
    monkeypatch.setattr(stored, "SCRATCH_BYTES", 128)
    tensors, random = state(), np.random.default_rng(0)
    for pieces in (1, 5):
        folder = save_step(tmp_path, pieces, tensors, pieces)
        found = stored_tensors(folder, read_manifest(folder))
        with Reader() as reader:
            for name, tensor in tensors.items():
                bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                whole = bits.view(f"u{tensor.element_size()}").reshape(tensor.shape)
                for offset, shape in cut(tuple(tensor.shape), 6, random):
                    box = reader.box(found[name], offset, shape)
                    np.testing.assert_array_equal(box, whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))])


def test_norms_are_those_of_the_values_and_do_not_depend_on_the_cut(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scan, "BLOCK_BYTES", 64)
    tensors = finite()
    found = []
    for pieces in (1, 4):
        code, said = run_json(capsys, "inspect", save_step(tmp_path, pieces, tensors, pieces), "--norms")
        assert code == 0
        found.append({row["name"]: row for row in said["tensors"]})
        assert said["bytes"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for name, tensor in tensors.items():
        rows = [rows[name] for rows in found]
        assert [row["shape"] for row in rows] == [list(tensor.shape)] * 2
        if tensor.is_floating_point():
            for row in rows:
                assert row["norm"] == pytest.approx(tensor.double().norm().item(), rel=1e-12)
                assert row["largest"] == tensor.double().abs().max().item()
    assert found[1]["experts.weight"]["shards"] == 4


def test_inspect_tells_the_layout_and_puts_layers_that_are_alike_on_one_line(tmp_path, capsys):
    names = [f"layers.{n}.mlp.weight" for n in range(12)]
    tensors = {name: torch.ones(2, 3) for name in names} | {"layers.12.mlp.weight": torch.ones(2, 4)}
    layout = {"axes": {"dp": 2, "tp": 4, "pp": 1}, "config": {"parallel": {"zero_stage": 1}}}
    save(tmp_path / "c", whole_boxes(tensors), {**HEADER, **layout})
    code, out = run(capsys, "inspect", tmp_path / "c")
    assert code == 0
    assert "saved under dp=2 tp=4 zero_stage=1" in out
    assert "layers.0 … 11" in out
    assert "layers.12 " in out
    assert out.count("mlp.weight") == 2
    assert run(capsys, "inspect", tmp_path / "c", "--all")[1].count("mlp.weight") == 13


def test_check_names_every_damaged_shard_and_every_value_that_is_not_finite(tmp_path, capsys):
    whole, damaged = save_step(tmp_path, 1), save_step(tmp_path, 2)
    assert run_json(capsys, "check", whole)[0] == 0
    data = bytearray((damaged / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (damaged / "rank-00000.safetensors").write_bytes(data)
    (damaged / "notes.txt").write_text("mine")
    bad = save_step(tmp_path, 3, state())  # two values of its embedding are not finite
    torn = save_step(tmp_path, 4)
    (torn / "rank-00000.safetensors").unlink()
    code, results = run_json(capsys, "check", tmp_path)
    assert code == 1
    assert [one["whole"] for one in results] == [False, False, False, True]
    problems = [" ".join(one["problems"]) for one in results]
    assert "rank-00000.safetensors: the file cannot be read" in problems[0]
    assert "embedding.weight: 2 values are not finite, the first at [0, 0]" in problems[1]
    assert "checksum of tensor head.weight" in problems[2]
    assert results[2]["notices"] == [f"{damaged / 'notes.txt'}: not part of the checkpoint"]
    assert run_json(capsys, "check", bad)[0] == 1


def test_check_of_a_folder_without_checkpoints_is_not_whole_and_of_no_folder_is_a_mistake(tmp_path, capsys):
    assert run(capsys, "check", tmp_path)[0] == 1
    assert run(capsys, "check", tmp_path / "nothing")[0] == 2
    for words in (["inspect", tmp_path], ["diff", tmp_path, tmp_path], ["prune", tmp_path, "--keep", 1]):
        code, said = run_json(capsys, *words)
        assert code == 2
        assert str(tmp_path) in said["error"]


def test_the_same_values_under_another_cut_are_equal_and_one_bit_is_a_difference(tmp_path, capsys):
    a, b = (save_step(tmp_path, pieces, state(), pieces) for pieces in (1, 5))
    code, said = run_json(capsys, "diff", a, b)
    assert (code, said["differences"], said["tensors"]) == (0, [], 6)
    changed = state()
    changed["embedding.weight"][1, 1] = 0.0  # it was -0.0
    changed["experts.weight"][2, 1, 3] *= 1.5
    expected = (changed["experts.weight"] - state()["experts.weight"]).abs().max() / changed[
        "experts.weight"
    ].abs().max()
    code, said = run_json(capsys, "diff", a, save_step(tmp_path, 7, changed, 3))
    assert code == 1
    signed, scaled = said["differences"]
    assert (signed["name"], signed["relative"], signed["elements"]) == ("embedding.weight", 0.0, 1)
    assert scaled["relative"] == pytest.approx(expected.item(), rel=1e-12)
    assert run(capsys, "diff", a, tmp_path / folder_name(7), "--tolerance", 1)[0] == 0
    assert run(capsys, "diff", a, tmp_path / folder_name(7), "--tolerance", expected.item() / 2)[0] == 1


def test_tensors_of_one_side_other_shapes_and_other_dtypes_are_named(tmp_path, capsys):
    a = save_step(tmp_path, 1)
    other = finite()
    other["head.weight"] = other["head.weight"].float()
    other["router.tokens"] = other["router.tokens"][:5]
    other["new.weight"] = other.pop("scale")
    del other["optimizer.exp_avg/embedding.weight"]
    b = save_step(tmp_path, 2, other)
    code, said = run_json(capsys, "diff", a, b)
    assert code == 1
    assert {row["name"]: row["what"] for row in said["differences"]} == {
        "scale": "only in A",
        "new.weight": "only in B",
        "optimizer.exp_avg/embedding.weight": "only in A",
        "head.weight": "dtype bfloat16 in A, float32 in B",
        "router.tokens": "shape [9] in A, [5] in B",
    }
    text = run(capsys, "diff", a, b, "--parameters")[1]
    assert "exp_avg" not in text
    assert "head.weight: dtype bfloat16 in A, float32 in B; largest relative difference 0" in text


def test_a_value_that_is_finite_on_one_side_only_is_an_infinite_difference(tmp_path, capsys):
    a = save_step(tmp_path, 1)
    code, said = run_json(capsys, "diff", a, save_step(tmp_path, 2, state()))
    (row,) = said["differences"]
    assert code == 1
    assert (row["name"], row["relative"]) == ("embedding.weight", None)
    assert run(capsys, "diff", a, tmp_path / folder_name(2), "--tolerance", 1e9)[0] == 1


def test_prune_removes_nothing_unless_told_and_never_the_only_whole_one(tmp_path, capsys):
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        save_step(root, step)
    (root / folder_name(3) / "manifest.json").unlink()
    code, said = run_json(capsys, "prune", tmp_path, "--keep", 1)
    assert (code, [Path(path).name for path in said["would_remove"]]) == (0, [folder_name(1)])
    assert [Path(path).name for path in said["not_whole"]] == [folder_name(3)]
    assert len(list(root.iterdir())) == 3
    code, said = run_json(capsys, "prune", tmp_path, "--keep", 1, "--yes")
    assert (code, [Path(path).name for path in said["removed"]]) == (0, [folder_name(1)])
    assert run(capsys, "prune", root, "--keep", 1, "--yes")[0] == 0
    assert sorted(path.name for path in root.iterdir()) == ["latest", folder_name(2), folder_name(3)]
    assert (root / "latest").read_text().strip() == folder_name(2)
    assert run(capsys, "prune", root, "--keep", 0, "--yes")[0] == 2
    shutil.rmtree(root / folder_name(2))
    assert run(capsys, "prune", root, "--keep", 1, "--yes")[1].startswith("notice: ")


def test_prune_leaves_those_of_every_so_many_steps(tmp_path, capsys):
    for step in (1, 2, 3, 4, 5):
        save_step(tmp_path, step)
    code, said = run_json(capsys, "prune", tmp_path, "--keep", 1, "--keep-every", 2)
    assert (code, [Path(path).name for path in said["would_remove"]]) == (0, [folder_name(1), folder_name(3)])
    assert [Path(path).name for path in said["kept"]] == [folder_name(5), folder_name(4), folder_name(2)]
    assert run(capsys, "prune", tmp_path, "--keep", 1, "--keep-every", 2, "--yes")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *map(folder_name, (2, 4, 5))]
    assert run(capsys, "prune", tmp_path, "--keep", 1, "--keep-every", 0)[0] == 2


def test_fetch_brings_the_newest_whole_one_or_the_one_that_is_named_and_replaces_none(tmp_path, capsys):
    for step in (1, 2, 3):
        save_step(tmp_path / "there", step)
    (tmp_path / "there" / folder_name(3) / "manifest.json").unlink()
    url, here = f"file://{tmp_path / 'there'}", tmp_path / "here"
    code, said = run_json(capsys, "fetch", url, here)
    assert (code, said) == (0, {"path": str(here / folder_name(2)), "step": 2})
    assert run(capsys, "fetch", f"{url}/{folder_name(1)}", here)[0] == 0
    assert run(capsys, "check", here / folder_name(1))[0] == run(capsys, "check", here / folder_name(2))[0] == 0
    assert run(capsys, "fetch", url, here)[0] == 2
    assert run(capsys, "fetch", f"{url}/{folder_name(3)}", here)[0] == 2
    assert run(capsys, "fetch", f"file://{tmp_path / 'nothing'}", here)[0] == 2


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_numbers_of_narrow_formats_are_those_of_torch(dtype):
    from ultrascale.checkpoint.values import numbers

    wide = getattr(torch, dtype).itemsize
    bits = np.arange(256**wide, dtype=f"u{wide}")
    expected = torch.from_numpy(bits.copy()).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(numbers(bits, dtype), expected)


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_are_changed_as_torch_changes_them(source, target):
    from ultrascale.checkpoint.values import convert, exact

    random = np.random.default_rng(5)
    width = getattr(torch, source).itemsize
    bits = random.integers(0, 256, (40_000, width), dtype=np.uint8).view(f"u{width}").reshape(-1)
    values = torch.from_numpy(bits.copy()).view(getattr(torch, source))
    wanted = values.to(getattr(torch, target))
    raw = convert(bits, source, target)
    found = torch.from_numpy(raw.copy()).view(getattr(torch, target))
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found.nan_to_num(1.0), wanted.nan_to_num(1.0))
    if exact(source, target):
        np.testing.assert_array_equal(convert(raw, target, source)[~values.isnan()], bits[~values.isnan()])


def test_float64_is_rounded_to_bfloat16_once():
    """1 + 2⁻⁸ is a tie of bfloat16: a little above it must go up, though float32 cannot tell the two apart."""
    from ultrascale.checkpoint.values import convert, numbers

    values = np.array([1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 2**-8 - 2**-40, -1 - 2**-8 - 2**-40, 2.0**-140 + 2.0**-200])
    bits = convert(values.view(np.uint64), "float64", "bfloat16")
    np.testing.assert_array_equal(numbers(bits, "bfloat16"), np.array([1 + 2**-7, 1, 1, -1 - 2**-7, 0], np.float32))


COMMANDS = ("inspect", "check", "diff", "prune", "fetch")


def test_commands_answer_without_torch(tmp_path):
    folder = save_step(tmp_path, 1)
    program = "import sys; from ultrascale.cli import main; sys.exit(main(sys.argv[1:]) + 7 * ('torch' in sys.modules))"
    for words in (["inspect", folder, "--norms"], ["check", folder], ["diff", folder, folder]):
        answer = subprocess.run([sys.executable, "-c", program, "checkpoint", *words], capture_output=True, check=False)
        assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.partition("example:\n  ")[2].startswith(f"ultrascale checkpoint {name} ")


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple),
    pieces=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_the_places_that_a_box_touches_are_those_that_share_an_element_with_it(shape, pieces, seed):
    random = np.random.default_rng(seed)
    places = tuple(Place(Path("f"), "k", 0, offset, size, None) for offset, size in cut(shape, pieces, random))
    tensor = StoredTensor(shape, "float32", places)
    for offset, size in cut(shape, 5, random):
        expected = {p for p in places if intersection(p.offset, p.shape, offset, size)}
        assert set(Places(tensor).touching(offset, size).places) == expected
