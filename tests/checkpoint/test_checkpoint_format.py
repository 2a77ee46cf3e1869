"""The page about the format says enough to read a checkpoint, with json, hashlib and numpy alone."""

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from checkpoint_cases import HEADER, ThreadWorld, boxes_of, cut, header, state, whole_boxes

from ultrascale.checkpoint.manifest import DTYPES, HEADER_KEYS, MANIFEST, OWN_KEYS, read_manifest
from ultrascale.checkpoint.write import save

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoint_format.md").read_text()


@pytest.fixture(scope="module")
def reader():
    """The program of the page."""
    block = re.search(r"^```python file=read_checkpoint.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert block
    module = ModuleType("read_checkpoint")
    exec(compile(block[1], "read_checkpoint.py", "exec"), module.__dict__)
    used = {name.split(".")[0] for name in re.findall(r"^(?:import|from) (\S+)", block[1], re.MULTILINE)}
    assert used - {"numpy"} <= sys.stdlib_module_names
    return module


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_of_every_dtype_and_cut_is_read_as_it_was_written(tmp_path, reader, monkeypatch):
    tensors = state() | {
        f"of {name}": torch.arange(12).reshape(3, 4).to(getattr(torch, name)) for name in DTYPES if name != "bool"
    }
    tensors["of bool"] = torch.tensor([True, False, True])
    random = np.random.default_rng(5)
    ranks = [[], [], []]
    for name, tensor in tensors.items():
        for box in boxes_of(name, tensor, cut(tuple(tensor.shape), 5, random)):
            ranks[int(random.integers(3))].append(box)
    ThreadWorld(3, monkeypatch).save(tmp_path / "c", ranks)
    manifest, found = reader.read(tmp_path / "c")
    assert manifest["step"] == HEADER["step"]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape), name
        assert found[name].tobytes() == bits(tensor), name


def test_it_refuses_each_of_100_flipped_bits_a_cut_file_and_a_path_that_leaves_the_folder(tmp_path, reader):
    save(tmp_path / "c", whole_boxes(state()), header(3))
    random = np.random.default_rng(1)
    paths = sorted((tmp_path / "c").iterdir())
    for _ in range(100):
        path = paths[int(random.integers(len(paths)))]
        data = path.read_bytes()
        changed = bytearray(data)
        changed[int(random.integers(len(data)))] ^= 1 << int(random.integers(8))
        path.write_bytes(changed)
        with pytest.raises(Exception):  # noqa: B017 - whatever it is, it is not loaded
            reader.read(tmp_path / "c")
        path.write_bytes(data)
    reader.read(tmp_path / "c")

    manifest = tmp_path / "c" / MANIFEST
    rest = manifest.read_bytes().partition(b"\n")[2].replace(b"rank-00000", b"../c/rank-00000")
    manifest.write_bytes(f'{{"checksum": "{reader.sha(rest)}",\n'.encode() + rest)
    with pytest.raises(ValueError, match="leaves the folder"):
        reader.read(tmp_path / "c")


def test_the_page_names_every_key_and_every_dtype(tmp_path):
    save(tmp_path / "c", whole_boxes(state()), header(3))
    keys = {*HEADER_KEYS, *OWN_KEYS, *read_manifest(tmp_path / "c").header}
    assert [word for word in (*sorted(keys), *DTYPES) if f"`{word}`" not in PAGE and f'"{word}"' not in PAGE] == []
