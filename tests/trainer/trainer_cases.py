"""Runs of the product's own `trainer.run` and `train.main`, small enough for a test, in three ways.

train(world, folder, overrides)      in a pool (world 1: in this process): quick, and the state of memory comes back
Job([...], world)                    real processes with torchrun's environment, forked from a server that has torch:
                                     they can be killed and signalled, and their exit codes are their own
torchrun([...], world)               the real launcher, seconds to start: for what it prints itself
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from safetensors.numpy import load_file

from pool import THREADS, Context, forking, pool
from small import BASE as SMALL
from small import config_of
from ultrascale import trainer, wishes
from ultrascale.checkpoint.state import state_boxes
from ultrascale.data.loader import Data

BASE: dict[str, Any] = {
    **SMALL,
    "model.tie_word_embeddings": True,
    "model.num_hidden_layers": 2,
    "batch.micro_size": 2,
    "data.validation": "builtin:uneven",
    "optimizer.name": "adamw",
    "optimizer.lr": 0.01,
    "optimizer.weight_decay": 0.1,
    "optimizer.max_norm": 1.0,
    "precision.compute": "float32",
    "observe.replica_check_every": 1,
}
TIMES = ("tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes")
"""Keys of a line of metrics.jsonl that no two runs share."""

State = dict[str, tuple[tuple[int, ...], bytes]]
"""Name of a master or a moment → (offset of this rank's box, its bytes)."""


@dataclass
class Outcome:
    """What one rank saw."""

    code: int | None
    """None: `run` raised; see `error`."""
    state: State = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Step → the sample numbers of this rank."""
    evaluations: int = 0
    error: str = ""


Fault = Callable[[int], contextlib.AbstractContextManager[Any]]
"""Takes the rank; product code is broken while it is entered. A function of a module's top level: it is pickled."""


class Crash(Exception):
    """What a fault raises: the process would have died here."""


def every_rank_dies_in_step_6(rank: int) -> Any:
    original = trainer.train_step

    def dying(assembly: Any, batch: Any, step: int, *rest: Any) -> Any:
        if step == 6:
            raise Crash
        return original(assembly, batch, step, *rest)

    return patch.object(trainer, "train_step", dying)


def run_rank(context: Context | None, world: int, overrides: Mapping[str, Any], faults: Sequence[Fault]) -> Outcome:
    """One rank of `train`: the product's own `run`, on groups that the pool keeps."""
    config = config_of({**BASE, **overrides}, world)
    rank = context.rank if context else 0
    held: list[trainer.Trainer] = []
    outcome = Outcome(None)
    made, batch, evaluate = trainer.Trainer.__init__, Data.batch, trainer.evaluate

    def make(self: trainer.Trainer, *args: Any) -> None:
        made(self, *args)
        held.append(self)

    def watched(self: Data, step: int, *rest: Any) -> Any:
        arrays = batch(self, step, *rest)
        outcome.samples[step] = [int(n) for micro in arrays for n in micro.samples]
        return arrays

    def counted(*args: Any) -> float:
        outcome.evaluations += 1
        return evaluate(*args)

    with contextlib.ExitStack() as patches:
        enter = patches.enter_context
        enter(patch.object(trainer.Trainer, "__init__", make))
        enter(patch.object(Data, "batch", watched))
        enter(patch.object(trainer, "evaluate", counted))
        # The pool's workers have a handler of their own, and one process group for good.
        enter(patch.object(wishes.signal, "signal", lambda number, handler: None))
        enter(patch.object(trainer.dist, "init_process_group", lambda *args, **kwargs: None))
        enter(patch.object(trainer.dist, "destroy_process_group", lambda *args: None))
        if context is not None:
            enter(
                patch.object(
                    trainer, "create", lambda mesh, plan, ledger, _: context.groups(mesh, plan).with_ledger(ledger)
                )
            )
        for broken in faults:
            enter(broken(rank))
        try:
            outcome.code = trainer.run(config, device="cpu", rank=rank, world_size=world, local_rank=rank)
        except Crash:
            outcome.error = "crash"
    if held:
        outcome.state = {
            box.name: (tuple(box.offset), box.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
            for box in state_boxes(held[0].assembly.optimizer, owned=False)
        }
    return outcome


def train(
    world: int, folder: Path, overrides: Mapping[str, Any] | None = None, faults: Sequence[Fault] = ()
) -> list[Outcome]:
    """A run in `folder` on `world` ranks, BASE with some dotted keys set otherwise."""
    settings = {"run.dir": str(folder), **(overrides or {})}
    if world == 1:
        return [run_rank(None, 1, settings, faults)]
    return pool(world).run(run_rank, world, settings, tuple(faults))


def codes(outcomes: Sequence[Outcome]) -> set[int | None]:
    return {outcome.code for outcome in outcomes}


# ---- what a run leaves ----------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n"), f"{path} ends in the middle of a line"
    return [json.loads(line) for line in text.splitlines()]


def metrics(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "metrics.jsonl")


def numbers(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what is measured."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(folder)]


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint put together from its files, by the format's description and not by our reader."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    stored = {name: load_file(checkpoint / name) for name in manifest["files"]}
    found = {}
    for name, entry in manifest["tensors"].items():
        tensor = found[name] = np.full(entry["shape"], np.nan)
        for shard in entry["shards"]:
            place = tuple(slice(o, o + n) for o, n in zip(shard["offset"], shard["shape"], strict=True))
            tensor[place] = stored[shard["file"]][shard["key"]]
    return found


# ---- real processes -------------------------------------------------------------------------------------------------


def yaml_file(path: Path, overrides: Mapping[str, Any] | None = None) -> Path:
    """BASE with some dotted keys set otherwise, as a config file."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in {**BASE, **(overrides or {})}.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    path.write_text(yaml.safe_dump(tree))
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Job:
    """`python -m ultrascale.train ARGUMENTS` on `world` processes, in torchrun's environment.

    fault      (module, function, …) called with the rank, and what else there is, in each process before it starts,
               to break something there
    per_host   as if every so many processes were on a host of their own
    """

    def __init__(
        self,
        arguments: Sequence[str],
        world: int,
        logs: Path,
        fault: tuple[Any, ...] | None = None,
        per_host: int | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"{rank}.log" for rank in range(world)]
        multiprocessing = forking()
        torchrun = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = []
        for rank, log in enumerate(self.logs):
            environment = (
                {**torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank % (per_host or world))} if world > 1 else {}
            )
            process = multiprocessing.Process(
                target=_main, args=([*arguments], environment, str(log), rank, fault), daemon=True
            )
            process.start()
            self.processes.append(process)

    def send(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(self, seconds: float = 40.0) -> list[int | None]:
        """Exit codes by rank; None for a process that still runs after that time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _main(
    arguments: list[str], environment: dict[str, str], log: str, rank: int, fault: tuple[Any, ...] | None
) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the test run
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1)  # noqa: SIM115 - for as long as the process lives
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    gc.freeze()  # as in the pool's workers
    from ultrascale.train import main

    code = 1
    try:
        if fault is not None:
            getattr(importlib.import_module(fault[0]), fault[1])(rank, *fault[2:])
        code = main([*arguments, "--device", "cpu"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.exit(code)


def torchrun(arguments: Sequence[str], world: int, python: str = sys.executable) -> subprocess.Popen[str]:
    """The real launcher, whose workers `python` runs; they are one session, which `ended` ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", f"--master-port={free_port()}",
         "-m", "ultrascale.train", *arguments, "--device", "cpu"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **THREADS, "GLOO_SOCKET_IFNAME": "lo", "PYTHON_EXEC": python},
    )  # fmt: skip


def workers(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Rank → process id of a launcher's workers."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == launcher.pid:
                    environment = dict(
                        item.split("=", 1) for item in (folder / "environ").read_text().split("\0") if "=" in item
                    )
                    found[int(environment["RANK"])] = int(folder.name)
    return found


@contextlib.contextmanager
def ended(launcher: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Nothing of the launcher's session outlives the block."""
    try:
        yield launcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        if launcher.stdout:
            launcher.stdout.close()


def until(true: Callable[[], Any], seconds: float = 40.0) -> Any:
    """What the function returns once it is true; fails when it is not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            if found := true():
                return found
        time.sleep(0.02)
    raise AssertionError(f"{true} was not true within {seconds:g} s")
