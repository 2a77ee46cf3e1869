"""Training throughput side by side: ultrascale's trainer step against `transformers` with PyTorch's DDP and FSDP2.

    python benchmarks/train_throughput.py            # the axes, about five minutes on two cores
    python benchmarks/train_throughput.py --layouts zero_2   # ZeRO stages against DDP and fully_shard; also zero_4
    python benchmarks/train_throughput.py --steps 3 --layouts one,dp2

The same Llama (hidden 256, 4 layers, 8 heads, ffn 688, vocabulary 8192, sequences of 256, 4096 tokens a step, float32,
AdamW), the same tokens, one thread a process. All contestants run in turns within one go, so that a machine whose
speed drifts treats them alike; the figures are medians, and the ratios are what counts. The yardstick is the rate of a
plain float32 GEMM on one thread in the same run.
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

MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 688,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
}
SEQUENCE, TOKENS = 256, 4096
GLOBAL = TOKENS // SEQUENCE
LAYOUTS: dict[str, tuple[str, int, dict[str, object]]] = {
    # name: (contestant, processes, overrides of ultrascale)
    "transformers": ("transformers", 1, {}),
    "one": ("ultrascale", 1, {"batch.micro_size": 4}),
    "transformers_dp2": ("transformers", 2, {}),
    "dp2": ("ultrascale", 2, {"parallel.dp": 2, "batch.micro_size": 4}),
    "tp2": ("ultrascale", 2, {"parallel.tp": 2, "parallel.sequence_parallel": False, "batch.micro_size": 4}),
    "tp2_sp": ("ultrascale", 2, {"parallel.tp": 2, "batch.micro_size": 4}),
    # The head costs as much as two and a half layers: three layers against one layer and the head.
    "pp2": ("ultrascale", 2, {"parallel.pp": 2, "batch.micro_size": 2, "pipeline.layout": (3, 1)}),
}
AXES = tuple(LAYOUTS)
for _world in (2, 4):
    LAYOUTS[f"ddp_{_world}"] = ("transformers", _world, {})
    LAYOUTS[f"fsdp2_{_world}"] = ("transformers_fsdp2", _world, {})
    for _stage in range(4):
        _settings: dict[str, object] = {"parallel.dp": _world, "batch.micro_size": 4, "parallel.zero_stage": _stage}
        LAYOUTS[f"zero{_stage}_{_world}"] = ("ultrascale", _world, _settings)
ZERO = tuple(name for name in LAYOUTS if name not in AXES)
PAIRS = (
    ("one", "transformers"), ("dp2", "one"), ("dp2", "transformers_dp2"), ("tp2", "one"), ("tp2_sp", "one"),
    ("pp2", "one"),
    ("zero0_2", "ddp_2"), ("zero1_2", "ddp_2"), ("zero2_2", "fsdp2_2"), ("zero3_2", "fsdp2_2"),
    ("zero0_4", "ddp_4"), ("zero1_4", "ddp_4"), ("zero2_4", "fsdp2_4"), ("zero3_4", "fsdp2_4"),
)  # fmt: skip


def gemm_rate() -> float:
    """float32 FLOP/s of one thread on a GEMM of the model's size."""
    import torch

    a, b = torch.randn(1024, 256), torch.randn(256, 1376)
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(10):
            a @ b
        best = max(best, 10 * 2 * 1024 * 256 * 1376 / (time.perf_counter() - start))
    return best


def flops_per_token() -> float:
    """Model FLOPs of forward and backward, the causal half of attention counted."""
    h, f, layers = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["num_hidden_layers"]
    matmul = layers * (4 * h * h + 3 * h * f) + MODEL["vocab_size"] * h
    return 6 * matmul + 6 * layers * 2 * h * SEQUENCE / 2


def ultrascale_steps(overrides: Mapping[str, object]) -> Callable[[], float]:
    """A function that runs one step."""
    import torch
    import torch.distributed as dist

    from ultrascale.assembly import assemble, planned_groups
    from ultrascale.comm.ledger import Ledger
    from ultrascale.comm.process_groups import create
    from ultrascale.config.resolve import resolve
    from ultrascale.config.schema import Config
    from ultrascale.mesh.axes import Mesh
    from ultrascale.models.batch import MicroBatch
    from ultrascale.observe.memory import keep_freed_memory
    from ultrascale.step import train_step, with_denominators

    tree: dict[str, dict[str, object]] = {
        "run": {"steps": 1},
        "model": {"family": "llama", **MODEL},
        "batch": {"global_size": GLOBAL, "micro_size": 4, "sequence_length": SEQUENCE},
        "data": {"train": "builtin:uneven"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
    }
    for key, value in overrides.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    keep_freed_memory()  # as the trainer does
    config = resolve(Config.model_validate(tree), world)
    mesh, ledger = Mesh.of(config), Ledger()
    assembly = assemble(config, mesh, rank, create(mesh, planned_groups(config, mesh), ledger), torch.device("cpu"))
    replicas, micro = mesh.size(["dp"]), config.batch.micro_size
    generator = torch.Generator().manual_seed(mesh.index(rank, ["dp"]))
    step = 0

    def run() -> float:
        nonlocal step
        step += 1
        ledger.clear()
        batches = []
        for _ in range(GLOBAL // replicas // micro):
            tokens = torch.randint(0, MODEL["vocab_size"], (SEQUENCE + 1, micro), generator=generator)
            positions = torch.arange(SEQUENCE).unsqueeze(1).expand(SEQUENCE, micro)
            batches.append(MicroBatch(tokens[:-1], (tokens[1:],), positions))
        return train_step(assembly, with_denominators(assembly, batches), step).report["loss"]

    return run


def transformers_steps(fully_sharded: bool, sequences: int = 4) -> Callable[[], float]:
    """The same of LlamaForCausalLM, under DDP or FSDP2 when there are several processes."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        **MODEL,
        "attn_implementation": "sdpa",
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    wrapped: Any = model
    if fully_sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif world > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(rank)
    micro_batches = GLOBAL // world // sequences

    def run() -> float:
        total = 0.0
        for number in range(micro_batches):
            tokens = torch.randint(0, MODEL["vocab_size"], (sequences, SEQUENCE), generator=generator)
            last = number == micro_batches - 1
            if world > 1 and not fully_sharded:
                wrapped.require_backward_grad_sync = last
            loss = wrapped(input_ids=tokens, labels=tokens).loss / micro_batches
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return run


PARTS = {
    "matrix products of layers, head and weight gradients": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"),
    "attention (PyTorch's flash kernel for CPU), forward and backward": ("aten::_scaled_dot_product",),
    "exponentials and sums of the loss": ("aten::exp_", "aten::amax", "aten::sum", "aten::sub_", "aten::gather"),
    "optimizer, norm, zeroing": (
        "aten::sqrt",
        "aten::addcdiv_",
        "aten::addcmul_",
        "aten::linalg_vector_norm",
        "aten::fill_",
    ),
}


def profile() -> None:
    """Prints the shares of a step of one process, by torch's profiler."""
    import torch

    torch.set_num_threads(1)
    step = ultrascale_steps(LAYOUTS["one"][2])
    step()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    shares = dict.fromkeys([*PARTS, "everything else"], 0.0)
    for event in profiler.key_averages():
        exact = next((part for part, names in PARTS.items() if event.key in names), None)
        prefix = next((part for part, names in PARTS.items() if event.key.startswith(names[0] + "_")), None)
        shares[exact or prefix or "everything else"] += event.self_cpu_time_total
    total = sum(shares.values())
    for part, time_ in shares.items():
        print(f"{part:66} {time_ / total:6.1%}")


def worker(name: str) -> None:
    """One process of one contestant: runs a step for each line on standard input, and answers with a line."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    contestant, world, overrides = LAYOUTS[name]
    if world > 1:
        dist.init_process_group("gloo")
    if contestant == "ultrascale":
        step = ultrascale_steps(overrides)
    else:
        step = transformers_steps(fully_sharded=contestant == "transformers_fsdp2")
    rank = dist.get_rank() if world > 1 else 0

    def timed() -> dict[str, float]:
        start, cpu = time.perf_counter(), time.process_time()
        loss = step()
        if world > 1:
            dist.barrier()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"rank": rank, "s": seconds, "cpu": cpu, "peak": peak, "loss": loss}

    answer(timed)


def figures_of(contestant: Contestant) -> dict[str, float]:
    seconds = statistics.median(max(a["s"] for a in step) for step in contestant.steps)
    cpu = statistics.median(sum(a["cpu"] for a in step) for step in contestant.steps)
    return {
        "processes": contestant.world,
        "tokens_per_s": TOKENS / seconds,
        "tokens_per_cpu_s": TOKENS / cpu,
        "peak_memory_mib": max(a["peak"] for a in contestant.steps[-1]) / 2**20,
        "loss": statistics.mean(a["loss"] for a in contestant.steps[-1]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="counted steps of each contestant (default 8)")
    parser.add_argument("--layouts", default=",".join(AXES), help="comma-separated names, or zero_2, zero_4")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--profile", action="store_true", help="print where the time of one process goes, and end")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return 0

    if arguments.profile:
        profile()
        return 0

    import torch
    import transformers

    torch.set_num_threads(1)
    asked = arguments.layouts
    names = [name for name in ZERO if name.endswith(asked[-2:])] if asked in ("zero_2", "zero_4") else asked.split(",")
    contestants = [Contestant(__file__, name, LAYOUTS[name][1], 1, 29700 + i) for i, name in enumerate(names)]
    rates = []
    try:
        for number in range(arguments.steps + 2):  # two to warm up
            for contestant in contestants:
                contestant.step(counted=number >= 2)
            rates.append(gemm_rate())
            print(f"round {number + 1}/{arguments.steps + 2}", file=sys.stderr, flush=True)
    finally:
        for contestant in contestants:
            contestant.close()
    rate = statistics.median(rates)
    figures = {c.name: figures_of(c) for c in contestants}
    ratios = {
        f"{a} / {b}": figures[a]["tokens_per_s"] / figures[b]["tokens_per_s"]
        for a, b in PAIRS
        if a in figures and b in figures
    }
    print(f"float32 GEMM of one thread: {rate / 1e9:.1f} GFLOP/s; {flops_per_token() / 1e6:.1f} MFLOP a token")
    print(f"{'layout':18} {'processes':>9} {'tokens/s':>9} {'tokens/CPU-s':>13} {'peak MiB':>9} {'share of GEMM':>14}")
    for name, f in figures.items():
        f["share_of_gemm"] = f["tokens_per_s"] * flops_per_token() / rate / f["processes"]
        print(
            f"{name:18} {f['processes']:9.0f} {f['tokens_per_s']:9.0f} {f['tokens_per_cpu_s']:13.0f} "
            f"{f['peak_memory_mib']:9.0f} {f['share_of_gemm']:14.1%}"
        )
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    if arguments.output:
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "gemm_gflops": rate / 1e9,
            "steps": arguments.steps,
        }
        arguments.output.write_text(json.dumps({**about, "figures": figures, "ratios": ratios}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
