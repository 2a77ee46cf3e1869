"""A checkpoint that is not what was written is refused, and the refusal names the file and what is wrong with
it."""

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import HEADER, boxes_of, cut, empty_like, header, same_bits, state, whole_boxes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultrascale.checkpoint import read
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import latest
from ultrascale.checkpoint.manifest import MANIFEST, decode, digest
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.write import save

FILE = "rank-00000.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    boxes = [b for n, t in state().items() for b in boxes_of(n, t, cut(tuple(t.shape), 3, random))]
    save(tmp_path / "step-00000007", boxes, HEADER)
    return tmp_path / "step-00000007"


def load_all(folder: Path, verify: str = "full") -> dict[str, torch.Tensor]:
    loaded = empty_like(state())
    load(folder, whole_boxes(loaded), verify, claimed=list(loaded))
    return loaded


def forge(folder: Path, edit) -> None:
    """Edits the manifest and gives it a right checksum again, as an enemy would."""
    parsed = json.loads((folder / MANIFEST).read_bytes())
    edit(parsed)
    parsed.pop("checksum", None)
    rest = json.dumps(parsed)[1:].encode()
    (folder / MANIFEST).write_bytes(f'{{"checksum": "{digest(rest)}",\n'.encode() + rest)


def test_each_of_400_random_bit_flips_in_any_file_is_refused(saved):
    random = np.random.default_rng(0)
    files = sorted(saved.iterdir())
    sizes = [p.stat().st_size for p in files]
    silent = []
    for _ in range(400):
        # The file first, so that data, headers and manifest all get their share whatever their sizes.
        path = files[random.integers(len(files))]
        where, bit = int(random.integers(sizes[files.index(path)])), int(random.integers(8))
        with open(path, "r+b") as file:
            file.seek(where)
            before = file.read(1)
            file.seek(where)
            file.write(bytes([before[0] ^ 1 << bit]))
        try:
            load_all(saved)
            text = "loaded"
        except CheckpointError as error:
            text = str(error)
        if path.name not in text:
            silent.append((path.name, where, bit, text))
        with open(path, "r+b") as file:
            file.seek(where)
            file.write(before)
    assert silent == []
    load_all(saved)


def test_a_flip_in_the_data_names_the_file_and_the_tensor_and_only_the_ranks_that_touch_it_care(saved):
    path = saved / FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # the smallest elements lie last: bfloat16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{FILE}: checksum of tensor head\.weight"):
        load_all(saved)
    load(saved, whole_boxes({"scale": torch.zeros((), dtype=torch.float64)}))
    load_all(saved, "off")


def test_sampled_verification_looks_at_every_file_and_off_at_no_data(saved, monkeypatch):
    hashed = []
    monkeypatch.setattr(read, "_verify", lambda place, name, checksum: hashed.append(place.key))
    counts = {}
    for verify in ("full", "sampled", "off"):
        hashed.clear()
        load_all(saved, verify)
        counts[verify] = len(hashed)
    assert counts["off"] == 0 < counts["sampled"] < counts["full"]
    assert counts["full"] == len(read.open_manifest(saved).tensors["embedding.weight"].shards) * 5 + 1
    with pytest.raises(CheckpointError, match=r"checkpoint\.verify=some: one of full, sampled, off"):
        load_all(saved, "some")


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_truncated_file_is_refused_by_name_and_never_the_latest(saved, name, length):
    path = saved / name
    os.truncate(path, length % path.stat().st_size)
    with pytest.raises(CheckpointError, match=name):
        load_all(saved, "off")
    assert latest(saved.parent) is None


@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_missing_file_is_refused_by_name_and_never_the_latest(saved, name):
    (saved / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_all(saved, "off")
    assert latest(saved.parent) is None


def test_a_file_swapped_with_that_of_another_step_is_refused_by_name(saved):
    other = saved.parent / "step-00000008"
    save(other, whole_boxes(state(seed=1)), header(8))
    first = saved.parent / "step-00000006"
    save(first, whole_boxes(state(seed=2)), header(6))
    # Same names, same form, same sizes, same header: only the values tell them apart.
    shutil.copy(other / FILE, first / FILE)
    with pytest.raises(CheckpointError, match=rf"step-00000006/{FILE}: checksum of tensor"):
        load_all(first)
    shutil.copy(saved / FILE, other / FILE)
    with pytest.raises(CheckpointError, match=f"step-00000008/{FILE}"):
        load_all(other, "off")


def test_two_files_swapped_with_each_other_are_refused_by_name(tmp_path):
    folder = tmp_path / "c"
    save(folder, whole_boxes({"a": torch.zeros(4)}), HEADER)
    shutil.copy(folder / FILE, folder / "rank-00001.safetensors")
    (tmp_path / "d").mkdir()
    save(tmp_path / "e", whole_boxes({"b": torch.ones(4)}), HEADER)
    shutil.copy(tmp_path / "e" / FILE, folder / FILE)  # same size, another header
    with pytest.raises(CheckpointError, match=rf"{FILE}: the header is not the one that was written"):
        load(folder, whole_boxes({"a": torch.zeros(4)}), "off")


def test_an_edited_manifest_is_refused_even_where_the_edit_is_sound(saved):
    text = (saved / MANIFEST).read_text()
    (saved / MANIFEST).write_text(text.replace('"hidden_size": 8', '"hidden_size": 9'))
    with pytest.raises(CheckpointError, match=r"manifest\.json: .*own checksum"):
        load_all(saved)


def shard(parsed, name="embedding.weight", i=0):
    return parsed["tensors"][name]["shards"][i]


HOSTILE = {
    "a path out of the folder": (
        lambda m: shard(m).update(file="../x.safetensors"),
        r"embedding\.weight.*\.\./x",
    ),
    "an absolute path": (
        lambda m: shard(m).update(file="/etc/x.safetensors"),
        "embedding.*'/etc/x.safetensors'",
    ),
    "a path in the list of files": (
        lambda m: m["files"].update({"../x.safetensors": m["files"][FILE]}),
        r"\.\./x",
    ),
    "a file that is not listed": (
        lambda m: shard(m).update(file="y.safetensors"),
        r"y\.safetensors is not in the list",
    ),
    "a file that holds nothing": (
        lambda m: m["files"].update({"y.safetensors": m["files"][FILE]}),
        r"y\.safetensors holds no tensor",
    ),
    "a huge shape": (lambda m: m["tensors"]["scale"].update(shape=[2**40, 2**40]), "scale.*shape"),
    "a huge number": (lambda m: m["tensors"]["scale"].update(shape=[10**30]), "scale.*not a size"),
    "too many dims": (lambda m: m["tensors"]["scale"].update(shape=[1] * 40), "scale.*shape"),
    "a shape of another size": (lambda m: m["tensors"]["scale"].update(shape=[2]), "scale.*shard"),
    "a negative offset": (lambda m: shard(m).update(offset=[-1, 0]), "embedding.*not a size"),
    "a float for a size": (lambda m: shard(m).update(shape=[1.0, 2]), "embedding.*not a size"),
    "true for a size": (lambda m: shard(m).update(offset=[True, 0]), "embedding.*not a size"),
    "a missing box": (lambda m: m["tensors"]["embedding.weight"]["shards"].pop(), "embedding.*by no shard"),
    "a box stored twice": (
        lambda m: m["tensors"]["embedding.weight"]["shards"].append(shard(m)),
        "embedding.*by more than one shard",
    ),
    "boxes that overlap": (
        lambda m: shard(m, i=1).update(offset=shard(m)["offset"]),
        "embedding.*by (2|no) shard",
    ),
    "no boxes": (lambda m: m["tensors"]["embedding.weight"].update(shards=[]), "embedding.*by no shard"),
    "an unknown dtype": (lambda m: m["tensors"]["scale"].update(dtype="object"), "scale.*dtype 'object'"),
    "another dtype of the same width": (
        lambda m: m["tensors"]["scale"].update(dtype="int64"),
        "scale.*int64",
    ),
    "another key": (lambda m: shard(m).update(key="scale2"), "key 'scale2' of tensor embedding"),
    "the header as a key": (lambda m: shard(m).update(key="__metadata__"), "__metadata__"),
    "no checksum of a shard": (lambda m: shard(m).update(checksum=""), "embedding.*checksum"),
    "a key too many": (lambda m: shard(m).update(code="import os"), "embedding.*keys"),
    "another schema": (lambda m: m.update(schema_version=2), "schema_version 2 is not known"),
    "no step": (lambda m: m.pop("step"), "step"),
    "a step that is no number": (lambda m: m.update(step="7"), "step='7'"),
    "no tensors": (lambda m: m.pop("tensors"), "tensors"),
    "a list for a manifest": (lambda m: m.update(tensors=[]), "tensors.*not a dict"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_with_a_right_checksum_is_refused_by_name(saved, case):
    edit, named = HOSTILE[case]
    forge(saved, edit)
    with pytest.raises(CheckpointError, match=named):
        load_all(saved)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "not valid JSON"),
        (b"{}", "schema_version None"),
        (b"[]", "not a dict"),
        (b"null", "not a dict"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' stands twice"),
        (b'{"step": NaN}', "NaN is not JSON"),
        (b"9" * 10_000, "not valid JSON"),
    ],
    ids=range(9),
)
def test_what_is_no_manifest_at_all_is_refused_without_a_crash(text, named):
    with pytest.raises(CheckpointError, match=named):
        decode(text)


@pytest.mark.parametrize("offsets", [[-8, 0], [0, 16], [8, 0], [1 << 62, (1 << 62) + 8], ["0", None], [0], 8])
def test_a_hostile_header_that_the_manifest_vouches_for_cannot_reach_outside_its_file(tmp_path, offsets):
    folder = tmp_path / "c"
    save(folder, whole_boxes({"scale": torch.ones((), dtype=torch.float64)}), HEADER)
    text = json.dumps({"scale": {"dtype": "F64", "shape": [], "data_offsets": offsets}}).encode()
    head = len(text).to_bytes(8, "little") + text
    (folder / FILE).write_bytes(head + bytes(8))
    forge(folder, lambda m: m["files"].update({FILE: {"bytes": len(head) + 8, "header": digest(head)}}))
    with pytest.raises(CheckpointError, match=rf"{FILE}: key 'scale' of tensor scale"):
        load(folder, whole_boxes({"scale": torch.zeros((), dtype=torch.float64)}), "off")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_in_a_forged_manifest_loads_the_same_state_or_is_refused(saved, data):
    original = (saved / MANIFEST).read_bytes()
    parsed = json.loads(original)

    def edit(manifest):
        node = manifest[data.draw(st.sampled_from(["files", "tensors", "schema_version", "step"]))]
        parent, key = manifest, None
        node = manifest
        while isinstance(node, (dict, list)) and node and (key is None or data.draw(st.integers(0, 5))):
            parent = node
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            node = parent[key]
        parent[key] = data.draw(JSON)

    manifest = copy.deepcopy(parsed)
    edit(manifest)
    try:
        forge(saved, lambda m: (m.clear(), m.update(manifest)))
        loaded = load_all(saved)
    except CheckpointError:
        pass
    else:
        assert all(same_bits(loaded[n], t) for n, t in state().items())
    finally:
        (saved / MANIFEST).write_bytes(original)
