"""Which of PyTorch's communication libraries this build has. Imports torch when asked, and not before."""

from __future__ import annotations


def backends() -> dict[str, str]:
    """gloo and nccl → version, "" where it has none to tell; those that are missing are left out."""
    import torch
    import torch.distributed as dist

    found = {}
    if dist.is_available() and dist.is_gloo_available():
        found["gloo"] = ""
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
