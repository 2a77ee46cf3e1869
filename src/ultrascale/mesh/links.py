"""What links between ranks cost, and how large a bucket of gradients they ask for. Needs no torch.

A message of b bytes takes α + b/β seconds: a latency and a bandwidth (Hockney 1994, "The communication challenge for
MPP"). A ring over n ranks that sums b bytes sends 2(n − 1) messages of b/n (n − 1 to reduce-scatter, n − 1 to gather;
Patarasuk & Yuan 2009), and so does the sum in rank order:

    t(b) = 2(n − 1) · (α + b/(nβ)) = a + c·b        with a = 2(n − 1)·α and c = 2(n − 1)/(nβ)

**The size of a bucket.** Backward makes G bytes of gradients at an even rate, in T seconds. They are cut into k buckets
of b = G/k, of which one after another is summed as soon as it is full. Bucket i is full at i·T/k and the sums follow
each other without a gap from the first to the last of a busy stretch, so the last one ends at

    max over i of  i·T/k + (k − i + 1)·t(b)  =  max( T + a + c·b,  T/k + k·a + c·G )

(linear in i, hence largest at an end: i = k, where only the last bucket is exposed, or i = 1, where links are busy from
the first bucket on). With perfect overlap, no latency and endless cuts it would be max(T, c·G). What is above that,

    T ≥ c·G:   max( a + c·b,            k·a + c·G − T·(1 − 1/k) )
    T ≤ c·G:   max( T − c·G + a + c·b,  k·a + T/k ),

rises with T up to T = c·G and falls behind it (or stands still, at a + c·b), and there it is

    k·a + c·G/k  =  a·G/b + c·b:   each bucket's latency, and the transfer of the one that is exposed.

T is not known before a run, but this is the most that may be lost whatever T is. It is least at

    b* = √(G·a/c) = √(G·n·α·β),   where  2·√(a·c·G)  is lost.

A reduce-scatter alone (ZeRO 1) halves a and c, and asks for the same b*. More ranks, or a longer latency, ask for
larger buckets; where G ≤ n·α·β, one bucket is best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Link:
    """How ranks reach each other."""

    latency: float
    """α: seconds that a message of no bytes takes, in the middle of a collective."""
    bandwidth: float
    """β: bytes per second that a rank sends while it receives as many."""
    source: str


LINKS = {
    "gloo": Link(
        3e-4,
        0.9e9,
        "sums in rank order over 2 and 4 processes of one host with 2 cores (benchmarks/bucket_size.py): 0.23 and 0.40 "
        "ms, 0.98 and 0.95 GB/s when nothing else ran, twice the latency and half the bandwidth when much did",
    ),
    "nvlink3": Link(
        13e-6, 234e9, "nccl-tests all_reduce, 8 A100: a line through 64 MiB (685 µs) and 1 GiB (8204 µs), 14 messages"
    ),
    "nvlink4": Link(
        5.6e-6,
        475e9,
        "nccl-tests all_reduce, 8 H100 (NVIDIA/dgxc-benchmarking v25.12.02): 64 MiB 325 µs, 1 GiB 4029 µs",
    ),
    "nvlink5": Link(
        10e-6, 764e9, "all_reduce_bench of stas00/ml-engineering, 8 B200: busbw 401 GB/s at 64 MiB, 723 GB/s at 1 GiB"
    ),
    "rdma-400g": Link(
        8e-6,
        48e9,
        "one 400 Gb/s port per GPU. Bandwidth: NVIDIA GTC S62129, all_reduce over 400 Gb RDMA; latency: 32 B200 on EFA "
        "(stas00/ml-engineering), a line through 64 MiB (829 µs) and 1 GiB (5747 µs), 62 messages",
    ),
}
"""Kinds of links by name. Latencies are those of large messages: what a line through their times leaves at 0 bytes."""

GPUS_PER_HOST = 8
"""Neighbouring ranks that are taken to share a host, on GPUs."""


def link_between(ranks: Sequence[int], device: str) -> Link:
    """What a ring over these ranks runs at.

    device   cpu (gloo) or cuda: NVLink of H100 within a host, a 400 Gb/s port of each GPU between hosts. The ring has
             as many ports as there are members on a host, up to what NVLink carries.
    """
    if device == "cpu":
        return LINKS["gloo"]
    members = Counter(rank // GPUS_PER_HOST for rank in ranks)
    inside, port = LINKS["nvlink4"], LINKS["rdma-400g"]
    if len(members) == 1:
        return inside
    ports = min(members.values())
    return Link(port.latency, min(inside.bandwidth, ports * port.bandwidth), f"{ports} × rdma-400g")


def sum_seconds(size: float, ranks: int, link: Link) -> float:
    """t(b): seconds to sum `size` bytes over a ring."""
    return 2 * (ranks - 1) * (link.latency + size / (ranks * link.bandwidth))


def most_lost(total: float, bucket: float, ranks: int, link: Link) -> float:
    """a·G/b + c·b: the most seconds of a step that buckets of this size may cost above perfect overlap."""
    latency, whole = sum_seconds(0, ranks, link), sum_seconds(bucket, ranks, link)
    return latency * total / bucket + (whole - latency)


def best_bucket(total: float, ranks: int, link: Link) -> float:
    """b* in bytes on the wire, at most `total`: what `most_lost` is least at."""
    return min(total, sqrt(total * ranks * link.latency * link.bandwidth))
