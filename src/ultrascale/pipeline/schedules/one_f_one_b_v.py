"""1F1B-V: two stages a rank in a V with whole backwards, in two thirds of 1F1B's memory (Qi et al. 2024, arXiv
2405.15362, section 4.2)."""

from __future__ import annotations

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.schedules.placement import v_shape
from ultrascale.pipeline.schedules.request import Request
from ultrascale.pipeline.search.both_ways import searched_both_ways
from ultrascale.pipeline.search.v_blocks import whole_blocks


def schedule(request: Request) -> Plan:
    """The shortest building blocks of whole backwards, repeated, squeezed and reordered under the blocks' memory."""
    blocks = whole_blocks(request.ranks)
    return searched_both_ways("1f1b_v", request, v_shape(request.ranks), memory_bound(request), blocks)


def memory_bound(request: Request) -> tuple[int, ...]:
    """Activations that each rank holds at most: 2⌈2P/3⌉ of 1F1B's 2P halves, one more where 3 divides P, or all 2M."""
    ranks = request.ranks
    return (min(2 * request.micro_batches, 2 * -(-2 * ranks // 3) + (ranks % 3 == 0)),) * ranks
