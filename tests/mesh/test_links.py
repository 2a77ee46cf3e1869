"""The automatic bucket size is the best of the cost model that its page derives it from, tried step by step here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from ultrascale.mesh.links import LINKS, Link, best_bucket, link_between, most_lost, sum_seconds

CASES = [
    (total, ranks, link) for link in LINKS for ranks, total in ((2, 4e6), (4, 64e6), (8, 2e9), (64, 32e9), (512, 3e10))
]


def end_of_sums(total: float, count: int, backward: float, sum_one: Callable[[float], float]) -> float:
    """Seconds from the first gradient to the end of the last of `count` sums: each begins when its bucket is full and
    the sum before it has ended."""
    free = 0.0
    for number in range(1, count + 1):
        free = max(free, backward * number / count) + sum_one(total / count)
    return free


def lost(total: float, count: int, ranks: int, link: Link) -> float:
    """The most seconds above perfect overlap, over backwards of many lengths."""
    transfer = sum_seconds(total, ranks, link) - sum_seconds(0, ranks, link)

    def above(backward: float) -> float:
        ends = end_of_sums(total, count, backward, lambda size: sum_seconds(size, ranks, link))
        return ends - max(backward, transfer)

    return max(above(transfer * 2.0 ** (power / 4)) for power in range(-24, 25))


@pytest.mark.parametrize(("total", "ranks", "name"), CASES)
def test_what_is_lost_at_most_is_the_closed_formula(total: float, ranks: int, name: str) -> None:
    for count in (1, 2, 3, 7, 20):
        expected = most_lost(total, total / count, ranks, LINKS[name])
        assert lost(total, count, ranks, LINKS[name]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("total", "ranks", "name"), CASES)
def test_no_number_of_buckets_loses_less_than_the_formulas(total: float, ranks: int, name: str) -> None:
    """But for its being a whole number."""
    link = LINKS[name]
    best = total / best_bucket(total, ranks, link)
    assert 1 <= best < 150
    tried = {count: lost(total, count, ranks, link) for count in range(1, round(2 * best) + 3)}
    least = min(tried, key=lambda count: tried[count])
    assert abs(least - best) < 1
    assert min(tried[max(1, int(best))], tried[int(best) + 1]) == tried[least]


@pytest.mark.parametrize("name", LINKS)
def test_more_gradients_ranks_and_latency_ask_for_larger_buckets(name: str) -> None:
    link = LINKS[name]
    slower = [Link(link.latency * factor, link.bandwidth, "") for factor in (1, 2, 10)]
    for sizes in (
        [best_bucket(total, 8, link) for total in (1e8, 1e9, 1e10, 1e11)],
        [best_bucket(1e11, ranks, link) for ranks in (2, 4, 8, 64)],
        [best_bucket(1e11, 8, each) for each in slower],
    ):
        assert all(one < other for one, other in pairwise(sizes))
    # And so there are more of them, the more gradients there are.
    assert 1e11 / best_bucket(1e11, 8, link) > 1e9 / best_bucket(1e9, 8, link)


@pytest.mark.parametrize("name", LINKS)
def test_few_gradients_travel_in_one_bucket(name: str) -> None:
    link = LINKS[name]
    product = 4 * link.latency * link.bandwidth
    assert best_bucket(product * 0.99, 4, link) == product * 0.99
    assert best_bucket(product * 4, 4, link) == pytest.approx(product * 2)


def test_a_ring_between_hosts_has_as_many_ports_as_it_has_members_on_a_host() -> None:
    port = LINKS["rdma-400g"]
    assert link_between(range(8), "cuda") is LINKS["nvlink4"]
    assert link_between(range(0, 64, 8), "cuda").bandwidth == port.bandwidth
    assert link_between([0, 4, 8, 12], "cuda").bandwidth == 2 * port.bandwidth
    assert link_between(range(16), "cuda").bandwidth == 8 * port.bandwidth < LINKS["nvlink4"].bandwidth
    assert link_between(range(16), "cuda").latency == port.latency
    assert link_between(range(16), "cpu") is LINKS["gloo"]
