"""V-Min: two stages a rank in a V, in a third of 1F1B's memory (Qi et al. 2024, arXiv 2405.15362, section 4.1).

With so little memory every delay of one rank stops the others, so that unequal costs take the makespan far above the
lower bound.
"""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules.placement import v_shape
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.building_block import Block
from ultrascale.pipeline.search.searched import searched
from ultrascale.pipeline.search.v_blocks import split_block


def schedule(request: Request) -> Plan:
    """The building block, repeated, squeezed and reordered for the costs at hand under the block's memory."""
    return searched("v_min", request, v_shape(request.ranks), memory_bound(request), blocks=(_block(request.ranks),))


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: 2⌊(P + 4)/3⌋ of 1F1B's 2P halves, or all 2M."""
    return (2 * min(request.micro_batches, (request.ranks + 4) // 3),) * request.ranks


def _block(ranks: int) -> Block:
    """Offsets of rank i in slots of equal length, six to a period; δ keeps them from meeting when 3 divides P."""
    third = 2 if ranks % 3 == 0 else 0
    return split_block(ranks, lambda i: (i, 2 * ranks - i - 1, 2 * ranks + third + i, 4 * ranks + third - i - 1))
