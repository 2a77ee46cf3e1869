"""The private operations of PyTorch that we call, each with the reason. No other file may name one.

A new version of PyTorch may change them without a word; tests call each on the version that is installed.
"""

from __future__ import annotations

import torch

# One call for the products of all experts; there is no public name yet.
grouped_mm = torch._grouped_mm
GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# All four: `scaled_dot_product_attention` returns no log-sum-exp, and its backward takes none, while joining parts of
# attention needs the one and backward of a part that of the whole.
cpu_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# `torch.nn.attention.varlen.varlen_attn` is the public name of the forward alone.
cuda_flash_forward = torch.ops.aten._flash_attention_forward.default
cuda_flash_backward = torch.ops.aten._flash_attention_backward.default
