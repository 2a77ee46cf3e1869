"""Context parallelism on a CPU: each method beside one process, what of its messages shows, and a 128k-token sequence.

    python benchmarks/context_parallel.py           # about two minutes on two cores
    python benchmarks/context_parallel.py --long    # 131,072 tokens on four processes and on one, about eight minutes

A Llama (hidden 256, 4 layers, 8 query and 4 KV heads, vocabulary 512) on one sequence of 4096 tokens, float32, forward,
backward and update. One process has as many threads as two processes have together. All contestants run in turns; the
figures are medians. *Exposed* is the time that a rank stands in waits for messages of attention, over the step's time;
*balance* is how much of the time that ranks compute attention the quickest rank computes, contiguous split beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contestants import Contestant, answer

SHORT: dict[str, object] = {
    "model.hidden_size": 256,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "model.intermediate_size": 688,
    "model.vocab_size": 512,
    "model.max_position_embeddings": 1 << 17,
    "batch.sequence_length": 4096,
}
LONG: dict[str, object] = {
    **SHORT,
    "model.hidden_size": 64,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 2,
    "model.head_dim": 16,
    "model.intermediate_size": 128,
    "batch.sequence_length": 1 << 17,
}


def ring(size: int, **more: object) -> dict[str, object]:
    return {"parallel.cp": size, "context.method": "ring", **{k.replace("__", "."): v for k, v in more.items()}}


# name: (threads of a process, processes, overrides)
CONTESTANTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "one process, 2 threads": (2, 1, SHORT),
    "ring": (1, 2, {**SHORT, **ring(2)}),
    "ring, contiguous": (1, 2, {**SHORT, **ring(2, context__split="contiguous")}),
    "all-gather": (1, 2, {**SHORT, "parallel.cp": 2, "context.method": "allgather"}),
    "ulysses": (1, 2, {**SHORT, "parallel.cp": 2, "context.method": "ulysses"}),
}
LONG_CONTESTANTS: dict[str, tuple[int, int, dict[str, object]]] = {
    "128k, ring on 4 processes": (1, 4, {**LONG, **ring(4)}),
    "128k, one process, 2 threads": (2, 1, LONG),
}
ALL = {**CONTESTANTS, **LONG_CONTESTANTS}


def steps_of(overrides: Mapping[str, object]) -> Callable[[], dict[str, float]]:
    """A function that runs a step, and says what it spent on attention: waits for its messages, and computing it."""
    import torch
    import torch.distributed as dist

    from ultrascale.assembly import assemble, planned_groups
    from ultrascale.comm.ledger import Ledger
    from ultrascale.comm.process_groups import create
    from ultrascale.config.resolve import resolve
    from ultrascale.config.schema import Config
    from ultrascale.data.loader import Data
    from ultrascale.mesh.axes import Mesh
    from ultrascale.observe.memory import keep_freed_memory
    from ultrascale.step import step_batch, train_step

    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 1},
        "model": {"family": "llama"},
        "batch": {"global_size": 1, "micro_size": 1},
        "data": {"train": "builtin:uneven"},
        "optimizer": {"lr": 1e-3},
    }
    for key, value in overrides.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    parallel = dist.is_initialized()
    config = resolve(Config.model_validate(tree), dist.get_world_size() if parallel else 1)
    rank = dist.get_rank() if parallel else 0
    keep_freed_memory()  # as the trainer does
    mesh, ledger = Mesh.of(config), Ledger()
    assembly = assemble(config, mesh, rank, create(mesh, planned_groups(config, mesh), ledger), torch.device("cpu"))
    data, step = Data(config), 0
    (stage,) = assembly.stages.values()
    spent = _watch(stage.build.attention.meeting.backend, ledger)  # type: ignore[attr-defined]

    def run() -> dict[str, float]:
        nonlocal step
        step += 1
        ledger.clear()
        spent.update(computing=0.0, waiting=0.0)
        loss = train_step(assembly, step_batch(assembly, data.batch(1, 0, 1, 1)), step).report["loss"]
        sent = sum(row.bytes for row in ledger.rows if row.phase == "attention")
        return {"loss": loss, "sent": float(sent), **spent}

    return run


def _watch(backend: Any, ledger: Any) -> dict[str, float]:
    """Seconds in the attention kernels, and in waits for messages that were issued for attention."""
    from ultrascale.comm.collectives import Pending

    spent = {"computing": 0.0, "waiting": 0.0}

    def timed(function: Callable[..., Any], key: str, counts: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            if counts(*args):
                spent[key] += time.perf_counter() - start
            return result

        return wrapped

    for name in ("forward", "backward"):
        setattr(backend, name, timed(getattr(backend, name), "computing", lambda *_: True))
    issued: set[int] = set()
    made = Pending.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        (issued.add if ledger.phase == "attention" else issued.discard)(id(self))

    Pending.__init__ = remember  # type: ignore[method-assign]
    Pending.wait = timed(Pending.wait, "waiting", lambda self: id(self) in issued)  # type: ignore[method-assign]
    return spent


def worker(name: str) -> None:
    """One process: a step for each line on standard input, answered with a line."""
    import torch
    import torch.distributed as dist

    threads, world, overrides = ALL[name]
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo")
    step = steps_of(overrides)

    def timed() -> dict[str, float]:
        start = time.perf_counter()
        seen = step()
        if world > 1:
            dist.barrier()
        seconds = time.perf_counter() - start
        return {"s": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, **seen}

    answer(timed)


def figures_of(contestant: Contestant, tokens: int) -> dict[str, float]:
    def median(of: Callable[[list[dict[str, float]]], float]) -> float:
        return statistics.median(of(step) for step in contestant.steps)

    return {
        "processes": contestant.world,
        "threads": contestant.threads,
        "tokens_per_s": tokens / median(lambda step: max(a["s"] for a in step)),
        "exposed_fraction": median(lambda step: statistics.mean(a["waiting"] / a["s"] for a in step)),
        "attention_balance": median(lambda s: min(a["computing"] for a in s) / max(a["computing"] for a in s)),
        "sent_bytes_per_rank": median(lambda step: max(a["sent"] for a in step)),
        "peak_memory_mib": max(a["peak"] for a in contestant.steps[-1]) / 2**20,
        "loss": contestant.steps[0][0]["loss"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each contestant (default 6)")
    parser.add_argument("--long", action="store_true", help="one step of 131,072 tokens instead")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return 0

    import torch

    names = LONG_CONTESTANTS if arguments.long else CONTESTANTS
    tokens = int(str((LONG if arguments.long else SHORT)["batch.sequence_length"]))
    figures = {}
    # A long one has the machine, and its memory, for itself.
    for group in [[name] for name in names] if arguments.long else [list(names)]:
        contestants = [
            Contestant(__file__, name, ALL[name][1], ALL[name][0], 29800 + i) for i, name in enumerate(group)
        ]
        rounds = 1 if arguments.long else arguments.steps + 1
        for number in range(rounds):
            for contestant in contestants:
                contestant.step(counted=arguments.long or number > 0)
            print(f"{', '.join(group)}: round {number + 1}/{rounds}", file=sys.stderr, flush=True)
        for contestant in contestants:
            contestant.close()
            figures[contestant.name] = figures_of(contestant, tokens)
    first = "128k, one process, 2 threads" if arguments.long else "one process, 2 threads"
    for name, values in figures.items():
        values["tokens_per_s_over_one_process"] = values["tokens_per_s"] / figures[first]["tokens_per_s"]
        print(
            f"{name:30} {values['tokens_per_s']:8.0f} tokens/s ({values['tokens_per_s_over_one_process']:.2f} of one "
            f"process)  exposed {values['exposed_fraction']:5.1%}  balance {values['attention_balance']:4.0%}  sent "
            f"{values['sent_bytes_per_rank'] / 2**20:7.1f} MiB  peak {values['peak_memory_mib']:6.0f} MiB"
        )
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
