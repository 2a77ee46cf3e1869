"""Whether the automatic bucket size is the right one: step times over a sweep of sizes, side by side.

    python benchmarks/bucket_size.py --out benchmarks/results/bucket_size_cpu.json     # under a minute on two cores

A small Llama on 2 and 4 processes on gloo, ZeRO stages 0 and 1. Every size has an assembly of its own in the same
processes; they run in turns, each round in another order, so that what else the machine does meets all alike. Before
it, sums of single buckets are timed, and a line through their times gives the link's latency and bandwidth, to be
compared with what `mesh/links.py` says of gloo.

A size is judged by the median over rounds of its time over that of the automatic size in the same round. The automatic
size runs twice: differences no larger than that between the two are noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ultrascale.assembly import assemble, planned_groups
from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.links import LINKS
from ultrascale.models.batch import MicroBatch
from ultrascale.step import train_step, with_denominators

SEQUENCE, VOCABULARY = 64, 1024
BASE: dict[str, Any] = {
    "run": {"steps": 1, "seed": 1},
    "model": {
        "family": "llama",
        "hidden_size": 192,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "intermediate_size": 512,
        "vocab_size": VOCABULARY,
    },
    "batch": {"micro_size": 1, "sequence_length": SEQUENCE},
    "data": {"train": "builtin:uneven"},
    "optimizer": {"lr": 1e-3},
}
SWEEP: list[int | str] = ["auto", "auto", 1, 6 << 20, 10 << 20, 1 << 30]
"""Bytes: one unit (1.8 MB a block), three, five, everything (16 MB) at once. The second auto is a control: how far it
is from the first says what this machine can tell apart."""
FITTED = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the single sums."""


def fitted_link(group: Group, repeats: int = 9) -> dict[str, float]:
    """Latency of a message and bandwidth: the line through the least times of sums in rank order."""
    least = []
    for size in FITTED:
        flat, times = torch.ones(size // 4), []
        for _ in range(repeats):
            collectives.barrier(group)
            start = time.perf_counter()
            collectives.deterministic_all_reduce(flat, group).wait()
            times.append(time.perf_counter() - start)
        least.append(min(times))
    messages = 2 * (group.size - 1)
    slope = (least[-1] - least[0]) / (FITTED[-1] - FITTED[0])
    latency = least[0] - slope * FITTED[0]
    return {"latency_s": latency / messages, "bandwidth": messages / group.size / slope}


def stepper(stage: int, size: int | str, rank: int, ranks: int) -> tuple[Callable[[], None], int, list[int]]:
    """A function that trains a step; the bytes that `size` stands for; the bytes of the buckets that were made."""
    tree = {section: dict(values) for section, values in BASE.items()}
    tree["parallel"] = {"dp": ranks, "zero_stage": stage, "bucket_bytes": size}
    tree["batch"]["global_size"] = 2 * ranks
    config = resolve(Config.model_validate(tree), ranks)
    mesh = Mesh.of(config)
    groups = create(mesh, planned_groups(config, mesh), Ledger())
    assembly = assemble(config, mesh, rank, groups, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    step = 0

    def run() -> None:
        nonlocal step
        step += 1
        groups.ledger.clear()
        batches = []
        for _ in range(2):
            tokens = torch.randint(0, VOCABULARY, (SEQUENCE + 1, 1), generator=generator)
            batches.append(MicroBatch(tokens[:-1], (tokens[1:],), torch.arange(SEQUENCE).unsqueeze(1)))
        train_step(assembly, with_denominators(assembly, batches), step)

    made = [bucket.numel * bucket.gradients.element_size() for bucket in assembly.store.buckets]
    return run, assembly.store.bucket_bytes, made


def worker(rank: int, ranks: int, args: argparse.Namespace, store: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    world = Group(("dp",), tuple(range(ranks)), rank, dist.group.WORLD, Ledger())
    link = fitted_link(world)
    rows: list[dict[str, Any]] = []
    for stage in (0, 1):
        contestants = [stepper(stage, size, rank, ranks) for size in SWEEP]
        seconds: list[list[float]] = [[] for _ in SWEEP]
        shuffled = random.Random(1)  # the same order on all ranks
        for number in range(args.rounds + 1):
            for index in shuffled.sample(range(len(SWEEP)), len(SWEEP)):
                collectives.barrier(world)
                start = time.perf_counter()
                contestants[index][0]()
                collectives.barrier(world)
                if number:
                    seconds[index].append(time.perf_counter() - start)
        for size, (_, limit, made), times in zip(SWEEP, contestants, seconds, strict=True):
            ratio = statistics.median(mine / auto for mine, auto in zip(times, seconds[0], strict=True))
            rows.append({"ranks": ranks, "zero_stage": stage, "bucket_bytes": size, "limit": limit})
            rows[-1] |= {"buckets": made, "median_s": statistics.median(times), "over_auto": ratio}
    if rank == 0:
        Path(out).write_text(json.dumps({"link": {"ranks": ranks, **link}, "rows": rows}))
    collectives.barrier(world)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    links, rows = [], []
    load = os.getloadavg()[0]
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            multiprocessing.spawn(worker, (ranks, args, f"{folder}/store", str(out)), nprocs=ranks)
            found = json.loads(out.read_text())
        links.append(found["link"])
        rows += found["rows"]
        link, said = found["link"], LINKS["gloo"]
        print(
            f"{ranks} processes: {link['latency_s'] * 1e3:.2f} ms and {link['bandwidth'] / 1e9:.2f} GB/s "
            f"(mesh/links.py: {said.latency * 1e3:.2f} ms, {said.bandwidth / 1e9:.2f} GB/s)"
        )
        print(f"{'stage':>5} {'bucket_bytes':>12} {'up to':>12} {'buckets':>8} {'median s':>9} {'over auto':>10}")
        for row in found["rows"]:
            print(
                f"{row['zero_stage']:>5} {row['bucket_bytes']:>12} {row['limit']:>12,} {len(row['buckets']):>8} "
                f"{row['median_s']:>9.4f} {row['over_auto']:>10.3f}",
                flush=True,
            )
    if args.out:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        figures = {"date": time.strftime("%Y-%m-%d"), **machine, "load_at_start": load, "rounds": args.rounds}
        args.out.write_text(json.dumps({**figures, "links": links, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
