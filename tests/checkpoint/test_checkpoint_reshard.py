"""What one layout wrote, any other reads, bit for bit; and what does not fit is named."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import (
    HEADER,
    ThreadWorld,
    boxes_of,
    cut,
    empty_like,
    header,
    same_bits,
    state,
    whole_boxes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ultrascale.checkpoint import read
from ultrascale.checkpoint.boxes import Box, CheckpointError, slices, untiled
from ultrascale.checkpoint.manifest import read_manifest
from ultrascale.checkpoint.read import load, open_manifest, unclaimed
from ultrascale.checkpoint.write import save

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float16, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    pieces=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    seed=st.integers(0, 2**32),
    verify=st.sampled_from(["full", "sampled", "off"]),
)
def test_any_cut_loads_under_any_other_cut_bit_for_bit(shapes, dtype, pieces, seed, verify):
    random = np.random.default_rng(seed)
    tensors = {
        f"t{i}": torch.from_numpy(random.integers(0, 2, (*s, 8), dtype=np.uint8)).bool().any(-1)
        if dtype == torch.bool
        else torch.from_numpy(random.integers(0, 256, (*s, dtype.itemsize), dtype=np.uint8)).view(dtype).reshape(s)
        for i, s in enumerate(shapes)
    }
    stored = [b for n, t in tensors.items() for b in boxes_of(n, t, cut(tuple(t.shape), pieces[0], random))]
    loaded = empty_like(tensors)
    wanted = [b for n, t in loaded.items() for b in boxes_of(n, t, cut(tuple(t.shape), pieces[1], random))]
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "c", stored, HEADER)
        load(Path(folder) / "c", wanted, verify, claimed=list(tensors))
    for name, tensor in tensors.items():
        assert same_bits(loaded[name], tensor), f"{name} of shape {list(tensor.shape)} {dtype}"


def test_nothing_but_the_wanted_box_is_touched(tmp_path):
    tensors = state()
    save(tmp_path / "c", whole_boxes(tensors), HEADER)
    frame = torch.full((12, 8), 77.0)
    load(tmp_path / "c", [Box("embedding.weight", (12, 8), (3, 2), frame[3:7, 2:5])])
    expected = torch.full((12, 8), 77.0)
    expected[3:7, 2:5] = tensors["embedding.weight"][3:7, 2:5]
    assert same_bits(frame, expected)


def test_a_rank_reads_only_the_files_and_hashes_only_the_shards_that_it_needs(tmp_path, monkeypatch):
    whole = torch.randn(8, 4)
    ranks = [[box] for box in boxes_of("w", whole, [((0, 0), (4, 4)), ((4, 0), (4, 4))])]
    ThreadWorld(2, monkeypatch).save(tmp_path / "c", ranks)
    (tmp_path / "c" / "rank-00001.safetensors").unlink()
    mine = torch.zeros(4, 4)
    load(tmp_path / "c", [Box("w", (8, 4), (0, 0), mine)])
    assert same_bits(mine, whole[:4])
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors: the file is missing"):
        load(tmp_path / "c", [Box("w", (8, 4), (1, 0), mine)])


def test_parameters_that_require_a_gradient_are_saved_and_filled_in_place(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    save(tmp_path / "c", whole_boxes({"w": weight}), HEADER)
    other = torch.nn.Parameter(torch.zeros(4, 3))
    address = other.data_ptr()
    load(tmp_path / "c", whole_boxes({"w": other}))
    assert same_bits(other.data, weight.data)
    assert other.data_ptr() == address
    assert other.is_leaf


def test_many_ranks_write_one_checkpoint_and_a_rank_that_owns_nothing_writes_no_file(tmp_path, monkeypatch):
    tensors, random = state(), np.random.default_rng(3)
    ranks: list[list[Box]] = [[], [], [], []]
    for name, tensor in tensors.items():
        for i, box in enumerate(boxes_of(name, tensor, cut(tuple(tensor.shape), 5, random))):
            ranks[i % 3].append(box)
    ranks[3] = [Box("embedding.weight", (12, 8), (12, 0), torch.zeros(0, 8))]  # an uneven split's last rank
    results = ThreadWorld(4, monkeypatch).save(tmp_path / "c", ranks)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "c").iterdir())
    assert results == [on_disk] * 4
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "manifest.json",
        *(f"rank-{i:05d}.safetensors" for i in range(3)),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    loaded = empty_like(tensors)
    load(tmp_path / "c", whole_boxes(loaded))
    assert all(same_bits(loaded[n], t) for n, t in tensors.items())


def test_files_are_plain_safetensors_that_the_library_reads(tmp_path):
    tensors = state()
    save(tmp_path / "c", whole_boxes(tensors), HEADER)
    found = load_file(tmp_path / "c" / "rank-00000.safetensors")
    assert set(found) == set(tensors)
    assert all(same_bits(found[n], t) for n, t in tensors.items())
    entry = read_manifest(tmp_path / "c").tensors["head.weight"]
    assert (entry.shape, entry.dtype) == ((5, 8), "bfloat16")


def test_the_header_comes_back_as_it_was_given(tmp_path):
    given_header = {**HEADER, "precision": {"scale": 0.1, "history": [1e-300, -0.0]}}
    save(tmp_path / "c", whole_boxes(state()), given_header)
    manifest = open_manifest(tmp_path / "c")
    assert manifest.header == given_header
    assert manifest.step == 7


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    save(tmp_path / "c", whole_boxes(state()), HEADER)
    wanted = whole_boxes(
        {
            "norm.weight": torch.zeros(8),
            "final.weight": torch.zeros(8),
            "embedding.weight": torch.zeros(12, 9),
            "head.weight": torch.zeros(5, 8),
        }
    )
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", wanted, claimed=[b.name for b in wanted])
    text = str(caught.value)
    assert "norm.weight is missing" in text
    assert "final.weight is missing" in text
    assert "embedding.weight has shape [12, 8], this run wants [12, 9]" in text
    assert "head.weight has dtype bfloat16, this run wants float32" in text
    for left_over in ("scale", "experts.weight", "router.tokens", "optimizer.exp_avg/embedding.weight"):
        assert f"tensor {left_over} of the checkpoint is not part of this run" in text
    assert unclaimed(open_manifest(tmp_path / "c"), ["scale", "head.weight", "nothing"]) == sorted(
        set(state()) - {"scale", "head.weight"}
    )


@pytest.mark.parametrize(
    ("boxes", "named"),
    [
        ([((0, 0), (4, 4)), ((4, 0), (3, 4))], r"w.*element \[7, 0\] is stored by no shard"),
        ([((0, 0), (5, 4)), ((4, 0), (4, 4))], r"w.*element \[4, 0\] is stored by 2 shards"),
        # As many elements as the tensor has, one twice and one not at all: counting would not see it.
        ([((0, 0), (8, 2)), ((0, 1), (8, 2))], r"w.*element \[0, 1\] is stored by 2 shards"),
    ],
)
def test_a_gap_or_an_overlap_between_ranks_is_refused_by_name_and_leaves_nothing(tmp_path, monkeypatch, boxes, named):
    whole = torch.randn(8, 4)
    ranks = [[box] for box in boxes_of("w", whole, boxes)]
    results = ThreadWorld(len(ranks), monkeypatch).save(tmp_path / "c", ranks)
    for result in results:
        assert isinstance(result, CheckpointError)
        with pytest.raises(CheckpointError, match=named):
            raise result
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_about_a_tensor_are_refused(tmp_path, monkeypatch):
    ranks = [
        [Box("w", (4,), (0,), torch.zeros(2))],
        [Box("w", (4,), (2,), torch.zeros(2, dtype=torch.float64))],
    ]
    results = ThreadWorld(2, monkeypatch).save(tmp_path / "c", ranks)
    assert all("tensor w" in str(r) and "rank 1" in str(r) for r in results), results
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "bad", [{"step": -1}, {"step": True}, {"config": {1, 2}}, {"loss": float("nan")}, {"tensors": {}}]
)
def test_a_header_that_is_not_one_is_refused_before_anything_is_written(tmp_path, bad):
    with pytest.raises(CheckpointError, match="header"):
        save(tmp_path / "c", whole_boxes(state()), {**HEADER, **bad})
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_without_a_name_and_a_box_owned_twice_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor w: dtype torch\.complex64"):
        save(tmp_path / "c", whole_boxes({"w": torch.zeros(3, dtype=torch.complex64)}), header(1))
    with pytest.raises(CheckpointError, match="owns 'w' twice"):
        save(tmp_path / "c", whole_boxes({"w": torch.zeros(3)}) * 2, header(1))
    with pytest.raises(ValueError, match="box of w"):
        Box("w", (3,), (1,), torch.zeros(3))
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple),
    seed=st.integers(0, 2**32),
    damage=st.sampled_from(["none", "drop", "twice", "random"]),
)
def test_tiling_is_judged_as_by_counting_every_element(shape, seed, damage):
    random = np.random.default_rng(seed)
    boxes = cut(shape, int(random.integers(1, 8)), random)
    if damage == "drop":
        boxes.pop(random.integers(len(boxes)))
    elif damage == "twice":
        boxes.append(boxes[random.integers(len(boxes))])
    elif damage == "random":
        boxes = []
        for _ in range(random.integers(1, 6)):
            offset = tuple(int(random.integers(0, n)) for n in shape)
            boxes.append((offset, tuple(int(random.integers(1, n - o + 1)) for n, o in zip(shape, offset))))
    count = np.zeros(shape, dtype=int)
    for offset, size in boxes:
        count[slices(offset, size, (0,) * len(shape))] += 1
    wrong = untiled(shape, boxes)
    if (count == 1).all():
        assert wrong is None
    else:
        assert wrong is not None
        assert wrong.element == tuple(int(i) for i in np.argwhere(count != 1)[0])
        assert len(wrong.boxes) == count[wrong.element]


def test_tiling_of_a_hundred_thousand_boxes_is_judged_in_seconds():
    grid = [((i, j), (1, 1)) for i in range(300) for j in range(300)]
    assert untiled((300, 300), grid) is None
    assert untiled((300, 300), grid[:-1]).element == (299, 299)


CUTS = {
    "rows": [((0, 0), (6, 8)), ((6, 0), (6, 8))],
    "columns": [((0, 0), (12, 4)), ((0, 4), (12, 4))],
    "copies": [((0, 0), (12, 8)), ((0, 0), (12, 8))],
}


@pytest.mark.parametrize("verify", ["full", "sampled", "off"])
@pytest.mark.parametrize("cut_as", CUTS)
def test_ranks_together_read_their_own_bytes_and_hash_every_shard_and_few_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_as: str, verify: Any
) -> None:
    """Two ranks load what one saved in 32 tensors of 384 bytes each, cut as ZeRO (rows) or tp (columns) would."""
    tensors = {f"t{i}": torch.randn(12, 8) for i in range(32)}
    save(tmp_path / "c", whole_boxes(tensors), HEADER)
    copied, hashed = [0, 0], [set[str](), set[str]()]
    original_copy, original_verify = read._copy, read._verify
    rank = 0

    def counting_copy(reader: Any, place: Any, dtype: str, box: Any, sha: Any) -> None:
        copied[rank] += box.tensor.numel() * box.tensor.element_size()
        original_copy(reader, place, dtype, box, sha)

    def counting_verify(place: Any, name: str, checksum: str) -> None:
        hashed[rank].add(name)
        original_verify(place, name, checksum)

    monkeypatch.setattr(read, "_copy", counting_copy)
    monkeypatch.setattr(read, "_verify", counting_verify)
    for rank in (0, 1):
        offset, size = CUTS[cut_as][rank]
        loaded = {name: torch.full(size, 77.0) for name in tensors}
        load(tmp_path / "c", [Box(n, (12, 8), offset, t) for n, t in loaded.items()], verify, among=(rank, 2))
        assert all(same_bits(t, tensors[n][slices(offset, size, (0, 0))]) for n, t in loaded.items())
        assert copied[rank] == 32 * 4 * size[0] * size[1]
    if verify == "full":
        assert hashed[0] | hashed[1] == set(tensors)
    if cut_as != "copies":
        assert not hashed[0] & hashed[1]
        assert max(map(len, hashed)) <= 24
    if verify == "sampled":
        assert 1 <= len(hashed[0] | hashed[1]) <= 16
    if verify == "off":
        assert not hashed[0] | hashed[1]


def test_a_file_is_read_from_front_to_back_whatever_is_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{i}": torch.randn(12, 8) for i in range(32)}
    save(tmp_path / "c", whole_boxes(tensors), HEADER)
    starts: list[int] = []
    original = read._copy

    def noted(reader: Any, place: Any, dtype: str, box: Any, sha: Any) -> None:
        starts.append(place.start)
        original(reader, place, dtype, box, sha)

    monkeypatch.setattr(read, "_copy", noted)
    monkeypatch.setattr(read, "THREADS", 1)
    asked = {name: torch.zeros(12, 8) for name in reversed(tensors)}
    load(tmp_path / "c", whole_boxes(asked))
    assert starts == sorted(starts)
    assert len(starts) == 32
    assert all(same_bits(asked[name], tensor) for name, tensor in tensors.items())


def test_damage_in_a_part_that_a_rank_does_not_need_is_found_by_the_one_whose_turn_it_is(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(12, 8) for i in range(8)}
    save(tmp_path / "c", whole_boxes(tensors), HEADER)
    file = tmp_path / "c" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[data.index(tensors["t3"][11].numpy().tobytes())] ^= 1
    file.write_bytes(data)
    found = []
    for rank in (0, 1):
        half = [Box(name, (12, 8), (6 * rank, 0), torch.zeros(6, 8)) for name in tensors]
        try:
            load(tmp_path / "c", half, among=(rank, 2))
        except CheckpointError as error:
            found.append(str(error))
    assert len(found) == 1
    assert "checksum of tensor t3" in found[0]
