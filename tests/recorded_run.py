"""A run folder as a trainer leaves it, written from a simulation instead of a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.simulate import simulate


def write_manifest(folder: Path, plan: Plan, replicas: int = 1, hosts: tuple[str, ...] = ("a",)) -> None:
    """pp is the outer axis, dp the inner one; ranks are dealt to the hosts in order."""
    world = plan.ranks * replicas
    per_host = -(-world // len(hosts))
    manifest = {
        "world_size": world,
        "axes": {"pp": plan.ranks, "dp": replicas},
        "ranks": [
            {
                "rank": rank,
                "coordinates": {"pp": rank // replicas, "dp": rank % replicas},
                "host": hosts[rank // per_host],
                "device": "cpu",
            }
            for rank in range(world)
        ],
        "schedule": {
            "name": plan.name,
            "stages": plan.stages,
            "micro_batches": plan.micro_batches,
            "layers": [[stage] for stage in range(plan.stages)],
        },
        "precision": {"compute": "float32"},
        "parameters": 1234,
        "versions": {"ultrascale": "0"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_timelines(
    folder: Path, plan: Plan, costs: Costs, steps: int = 3, replicas: int = 1, clocks: tuple[float, ...] = ()
) -> None:
    """As the engine records them: an action's start is when the list came to it, so that waiting for a message is in
    it. `clocks` are added to the times of each pp coordinate."""
    events = simulate(plan, costs).events
    for rank, row in enumerate(events):
        shift = clocks[rank] if clocks else 0.0
        lines = []
        for step in range(1, steps + 1):
            clock = 1000.0 * step + shift
            called = clock
            for event in row:
                action = event.action
                lines.append(
                    {
                        "step": step,
                        "kind": str(action.kind),
                        "stage": action.stage,
                        "micro_batch": action.micro_batch,
                        "start": called,
                        "end": clock + event.end,
                        "action": str(action),
                    }
                )
                called = clock + event.end
        for replica in range(replicas):
            path = folder / f"timeline-{rank * replicas + replica}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder: Path, steps: int = 5, state: str = "finished") -> None:
    """status, metrics, events and ledger."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"state": state, "step": steps, "reason": None, "exit_code": 0}))
    lines(folder / "metrics.jsonl", [metrics(step) for step in range(1, steps + 1)])
    lines(
        folder / "events.jsonl",
        [
            {"time": 1.7e9, "event": "start", "step": 0},
            {"time": 1.7e9, "event": "memory", "step": steps, "peak_bytes_by_rank": [{"peak": 3 << 30}, {"peak": 7}]},
            {"time": 1.7e9, "event": "stop", "step": steps, "reason": "<script>alert(1)</script>"},
        ],
    )
    ledger = [
        {"axes": ["dp"], "op": "all_reduce", "phase": "reduce", "calls": 2, "bytes": 3 << 20},
        {"axes": ["pp"], "op": "send", "phase": "forward", "calls": 8, "bytes": 1 << 20},
    ]
    (folder / "ledger.json").write_text(json.dumps(ledger))


def metrics(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 5 / step,
        "lm_loss": 5 / step,
        "lr": 3e-4,
        "grad_norm": None if step == 2 else 1.0,
        "tokens": 100 * step,
        "tokens_per_s": 1e4,
        "step_time_s": 0.1,
        "mfu": None,
        "peak_memory_bytes": 1 << 30,
        **({"validation_loss": 6 / step} if step % 2 else {}),
    }


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
