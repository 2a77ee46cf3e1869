"""Saving and loading the state of a run, beside torch.save, torch.distributed.checkpoint, the disk and a plain copy.

    python benchmarks/checkpoint.py --folder /data/scratch     # about four minutes; the folder's disk is what counts

Two processes hold a Llama of 93 million parameters with AdamW under dp=2, ZeRO stage 1: 1.1 GB of masters and moments,
each element on one of them. The contestants save and load these very tensors, in turns, so that a disk that changes its
mood does it to all of them; a figure is a median over rounds, a ratio the median of each round's. Everything is synced
to the disk in the time that is counted, also after `torch.save`, which does not do it by itself. Before it is read a
file is dropped from the page cache.

    save          ours, synchronous; each tensor hashed with SHA-256 on the way
    raw           the same bytes in one piece for each process: write and fsync, or read
    stall         how long an asynchronous save keeps training: ours, and DCP's async_save
    memory copy   the same bytes from one place in memory to another
    load          ours with every checksum compared (`full`), and without (`off`)
    reshard       ours for tp=2, in two worker processes, read, written, and read again to compare every tensor; DCP has
                  no such tool, and is given less to do: a load as the tensors are cut already, and a save of them
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing

from ultrascale.assembly import assemble, planned_groups
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.workers import Workers
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.mesh.axes import Mesh
from ultrascale.reshard import Layout, reshard

WORLD = 2
CONFIG: dict[str, Any] = {
    "run": {"steps": 1, "seed": 1},
    "model": {
        "family": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "vocab_size": 5000,
    },
    "batch": {"global_size": WORLD, "micro_size": 1, "sequence_length": 32},
    "data": {"train": "builtin:uneven"},
    "optimizer": {"lr": 1e-3},
    "parallel": {"dp": WORLD, "zero_stage": 1},
}
MIB = 1 << 20
MEMORY = 256 * MIB
"""Bound of each reshard."""


class Contest:
    """What each contestant does on one rank, and how long it took."""

    def __init__(self, rank: int, folder: Path, beside: Any) -> None:
        config = resolve(Config.model_validate(CONFIG), WORLD)
        mesh = Mesh.of(config)
        groups = create(mesh, planned_groups(config, mesh), Ledger())
        assembly = assemble(config, mesh, rank, groups, torch.device("cpu"))
        self.rank, self.folder, self.beside = rank, folder, beside
        assembly.optimizer.weights.settle()  # or a gather of first weights puts them back
        self.boxes = list(state_boxes(assembly.optimizer, owned=True))
        for box in self.boxes:  # zeros would be no fair content for a disk that packs them
            box.tensor.detach().normal_()
        self.tensors = {f"{rank}/{box.name}/{box.offset}": box.tensor.detach() for box in self.boxes}
        self.flat = torch.cat([t.reshape(-1) for t in self.tensors.values()])
        self.copy = torch.empty_like(self.flat)
        self.raw = self.flat.view(torch.uint8).numpy().data
        header: dict[str, Any] = {"config": config.model_dump(mode="json"), "axes": {}, "ties": {}, "data": {}}

        def snapshots(asynchronous: bool) -> Snapshots:
            optimizer, root = assembly.optimizer, folder / "ours"
            return Snapshots(optimizer, root, header, groups.world, None, "full", asynchronous)

        self.now, self.later = snapshots(False), snapshots(True)
        self.workers = Workers(WORLD if rank == 0 else 1, MEMORY)
        """Started in the first round, which is not counted, as those processes of DCP are that save and load."""
        self.under_way: Any = None
        self.saves = 0

    def bytes(self) -> int:
        count = torch.tensor([len(self.raw)])
        dist.all_reduce(count)
        return int(count)

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds until the last rank has done it, on a disk that has nothing left to do for those before it."""
        dist.barrier()
        if self.rank == 0:
            os.sync()
        dist.barrier()
        begun = time.perf_counter()
        work()
        seconds = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    def empty(self) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            os.sync()
        dist.barrier()

    def cold(self, path: Path) -> None:
        """Drops the files from the page cache."""
        dist.barrier()
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, snapshots: Snapshots) -> Path:
        self.saves += 1
        snapshots.save(self.saves, {})
        return snapshots.root / f"step-{self.saves:08d}"

    def raw_write(self) -> None:
        with open(self.folder / f"raw-{self.rank}", "wb", buffering=0) as file:
            for start in range(0, len(self.raw), 32 * MIB):
                file.write(self.raw[start : start + 32 * MIB])
            os.fsync(file.fileno())

    def torch_save(self) -> None:
        with open(self.folder / f"torch-{self.rank}.pt", "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def dcp_save(self) -> None:
        dcp.save(self.tensors, checkpoint_id=self.folder / "dcp")

    def dcp_begin(self) -> None:
        self.under_way = dcp.async_save(
            self.tensors, checkpoint_id=self.folder / "dcp-later", process_group=self.beside
        )

    # ---- loading -----------------------------------------------------------------------------------------------------

    def raw_read(self) -> None:
        target = self.copy.view(torch.uint8).numpy().data
        with open(self.folder / f"raw-{self.rank}", "rb", buffering=0) as file:
            for start in range(0, len(self.raw), 32 * MIB):
                file.readinto(target[start : start + 32 * MIB])

    def torch_load(self) -> None:
        for name, value in torch.load(self.folder / f"torch-{self.rank}.pt", weights_only=True).items():
            self.tensors[name].copy_(value)

    def dcp_load(self) -> None:
        dcp.load(self.tensors, checkpoint_id=self.folder / "dcp")

    # ---- resharding --------------------------------------------------------------------------------------------------

    def reshard(self, source: Path) -> None:
        if self.rank == 0:
            reshard(source, self.folder / "resharded", Layout(tp=2), self.workers)

    def dcp_reshard(self) -> None:
        dcp.load(self.tensors, checkpoint_id=self.folder / "dcp")
        dcp.save(self.tensors, checkpoint_id=self.folder / "dcp-again")

    def round(self) -> dict[str, float]:
        """Seconds of everything, once."""
        found: dict[str, float] = {}
        self.empty()
        where: list[Path] = []
        found["raw write"] = self.timed(self.raw_write)
        found["save, ours"] = self.timed(lambda: where.append(self.save(self.now)))
        found["save, torch.save"] = self.timed(self.torch_save)
        found["save, DCP"] = self.timed(self.dcp_save)
        found["memory copy"] = self.timed(lambda: self.copy.copy_(self.flat))
        found["stall, ours"] = self.timed(lambda: where.append(self.save(self.later)))
        self.later.wait()
        found["stall, DCP"] = self.timed(self.dcp_begin)
        self.under_way.result()
        readers: dict[str, tuple[Path, Callable[[], Any]]] = {
            "raw read": (self.folder / f"raw-{self.rank}", self.raw_read),
            "load, ours": (where[0], lambda: load(where[0], self.boxes, "full")),
            "load without checksums, ours": (where[0], lambda: load(where[0], self.boxes, "off")),
            "load, torch.load": (self.folder / f"torch-{self.rank}.pt", self.torch_load),
            "load, DCP": (self.folder / "dcp", self.dcp_load),
            "reshard, ours": (where[0], lambda: self.reshard(where[0])),
            "reshard, DCP": (self.folder / "dcp", self.dcp_reshard),
        }
        for name, (path, read) in readers.items():
            self.cold(path)
            found[name] = self.timed(read)
        return found

    def close(self) -> None:
        self.later.close()
        with self.workers:
            pass


RATIOS = {
    "save against the raw disk": ("raw write", "save, ours"),
    "save against torch.save": ("save, torch.save", "save, ours"),
    "save against DCP": ("save, DCP", "save, ours"),
    "stall against a memory copy": ("stall, ours", "memory copy"),
    "stall against DCP": ("stall, DCP", "stall, ours"),
    "load against the raw disk": ("raw read", "load, ours"),
    "load against torch.load": ("load, torch.load", "load, ours"),
    "load against DCP": ("load, DCP", "load, ours"),
    "reshard against DCP": ("reshard, DCP", "reshard, ours"),
}
"""Seconds over seconds: how many times as fast ours is; of the stall against a memory copy, how many times as long."""


def worker(rank: int, args: argparse.Namespace, folder: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    (Path(folder) / "files").mkdir(exist_ok=True)
    contest = Contest(rank, Path(folder) / "files", dist.new_group(backend="gloo"))
    size = contest.bytes()
    contest.round()  # the first makes buffers and finds its files in no cache
    rounds = []
    for number in range(args.rounds):
        rounds.append(contest.round())
        if rank == 0:
            print(f"round {number + 1} of {args.rounds}", flush=True)
    if rank == 0:
        seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        ratios = {name: statistics.median(one[a] / one[b] for one in rounds) for name, (a, b) in RATIOS.items()}
        Path(out).write_text(json.dumps({"bytes": size, "seconds": seconds, "ratios": ratios}))
    contest.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: the system's temporary one)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        out = Path(folder) / "out.json"
        multiprocessing.spawn(worker, (args, folder, str(out)), nprocs=WORLD)
        found = json.loads(out.read_text())
    print(f"{found['bytes'] / 1e6:.0f} MB in {WORLD} processes")
    for name, seconds in found["seconds"].items():
        print(f"{name:<32} {seconds:8.3f} s {found['bytes'] / 1e6 / seconds:8.0f} MB/s")
    for name, ratio in found["ratios"].items():
        print(f"{name:<32} {ratio:8.2f}")
    if args.out:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        figures = {"date": time.strftime("%Y-%m-%d"), **machine, "rounds": args.rounds}
        args.out.write_text(json.dumps({**figures, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
