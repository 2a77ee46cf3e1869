"""Which implementation of attention a run uses, and why not another. Needs no torch before one is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ultrascale.config.schema import Config

if TYPE_CHECKING:
    import torch

    from ultrascale.kernels.attention import AttentionBackend

BEST_FIRST = ("flash_attn", "sdpa", "reference")
"""Values of kernels.attention besides auto, which takes the first that can run."""
FLASH_ATTN = ((2, 7), (3,))
"""Versions of the flash-attn package: from, below."""
LARGEST_HEAD = 256
"""Of FlashAttention's kernels; smaller heads are padded to a multiple of 8."""
OLDEST_GPU = (8, 0)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run asks of attention."""

    compute: str
    """precision.compute"""
    head_dim: int

    @staticmethod
    def of(config: Config) -> Demand:
        """Takes a resolved config."""
        assert config.model.head_dim is not None
        return Demand(config.precision.compute, config.model.head_dim)


@dataclass(frozen=True, slots=True)
class Place:
    """What it runs on."""

    device: str
    """cpu or cuda"""
    capability: tuple[int, int]
    """Of the GPU; (0, 0) on cpu."""
    flash_attn: str | None
    """Version of the package that is installed."""

    @staticmethod
    def of(device: str, index: int | None = None) -> Place:
        """This machine's; imports torch for cuda alone."""
        if device != "cuda":
            return Place(device, (0, 0), installed("flash-attn"))
        import torch

        return Place(device, torch.cuda.get_device_capability(index), installed("flash-attn"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason why an implementation cannot run."""

    text: str
    """A clause, of which the implementation is the subject: "runs on GPUs alone"."""
    fix: str
    """What lets it run, as a command or a sentence; "" when it takes another machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one implementation."""

    name: str
    about: str
    refusals: tuple[Refusal, ...]
    """None: it can run."""


def installed(package: str) -> str | None:
    """The version of a package, which is not imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def verdicts(demand: Demand, place: Place) -> list[Verdict]:
    """On every implementation, the best first."""
    cuda = place.device == "cuda"
    about = {
        "flash_attn": "FlashAttention of the flash-attn package: all documents and windows of a batch in one call",
        "sdpa": "PyTorch's FlashAttention: all documents and windows of a batch in one call"
        if cuda
        else "PyTorch's flash kernel for CPUs, tile by tile",
        "reference": "plain products, tile by tile, with all scores of a tile in memory",
    }
    return [Verdict(name, about[name], tuple(refusals(name, demand, place))) for name in BEST_FIRST]


def choose(asked: str, demand: Demand, place: Place) -> Verdict:
    """What kernels.attention means here; a named one may be unable to run."""
    found = verdicts(demand, place)
    return next(one for one in found if one.name == asked or (asked == "auto" and not one.refusals))


def refusals(name: str, demand: Demand, place: Place) -> Iterator[Refusal]:
    """Everything that keeps an implementation from running; on cpu, that it does not run there at all."""
    if place.device != "cuda":
        if name == "flash_attn":
            yield Refusal("runs on GPUs alone", "")
        return
    if name == "flash_attn":
        yield from _package(place.flash_attn)
    if name in ("flash_attn", "sdpa"):
        yield from _kernels(demand, place)


def _package(found: str | None) -> Iterator[Refusal]:
    first, behind = FLASH_ATTN
    fitting = f"flash-attn>={_dotted(first)},<{_dotted(behind)}"
    # It is built against the torch that is installed.
    if found is None:
        fix = "pip install 'ultrascale[flash]' --no-build-isolation"
        yield Refusal("needs the package flash-attn, which is not installed", fix)
    elif not first <= _numbers(found) < behind:
        yield Refusal(f"needs {fitting}, and {found} is installed", f"pip install '{fitting}' --no-build-isolation")


def _kernels(demand: Demand, place: Place) -> Iterator[Refusal]:
    """What FlashAttention's kernels cannot do."""
    if demand.compute not in ("bfloat16", "float16"):
        fix = "use precision.compute=bfloat16"
        yield Refusal(f"computes in bfloat16 or float16, and precision.compute={demand.compute}", fix)
    if demand.head_dim > LARGEST_HEAD:
        text = f"has heads of up to {LARGEST_HEAD}, and model.head_dim={demand.head_dim}"
        yield Refusal(text, f"use model.head_dim={LARGEST_HEAD} or less")
    if place.capability < OLDEST_GPU:
        text = f"needs a GPU of compute capability {_dotted(OLDEST_GPU)} (Ampere) or later"
        yield Refusal(f"{text}, and this one has {_dotted(place.capability)}", "")


def attention_backend(config: Config, device: torch.device) -> AttentionBackend:
    """Of a checked config, on a device."""
    chosen = choose(config.kernels.attention, Demand.of(config), Place.of(device.type, device.index))
    if chosen.name == "flash_attn":
        from ultrascale.kernels.attention_flash import FlashAttention

        return FlashAttention()
    if chosen.name == "reference":
        from ultrascale.kernels.attention_reference import ReferenceAttention

        return ReferenceAttention()
    if device.type == "cuda":
        from ultrascale.kernels.attention_cuda import CudaFlashAttention

        return CudaFlashAttention()
    from ultrascale.kernels.attention_cpu import CpuFlashAttention

    return CpuFlashAttention()


def _numbers(text: str) -> tuple[int, ...]:
    """`2.7.4.post1` → (2, 7)"""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
