"""How much memory this rank has used at most: resident on a CPU, allocated and reserved on a GPU."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Memory:
    """Peaks of one rank, in bytes.

    peak       what `peak_memory_bytes` of metrics.jsonl is made of: allocated on a GPU, resident on a CPU
    allocated  held by tensors on the GPU; None on a CPU
    reserved   taken from the GPU by torch's allocator, what tensors do not hold included; None on a CPU
    """

    peak: int
    allocated: int | None = None
    reserved: int | None = None


def keep_freed_memory() -> None:
    """Tells glibc to keep large blocks that are freed instead of handing each back to the kernel; elsewhere nothing.

    A step takes and frees thousands of tensors of some megabytes. By default each is mapped anew, and the kernel zeroes
    it page by page. GPUs do not care, as torch keeps their memory anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def peak_memory(device: torch.device) -> Memory:
    """The peaks since the process began (CPU), or since torch's counters were last reset (GPU)."""
    if device.type != "cuda":
        return Memory(peak_resident())
    import torch

    allocated = torch.cuda.max_memory_allocated(device)
    return Memory(allocated, allocated, torch.cuda.max_memory_reserved(device))


def peak_resident() -> int:
    """Bytes that this process has had in physical memory at most; shared pages and mapped files count too."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    # Second choice: getrusage hands a child the peak of the process that it was forked from.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
