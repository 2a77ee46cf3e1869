"""Model FLOPs utilisation: the FLOPs that the model needs, over those that the devices could have done. No
torch.

    FLOPs per token = 6 · matmul parameters + 6 · attention width · mean keys

Model FLOPs, not hardware FLOPs: what recompute does again does not count. Chowdhery et al. 2022 (PaLM),
appendix B, whose 12·L·H·Q·T counts all T keys for each query; here the causal half is counted, T/2, as
Megatron-LM's FLOP count does. Figures made with the full square are larger: compare tokens/s first.
"""

from __future__ import annotations

import re

FORMULA = (
    "6 · matmul parameters + 6 · attention width · mean keys FLOPs per token (half the sequence; less under a window)"
)


def flops_per_token(matmul_parameters: float, attention_width: float, mean_keys: float) -> float:
    """FLOPs of one token's forward and backward pass.

    matmul_parameters  parameters that a token is multiplied with: linear layers and the head (also a tied
                       one), only the experts that a token is sent to; not the embedding, whose rows are
                       looked up
    attention_width    sum over layers and query heads of (query/key head size + value head size)
    mean_keys          keys that a query sees, on average over layers: half the sequence under a causal mask, less
                       under a sliding window

    A multiply-add is 2 FLOPs and the backward costs twice the forward: 2 · 3 per parameter; the scores and
    their product with the values cost 2 · 3 · (query/key size + value size) per query and key.
    """
    return 6.0 * matmul_parameters + 6.0 * attention_width * mean_keys


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak: float | None) -> float | None:
    """Share of the peak that the job's model FLOPs are, 0 to 1; None when no peak is known.

    tokens_per_s  of the whole job
    peak          FLOP/s of one device, as `peak_flops` says
    """
    return None if peak is None else tokens_per_s * flops_per_token / (devices * peak)


_TFLOPS = 1e12


def _nvidia(bf16: float, fp32: float, fp8: float | None = None) -> dict[str, float]:
    table = {"bfloat16": bf16, "float16": bf16, "float32": fp32}
    return table if fp8 is None else {**table, "fp8": fp8}


# TFLOP/s of dense matrix products, without sparsity, from the vendors' datasheets. float32 is that of the
# plain units: torch does not use TF32 unless it is told to. First match counts, so that variants stand before
# families.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # A slice of a GPU is called by the GPU's name and has not its peak.
    (r"\bMIG\b", {}),
    (r"\bGB[23]00\b", _nvidia(2500, 80, fp8=5000)),
    (r"\bB[23]00\b", _nvidia(2250, 80, fp8=4500)),
    (r"\bH[12]00 NVL\b", _nvidia(835, 60, fp8=1671)),
    (r"\bH100 PCIe\b", _nvidia(756, 51, fp8=1513)),
    (r"\b(H100|H200|H800|GH200)\b", _nvidia(989, 67, fp8=1979)),
    (r"\bH20\b", _nvidia(148, 44, fp8=296)),
    (r"\b(A100|A800)\b", _nvidia(312, 19.5)),
    (r"\bA40\b", _nvidia(149.7, 37.4)),
    (r"\bA10\b", _nvidia(125, 31.2)),
    (r"\bL40S\b", _nvidia(362, 91.6, fp8=733)),
    (r"\bL4\b", _nvidia(121, 30.3, fp8=242)),
    (r"\bMI3(00X|25X)\b", {"bfloat16": 1307, "float16": 1307, "float32": 163.4, "fp8": 2615}),
    (r"\bMI355X\b", {"bfloat16": 2500, "float16": 2500, "float32": 157.3, "fp8": 5000}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device for dense products; None when it is not known, so that no wrong figure is
    printed.

    device_name  as torch.cuda.get_device_name() has it; a CPU's peak is not known
    dtype        precision.compute: float64 | float32 | bfloat16 | float16 | fp8
    """
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_name):
            tflops = peaks.get(dtype)
            return None if tflops is None else tflops * _TFLOPS
    return None
