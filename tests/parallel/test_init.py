"""Initial values are a function of (seed, name, global index), and nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from small import assembled, boxes, config_of
from ultrascale.parallel import init
from ultrascale.parallel.init import initialise, key_of, normal_at, philox, uniform_at
from ultrascale.parallel.layout import Constant, Initializer, Kind, Layout, Normal, Use

STANDARD = Normal(1.0)


def layout(shape: tuple[int, ...], name: str = "w", value: Initializer = STANDARD) -> Layout:
    return Layout(
        name=name, shape=shape, split={}, used_in=Use.WHOLE, tie=None, init=value, decay=True, lr_scale=1.0, pad_to={},
        kind=Kind.MATRIX,
    )  # fmt: skip


def filled(
    shape: tuple[int, ...],
    offset: tuple[int, ...] | None = None,
    box: tuple[int, ...] | None = None,
    name: str = "w",
    seed: int = 5,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    target = torch.full(box or shape, math.nan, dtype=dtype)
    initialise(target, layout(shape, name), offset or (0,) * len(shape), seed)
    return target


# ---- the generator ----------------------------------------------------------------------------------------------


def reference_philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32 as Salmon et al. 2011 write it, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


ONES = 0xFFFFFFFF
KNOWN = [  # Random123's kat_vectors, philox4x32 10: counter, key, answer
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def drawn(counter: int, key: tuple[int, int]) -> tuple[int, ...]:
    """Our words of one counter of 64 bits."""
    signed = counter - (1 << 64) if counter >= 1 << 63 else counter
    return tuple(int(word.item()) for word in philox(torch.tensor([signed]), key))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_reference_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert reference_philox(counter, key) == answer


def test_philox_gives_the_published_answer() -> None:
    """The one published vector whose upper 64 counter bits are 0, as ours always are."""
    counter, key, answer = KNOWN[0]
    assert drawn(0, key) == answer
    assert counter[2:] == (0, 0)


EDGES = [0, 1, ONES, ONES + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 0x85A308D3243F6A88]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, (1 << 64) - 1) | st.sampled_from(EDGES),
    st.tuples(*[st.integers(0, ONES) | st.sampled_from([0, ONES, 0xA4093822])] * 2),
)
def test_philox_is_the_reference_for_every_counter_and_key(counter: int, key: tuple[int, int]) -> None:
    assert drawn(counter, key) == reference_philox((counter & ONES, counter >> 32, 0, 0), key)


def test_normals_are_box_muller_of_the_words() -> None:
    """Elements 2i and 2i + 1 share counter i: cosine and sine of one angle."""
    key = key_of(11, "purpose")
    indices = [0, 1, 2, 7, 1 << 33, (1 << 40) + 1]
    expected = []
    for index in indices:
        w = reference_philox(((index >> 1) & ONES, index >> 33, 0, 0), key)
        u1, u2 = (((w[i] >> 5) * 2**26 + (w[i + 1] >> 6)) / 2**53 for i in (0, 2))
        radius, angle = math.sqrt(-2.0 * math.log(u1 + 2**-53)), 2 * math.pi * u2
        expected.append(radius * (math.sin(angle) if index & 1 else math.cos(angle)))
    np.testing.assert_allclose(normal_at(torch.tensor(indices), key).numpy(), expected, rtol=1e-13)


def test_the_key_separates_seeds_and_names() -> None:
    """Without a separator seed 1 with "2w" would be seed 12 with "w"."""
    pairs = [(1, "2w"), (12, "w"), (1, "w"), (0, "w"), (0, ""), (0, "w "), (2**63 - 1, "w")]
    assert len({key_of(*pair) for pair in pairs}) == len(pairs)


# ---- boxes ------------------------------------------------------------------------------------------------------


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    box = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True))
    return shape, offset, box


@settings(max_examples=150, deadline=None)
@given(cut(), st.sampled_from([4, 7, 1 << 16]))
def test_any_box_is_the_slice_of_the_whole(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], block: int
) -> None:
    """Bitwise, empty boxes too, and however many elements are made at a time."""
    shape, offset, box = case
    full = filled(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK", block)
        part = filled(shape, offset, box)
    assert torch.equal(part, full[tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))])


def test_a_view_with_gaps_is_filled_and_its_neighbours_left_alone() -> None:
    memory = torch.full((6, 9), math.nan)
    initialise(memory[1:5, 2:7], layout((10, 20)), (3, 4), 5)
    assert torch.equal(memory[1:5, 2:7], filled((10, 20), dtype=torch.float32)[3:7, 4:9])
    assert int(memory.isnan().sum()) == 6 * 9 - 4 * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_made_in_float64_and_rounded_last(dtype: torch.dtype) -> None:
    assert torch.equal(filled((40, 30), dtype=dtype), filled((40, 30)).to(dtype))


def test_indices_past_2_to_the_32_differ_from_those_below() -> None:
    shape = (3, 1 << 32)
    rows = [filled(shape, (row, 5), (1, 64)) for row in range(3)]
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])
    assert torch.equal(rows[2], normal_at(torch.arange(64) + 5 + 2 * (1 << 32), key_of(5, "w")).view(1, 64))


def test_a_constant_is_one_value_everywhere() -> None:
    target = torch.full((4, 5), math.nan)
    initialise(target, layout((8, 5), value=Constant(1.0)), (2, 0), 5)
    assert torch.equal(target, torch.ones(4, 5))


@pytest.mark.parametrize("compute", ["float64", "bfloat16"])
def test_the_model_starts_with_the_values_of_its_logical_names(compute: str) -> None:
    """Whatever is fused into one tensor: each parameter's values come from its own name and global index."""
    config = config_of({"precision.compute": compute, "model.initializer_range": 0.1})
    for name, shape, _, values in boxes(assembled(config), "masters"):
        if "norm" in name:
            assert (values == 1.0).all()
        else:
            dtype = torch.float64 if compute == "float64" else torch.float32
            numbers = normal_at(torch.arange(math.prod(shape)), key_of(config.run.seed, name)) * 0.1
            assert np.array_equal(values, numbers.to(dtype).to(torch.float64).view(shape).numpy()), name


# ---- statistics -------------------------------------------------------------------------------------------------

LARGE = 1 << 20


def test_a_large_sample_has_the_moments_of_a_normal() -> None:
    sample = filled((1024, 1024)).flatten()
    deviations = 5.0 / LARGE**0.5
    assert abs(sample.mean()) < deviations
    assert abs(sample.square().mean() - 1) < deviations * 2**0.5
    assert abs(sample.pow(3).mean()) < deviations * 15**0.5
    assert abs(sample.pow(4).mean() - 3) < deviations * 96**0.5
    assert sample.abs().max() > 4.3  # the tails are there
    inside = torch.distributions.Normal(0.0, 1.0).cdf(torch.linspace(-3, 3, 61, dtype=torch.float64))
    empirical = torch.searchsorted(sample.sort().values, torch.linspace(-3, 3, 61, dtype=torch.float64)) / LARGE
    assert (empirical - inside).abs().max() < 2.0 / LARGE**0.5  # Kolmogorov: P < 1e-3


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item())


def test_other_names_seeds_and_places_are_uncorrelated() -> None:
    sample = filled((256, 256))
    bound = 5.0 / sample.numel() ** 0.5
    others = [filled((256, 256), seed=seed) for seed in (4, 6, 5 + (1 << 32))]
    others += [filled((256, 256), name=name) for name in ("v", "layers.0.w", "layers.1.w", "w2")]
    others.append(sample.t())
    for other in others:
        assert correlation(sample, other) < bound
        assert correlation(sample.square(), other.square()) < bound
    for lag in (1, 2, 3, 256):
        flat = sample.flatten()
        assert correlation(flat[:-lag], flat[lag:]) < bound
        assert correlation(flat[:-lag].square(), flat[lag:].square()) < bound


def test_uniforms_are_keyed_by_purpose_and_even() -> None:
    index = torch.arange(LARGE)
    sample = uniform_at(index, 5, "dropout")
    assert sample.min() >= 0
    assert sample.max() < 1
    assert abs(sample.mean() - 0.5) < 5 / (12 * LARGE) ** 0.5
    assert torch.bincount((sample * 16).long(), minlength=16).sub(LARGE / 16).abs().max() < 5 * (LARGE / 16) ** 0.5
    assert torch.equal(sample[100:200], uniform_at(index[100:200], 5, "dropout"))
    assert correlation(sample, uniform_at(index, 5, "router")) < 5 / LARGE**0.5


# ---- memory -----------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Bytes of all tensors made under it that are alive at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                storage = leaf.untyped_storage()
                self.alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.bytes = max(self.bytes, sum(size for _, size in self.alive.values()))
        return out


@pytest.mark.parametrize(
    "shape", [(1 << 20,), (1 << 10, 1 << 10), (1 << 19, 2), (2, 1 << 20), (1, 1 << 21), (2, 1 << 10, 1 << 10)], ids=str
)
def test_temporaries_stay_within_a_few_blocks_for_every_shape(shape: tuple[int, ...]) -> None:
    """Two rows of half a million, and experts stored as one tensor, are no exception."""
    target = torch.empty(shape, dtype=torch.float32)
    with Peak() as peak:
        initialise(target, layout(shape), (0,) * len(shape), 5)
    assert 0 < peak.bytes <= 14 * 8 * init.BLOCK
