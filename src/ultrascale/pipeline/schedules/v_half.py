"""V-Half: two stages a rank in a V, in half of 1F1B's memory (Qi et al. 2024, arXiv 2405.15362, section 4.1)."""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules.placement import v_shape
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.building_block import Block
from ultrascale.pipeline.search.searched import searched
from ultrascale.pipeline.search.v_blocks import split_block


def schedule(request: Request) -> Plan:
    """The building block, repeated, squeezed and reordered for the costs at hand under the block's memory."""
    return searched("v_half", request, v_shape(request.ranks), memory_bound(request), blocks=(_block(request.ranks),))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: 2⌊(P + 2)/2⌋ of 1F1B's 2P halves, or all 2M."""
    return (2 * min(request.micro_batches, (request.ranks + 2) // 2),) * request.ranks


def _block(ranks: int) -> Block:
    """Offsets of rank i in slots of equal length, six to a period; δ keeps them from meeting when P is even."""
    even = 3 if ranks % 2 == 0 else 0
    return split_block(
        ranks, lambda i: (2 * i, 3 * ranks - i - 2, 3 * ranks + even + 2 * i - 1, 6 * ranks + even - i - 2)
    )
