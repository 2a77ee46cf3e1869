"""What overlap hides: steps over links that are slowed by a stated delay, with overlap on and off, side by side.

    python benchmarks/overlap.py                    # about two minutes on two cores
    python benchmarks/overlap.py --delay 0.02

Two processes on gloo. Every collective of the step is held up until `--delay` seconds after it was issued, without
using a core, as a slow link would; what a rank computes meanwhile is hidden time. Contestants run in turns in the same
processes, and must give the same loss to the bit. The exposed part is what a step takes longer than without delay.

- ZeRO 0, 1, 3 with dp=2: reductions under backward, gathers ahead of their use; `parallel.overlap` on and off.
- tp=2: each forward paired with the backward of another micro-batch (interleaved_1f1b_a2a_overlap on one rank), against
  the same order without pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from ultrascale.assembly import assemble, planned_groups
from ultrascale.comm.collectives import Pending
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.mesh.axes import Mesh
from ultrascale.models.batch import MicroBatch
from ultrascale.step import train_step, with_denominators

SEQUENCE, SEQUENCES = 128, 8
BASE: dict[str, Any] = {
    "run": {"steps": 1, "seed": 1},
    "model": {
        "family": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 688,
        "vocab_size": 1024,
    },
    "batch": {"global_size": SEQUENCES, "micro_size": 2, "sequence_length": SEQUENCE},
    "data": {"train": "builtin:uneven"},
    "optimizer": {"lr": 1e-3},
    # A block is a bucket, so that there is something to hide behind something.
    "parallel": {"bucket_bytes": 1},
}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"zero {stage}, dp=2": (
        {"parallel.dp": 2, "parallel.zero_stage": stage, "parallel.overlap": True},
        {"parallel.dp": 2, "parallel.zero_stage": stage, "parallel.overlap": False},
    )
    for stage in (0, 1, 3)
}
PAIRS["pairs of a forward and a backward, tp=2"] = (
    {"parallel.tp": 2, "pipeline.schedule": "interleaved_1f1b_a2a_overlap"},
    {"parallel.tp": 2, "pipeline.schedule": "interleaved_1f1b"},
)
"""What is compared: (overlap on, off)."""


@contextmanager
def slow_links(delay: float) -> Iterator[list[int]]:
    """Inside, no collective ends sooner than `delay` seconds after it was issued; counts them."""
    made = [0]
    begin, wait = Pending.__init__, Pending.wait
    issued: dict[int, float] = {}

    def slow_begin(self: Pending, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self._work is not None:
            issued[id(self)] = time.perf_counter()
            made[0] += 1

    def slow_wait(self: Pending) -> torch.Tensor:
        if self._work is None or id(self) not in issued:
            return wait(self)
        due = issued.pop(id(self)) + delay
        if self._ledger is not None and self._ledger.before_wait is not None:
            self._ledger.before_wait()  # the other of a pair runs on, and only then is the rest of the delay waited for
        time.sleep(max(0.0, due - time.perf_counter()))
        return wait(self)

    Pending.__init__, Pending.wait = slow_begin, slow_wait  # type: ignore[method-assign]
    try:
        yield made
    finally:
        Pending.__init__, Pending.wait = begin, wait  # type: ignore[method-assign]


def stepper(overrides: dict[str, Any], rank: int) -> Callable[[], float]:
    """A function that trains a step and returns its loss."""
    tree = {section: dict(values) for section, values in BASE.items()}
    for key, value in overrides.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    config = resolve(Config.model_validate(tree), 2)
    mesh = Mesh.of(config)
    groups = create(mesh, planned_groups(config, mesh), Ledger())
    assembly = assemble(config, mesh, rank, groups, torch.device("cpu"))
    replicas, micro = mesh.size(["dp"]), config.batch.micro_size
    generator = torch.Generator().manual_seed(mesh.index(rank, ["dp"]))
    step = 0

    def run() -> float:
        nonlocal step
        step += 1
        groups.ledger.clear()
        batches = []
        for _ in range(SEQUENCES // replicas // micro):
            tokens = torch.randint(0, BASE["model"]["vocab_size"], (SEQUENCE + 1, micro), generator=generator)
            positions = torch.arange(SEQUENCE).unsqueeze(1).expand(SEQUENCE, micro)
            batches.append(MicroBatch(tokens[:-1], (tokens[1:],), positions))
        return train_step(assembly, with_denominators(assembly, batches), step).report["loss"]

    return run


def worker(rank: int, args: argparse.Namespace, store: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = []
    for name, overrides in PAIRS.items():
        # Three runs of each, in turns: overlapped, not, and overlapped over links as they are.
        runs = [stepper(overrides[0], rank), stepper(overrides[1], rank), stepper(overrides[0], rank)]
        seconds: list[list[float]] = [[], [], []]
        losses: list[list[float]] = [[], [], []]
        calls = 0
        for _ in range(args.steps + 1):
            for index, run in enumerate(runs):
                dist.barrier()
                with slow_links(args.delay if index < 2 else 0.0) as made:
                    start = time.perf_counter()
                    losses[index].append(run())
                    dist.barrier()
                    seconds[index].append(time.perf_counter() - start)
                calls = made[0] if index == 0 else calls
        assert losses[0] == losses[1] == losses[2], f"{name}: overlap changed the loss"
        on, off, free = (statistics.median(times[1:]) for times in seconds)
        rows.append({"what": name, "collectives": calls, "on_s": on, "off_s": off, "without_delay_s": free})
        if rank == 0:
            hidden = 1 - max(0.0, on - free) / max(1e-9, off - free)
            rows[-1]["hidden"] = hidden
            print(f"{name:<42} {calls:>6} {free:>9.3f} {off:>9.3f} {on:>9.3f} {hidden:>8.0%}", flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.005, help="seconds that each collective takes at least")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    print(
        f"{'':<42} {'calls':>6} {'no delay':>9} {'off':>9} {'on':>9} {'hidden':>8}   seconds a step, delay {args.delay}"
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        multiprocessing.spawn(worker, (args, f"{folder}/store", str(out)), nprocs=2)
        rows = json.loads(out.read_text())
    if args.out:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        figures = {"date": time.strftime("%Y-%m-%d"), **machine, "delay_s": args.delay, "steps": args.steps}
        args.out.write_text(json.dumps({**figures, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
