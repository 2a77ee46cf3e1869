"""Every pipeline schedule executed by real processes, against the simulator and against torch.distributed.pipelining.

    python benchmarks/pipeline_schedules.py                                   # all schedules, about five minutes
    python benchmarks/pipeline_schedules.py --ranks 8 --micro-batches 16 --schedules 1f1b,zb_h1,dualpipe

Stages are stand-ins that sleep for the stated time in forward, in the input gradient and in the weight gradient, so
that a machine with two cores plays one with many. Everything else is real: the engine, its messages over gloo, the
gradient sink. The measured makespan is from the first start to the last end over all ranks by one clock; the predicted
one is the simulator's for the same costs, with the time of a message measured beforehand in the same run. Where PyTorch
has a schedule of the same name it runs the same sleeps, in turns with ours, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.kernels.attention_reference import ReferenceAttention
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.groups import group_plan
from ultrascale.models.batch import MicroBatch, StepBatch
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.gradients import Gradients
from ultrascale.parallel.layout import Constant, Kind, Layout, Use
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.objective import Objective, Term
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.shards import Sharding
from ultrascale.parallel.store import Store
from ultrascale.pipeline.actions import Plan
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.engine import Engine
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules.registry import SCHEDULES, find
from ultrascale.pipeline.simulate import simulate
from ultrascale.precision.policy import Policy

SHAPE = (64, 1, 64)
"""Of what stages hand on: float32, 16 KiB."""
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Ours → PyTorch's."""


@dataclass(frozen=True)
class Sleeps:
    """Seconds of one chunk: a rank's work is the same whatever the number of its stages."""

    forward: float
    input: float
    weight: float

    def of_chunk(self, virtual_stages: int) -> Sleeps:
        return Sleeps(*(seconds / virtual_stages for seconds in (self.forward, self.input, self.weight)))


# ---- ours ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SleepingWeight:
    seconds: float

    def issue(self) -> None:
        pass

    def run(self) -> None:
        time.sleep(self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, sleeps: Sleeps, current: Pass) -> torch.Tensor:
        ctx.weight, ctx.sleeps, ctx.current = weight, sleeps, current
        time.sleep(sleeps.forward)
        return x + 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        current: Pass = ctx.current
        assert current.sink is not None
        time.sleep(ctx.sleeps.input)
        current.sink.accumulate(ctx.weight, dy.sum().view(1), current.stage, current.micro_batch)
        current.sink.defer(_SleepingWeight(ctx.sleeps.weight), current.stage, current.micro_batch)
        return dy, None, None, None


class SleepingStage(Module):
    """A stage of one parameter whose work is to sleep."""

    weight: torch.Tensor

    def __init__(self, build: Build, stage: int, last: bool, sleeps: Sleeps) -> None:
        super().__init__(build)
        layout = Layout(f"stage.{stage}", (1,), {}, Use.WHOLE, None, Constant(1.0), False, 1.0, {}, Kind.NORM)
        self.declare("weight", layout)
        self.last, self.sleeps = last, sleeps

    def units(self) -> list[tuple[str, nn.Module]]:
        return [("sleep", self)]

    def forward(self, hidden: torch.Tensor | None, batch: MicroBatch, current: Pass) -> Any:
        x = torch.zeros(SHAPE, requires_grad=current.sink is not None) if hidden is None else hidden
        out = _Sleep.apply(x, self.weight, self.sleeps, current)
        return {"sum": out.sum()} if self.last else out


Moments = tuple[float, float, float, float]
"""Of one step on one rank, by one clock: first action's start, last one's end; start and end of the whole call."""


def ours(plan: Plan, mesh: Mesh, rank: int, pipeline: Group, sleeps: Sleeps) -> Callable[[], Moments]:
    """A function that runs a step."""
    policy = Policy(*[torch.float32] * 4)
    alone = Group((), (rank,), 0, None, pipeline.ledger)
    build = Build(mesh, rank, alone, False, policy, "none", ContextAttention.of_one_rank(rank, ReferenceAttention()))
    chunk = sleeps.of_chunk(max(len(plan.stages_of(r)) for r in range(plan.ranks)) if _single_copy(plan) else 1)
    stages = {s: SleepingStage(build, s, s == plan.stages - 1, chunk) for s in plan.stages_of(rank)}
    units = {stage: module.units() for stage, module in stages.items()}
    store = Store(units, mesh, rank, policy, Sharding(0, ()), lambda axes: alone, lambda held: alone, 1 << 20)
    store.materialise(torch.device("cpu"), 0)
    gradients = Gradients(store, deterministic=True)
    objective = Objective({"sum": Term("rows", 1.0)})
    engine = Engine(plan, stages, pipeline, objective, gradients, None, lambda sequences: torch.empty(SHAPE))
    tokens = torch.zeros(SHAPE[:2], dtype=torch.int64)
    batch = StepBatch([MicroBatch(tokens, (tokens,), tokens)] * plan.micro_batches, {"rows": 1})

    def run() -> Moments:
        engine.timeline = []
        start = time.perf_counter()
        engine.run(batch)
        gradients.finish()
        return engine.timeline[0].start, engine.timeline[-1].end, start, time.perf_counter()

    return run


def _single_copy(plan: Plan) -> bool:
    return all(len(ranks) == 1 for ranks in plan.placement)


# ---- PyTorch's ----------------------------------------------------------------------------------------------------


class _SleepInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeps: Sleeps) -> torch.Tensor:
        ctx.sleeps = sleeps
        time.sleep(sleeps.forward)
        return x + 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        time.sleep(ctx.sleeps.input)
        return dy.contiguous(), None  # or PyTorch's pipelining could not send it


class _SleepWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, sleeps: Sleeps) -> torch.Tensor:
        ctx.sleeps = sleeps
        return weight * 0

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        time.sleep(ctx.sleeps.weight)
        return dy * 0, None


class PeerStage(nn.Module):
    """The same for torch.distributed.pipelining: two branches, since it splits a backward by the inputs it asks for."""

    def __init__(self, sleeps: Sleeps) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.sleeps = sleeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SleepInput.apply(x, self.sleeps) + _SleepWeight.apply(self.weight, self.sleeps)


def peer(name: str, rank: int, ranks: int, micro_batches: int, sleeps: Sleeps) -> Callable[[], Moments]:
    """PyTorch's schedule over the same sleeps."""
    from torch.distributed import pipelining

    virtual = find(name).virtual_stages
    chunk, total = sleeps.of_chunk(virtual), ranks * virtual
    if name in ("zb_v", "dualpipe_v"):
        held = [rank, total - 1 - rank]
    else:
        held = [rank + ranks * number for number in range(virtual)]
    stages = [pipelining.PipelineStage(PeerStage(chunk), stage, total, torch.device("cpu")) for stage in held]
    schedule = getattr(pipelining.schedules, PEERS[name])(
        stages[0] if virtual == 1 else stages, micro_batches, loss_fn=lambda output, target: output.square().sum()
    )
    inputs = torch.zeros(micro_batches, *SHAPE[1:], requires_grad=True)

    def run() -> Moments:
        start = time.perf_counter()
        last = total - 1 in held
        schedule.step(*([inputs] if 0 in held else []), **({"target": inputs.detach()} if last else {}))
        end = time.perf_counter()
        return start, end, start, end

    return run


# ---- one process --------------------------------------------------------------------------------------------------


def message_seconds(pipeline: Group, mesh: Mesh) -> float:
    """Time from a send to the end of its receive between neighbours, measured as half of a round trip."""
    from ultrascale.comm import p2p

    buffer, times = torch.zeros(SHAPE), []
    for number in range(20):
        collectives.barrier(pipeline)
        if pipeline.index > 1:
            continue
        other, start = 1 - pipeline.index, time.perf_counter()
        if pipeline.index == 0:
            p2p.send(buffer, pipeline, other, number).wait()
            p2p.receive(buffer, pipeline, other, number).wait()
        else:
            p2p.receive(buffer, pipeline, other, number).wait()
            p2p.send(buffer, pipeline, other, number).wait()
        times.append((time.perf_counter() - start) / 2)
    found = torch.tensor([statistics.median(times) if times else 0.0], dtype=torch.float64)
    return float(collectives.all_reduce(found, pipeline, op="max").wait())


def makespan(run: Callable[[], Moments], pipeline: Group, repeats: int) -> tuple[float, float]:
    """Medians over repeats of first start to last end over all ranks: of actions, and of whole calls."""
    actions, calls = [], []
    for _ in range(repeats):
        collectives.barrier(pipeline)
        rows = collectives.all_gather(torch.tensor([run()], dtype=torch.float64), pipeline).wait()
        actions.append(float(rows[:, 1].max() - rows[:, 0].min()))
        calls.append(float(rows[:, 3].max() - rows[:, 2].min()))
    return statistics.median(actions), statistics.median(calls)


def worker(rank: int, args: argparse.Namespace, store: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    mesh = Mesh(sizes={"pp": args.ranks})
    pipeline = create(mesh, group_plan(mesh), Ledger()).of(["pp"])
    sleeps = Sleeps(args.unit, args.unit * args.input, args.unit * args.weight)
    message = message_seconds(pipeline, mesh)
    rows = []
    for name in args.schedules:
        virtual = find(name).virtual_stages
        chunk = sleeps.of_chunk(virtual)
        costs = Costs(F=chunk.forward, BI=chunk.input, BW=chunk.weight, P2P=message)
        plan = program(name, args.ranks, args.micro_batches, costs=costs)
        run = ours(plan, mesh, rank, pipeline, sleeps)
        makespan(run, pipeline, 1)
        measured, call = makespan(run, pipeline, args.repeats)
        row = {"schedule": name, "predicted_s": simulate(plan, costs).makespan, "measured_s": measured, "call_s": call}
        if name in PEERS and not args.no_peer:
            theirs = peer(name, rank, args.ranks, args.micro_batches, sleeps)
            makespan(theirs, pipeline, 1)
            row["torch_call_s"] = makespan(theirs, pipeline, args.repeats)[1]
        rows.append(row)
        if rank == 0:
            print(_line(row), flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps({"message_s": message, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def _line(row: dict[str, Any]) -> str:
    line = (
        f"{row['schedule']:<30} {row['predicted_s']:>9.3f} s {row['measured_s']:>9.3f} s "
        f"{row['measured_s'] / row['predicted_s'] - 1:>+7.1%}"
    )
    if "torch_call_s" in row:
        line += f" {row['torch_call_s']:>9.3f} s {row['torch_call_s'] / row['call_s']:>7.2f} ×"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--unit", type=float, default=0.08, help="seconds of a rank's forward of one micro-batch")
    parser.add_argument("--input", type=float, default=1.2, help="input gradient, in forwards")
    parser.add_argument("--weight", type=float, default=0.8, help="weight gradient, in forwards")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=_all_schedules())
    parser.add_argument("--no-peer", action="store_true", help="leave torch.distributed.pipelining out")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    print(f"{'schedule':<30} {'predicted':>11} {'measured':>11} {'':>7} {'torch':>11} {'torch/ours':>9}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        multiprocessing.spawn(worker, (args, f"{folder}/store", str(out)), nprocs=args.ranks)
        found = json.loads(out.read_text())
    worst = max(abs(row["measured_s"] / row["predicted_s"] - 1) for row in found["rows"])
    print(f"largest difference from the simulator: {worst:.1%}")
    if args.out:
        settings = {key: getattr(args, key) for key in ("ranks", "micro_batches", "unit", "input", "weight", "repeats")}
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        args.out.write_text(
            json.dumps({"date": time.strftime("%Y-%m-%d"), **machine, **settings, **found}, indent=1) + "\n"
        )


def _all_schedules() -> list[str]:
    return [entry.name for entry in SCHEDULES if entry.training]


if __name__ == "__main__":
    main()
