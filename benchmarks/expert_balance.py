"""How even experts get under what keeps them even: nothing, biases of the routers, the auxiliary loss.

    python benchmarks/expert_balance.py --output benchmarks/results/expert_balance_cpu.json    # three minutes

A mixture of experts (hidden 64, 2 layers, 8 experts, 2 of them for a token) learns bytes of the source of Python's
standard library for 200 steps of 128 sequences × 64 tokens, in float32 on one core. A layer's load is the tokens of its
busiest expert over the mean; 4 is the worst there is, two experts that get everything. The curve of a run is the load
of its worst layer. `within` is the step from which on that curve, as a mean over 20 steps, stays under 1.2. Beside the
figures a picture is written, F.svg for F.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ultrascale.assembly import assemble, planned_groups
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data
from ultrascale.mesh.axes import Mesh
from ultrascale.observe.chart import line_chart
from ultrascale.observe.expert_load import balance_figures
from ultrascale.step import step_batch, train_step

STEPS, WINDOW, EVEN = 200, 20, 1.2
SEQUENCES, LENGTH = 128, 64
MODEL: dict[str, Any] = {
    "family": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 257,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "tie_word_embeddings": True,
    # So narrow a model learns faster from larger initial weights than the usual 0.02.
    "initializer_range": 0.06,
}
RUNS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "auxiliary loss": {"router_aux_loss_coef": 0.01},
    **{f"biases {rate}": {"router_bias_update_rate": rate} for rate in (0.001, 0.003, 0.01)},
}
DRAWN = ("biases 0.003", "auxiliary loss", "nothing")


def train(more: dict[str, Any], seed: int) -> dict[str, Any]:
    """Loads of each layer and the loss of each step, of one run."""
    config = resolve(
        Config.model_validate(
            {
                "run": {"steps": STEPS, "seed": seed},
                "model": {**MODEL, **more},
                "batch": {"global_size": SEQUENCES, "micro_size": SEQUENCES, "sequence_length": LENGTH},
                "data": {"train": "builtin:stdlib", "tokenizer": "bytes"},
                "optimizer": {"name": "adamw", "lr": 1e-3},
                "schedule": {"name": "constant", "warmup_steps": 20},
                "precision": {"compute": "float32"},
            }
        ),
        1,
    )
    mesh = Mesh.of(config)
    assembly = assemble(config, mesh, 0, create(mesh, planned_groups(config, mesh), Ledger()), torch.device("cpu"))
    data, loads, losses, biases = Data(config), [], [], (0.0, 0.0)
    for step in range(1, STEPS + 1):
        result = train_step(assembly, step_batch(assembly, data.batch(step, 0, 1, SEQUENCES)), step)
        assert result.load is not None
        loads.append(balance_figures(result.load.tolist())["expert_load"])
        losses.append(result.report["lm_loss"])
        biases = result.router_bias_range or biases
    return {"load": loads, "lm_loss": losses, "bias_range": biases}


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """What a run comes to at its end."""
    worst = [max(layers) for layers in run["load"]]
    smooth = [sum(worst[end - WINDOW : end]) / WINDOW for end in range(WINDOW, STEPS + 1)]
    late = [step for step, value in enumerate(smooth, WINDOW) if value >= EVEN]
    last = run["load"][-WINDOW:]
    return {
        "load_of_worst_layer": smooth[-1],
        "load_by_layer": [sum(column) / WINDOW for column in zip(*last, strict=True)],
        "lowest_step": min(worst),
        "within": (late[-1] + 1 if late[-1] < STEPS else None) if late else WINDOW,
        "lm_loss": sum(run["lm_loss"][-WINDOW:]) / WINDOW,
        "bias_range": run["bias_range"],
    }


def picture(curves: dict[str, list[float]]) -> str:
    """SVG of the runs in DRAWN."""
    series = {name: list(enumerate(curves[name], 1)) for name in DRAWN if name in curves}
    return line_chart("load of the worst layer", series) + "\n"


def one_line_each(report: dict[str, Any]) -> str:
    """JSON with a line for each run, and not for each of its steps."""
    parts = []
    for name, content in report.items():
        rows = content if isinstance(content, dict) and name != "machine" else None
        text = (
            json.dumps(content)
            if rows is None
            else "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in rows.items()) + "\n }"
        )
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, metavar="F", help="write figures and curves to F (JSON), a picture beside"
    )
    parser.add_argument("--only", choices=RUNS, nargs="+", default=list(RUNS), help="some of the runs (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found, curves = {}, {}
    for name in arguments.only:
        more, begun = RUNS[name], time.process_time()
        run = train(more, arguments.seed)
        seconds = time.process_time() - begun
        found[name] = {"model": more, **figures(run), "cpu_seconds": seconds}
        curves[name] = [round(max(layers), 4) for layers in run["load"]]
        said = found[name]
        print(
            f"{name:15} {more!s:40} load {said['load_of_worst_layer']:.3f} (layers "
            f"{', '.join(f'{load:.3f}' for load in said['load_by_layer'])}), under {EVEN} from step {said['within']}, "
            f"loss {said['lm_loss']:.4f}, {seconds:.0f} s of one core",
            flush=True,
        )
    if arguments.output:
        machine = {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
        report = {"machine": machine, "seed": arguments.seed, "figures": found, "load_of_worst_layer": curves}
        arguments.output.write_text(one_line_each(report))
        arguments.output.with_suffix(".svg").write_text(picture(curves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
