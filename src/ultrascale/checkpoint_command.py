"""`ultrascale checkpoint …`: look into checkpoints, compare them, remove old ones, cut one for another layout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ultrascale.checkpoint import commands
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.byte_count import byte_count
from ultrascale.checkpoint.folder import find_checkpoint
from ultrascale.checkpoint.progress import bar
from ultrascale.checkpoint.tree import human_bytes
from ultrascale.checkpoint.workers import Workers

BAD_INPUT = 2  # as for a config error
MEMORY = 512 << 20
AXES = ("dp", "tp", "cp", "pp", "ep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands of `ultrascale checkpoint`."""
    parsers = parser.add_subparsers(dest="checkpoint_command", metavar="COMMAND", required=True)
    commands.add_commands(parsers)
    _add_reshard(parsers)


def _add_reshard(parsers: Any) -> None:
    parser = commands.command(
        parsers,
        "reshard",
        "write a checkpoint again with its files cut as a layout reads them, or as one file",
        "ultrascale checkpoint reshard runs/a resharded --tp 4 --pp 2 --zero-stage 1 --memory 2GB --processes 4",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="a checkpoint, or a run folder: its newest whole one")
    parser.add_argument("target", metavar="DST", type=Path, help="the new checkpoint, which is not there yet")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=_positive, default=1, metavar="N", help=f"parallel.{axis} (default 1)")
    parser.add_argument("--zero-stage", type=int, choices=range(4), default=0, help="parallel.zero_stage (default 0)")
    parser.add_argument("--dp-shard", type=_positive, metavar="N", help="parallel.dp_shard (default: all of dp)")
    parser.add_argument(
        "--expert-axes",
        type=_axes,
        metavar="AXIS,…",
        help="parallel.expert_axes, as ep or ep,cp (default: the checkpoint's own)",
    )
    parser.add_argument(
        "--expert-tensor-axes",
        type=_axes,
        metavar="AXIS,…",
        help="parallel.expert_tensor_axes, '' for none (default: as --expert-axes has it)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help="pipeline.schedule (default: the checkpoint's own where pp stays, else 1f1b)",
    )
    parser.add_argument("--virtual-stages", type=_positive, metavar="N", help="pipeline.virtual_stages")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the run will be: ZeRO's buckets differ (default cpu)",
    )
    parser.add_argument("--consolidated", action="store_true", help="one file with whole tensors; takes no axes")
    parser.add_argument("--processes", metavar="N", type=int, default=1, help="that share the work (default 1)")
    parser.add_argument(
        "--memory", metavar="BYTES", type=byte_count, default=MEMORY, help="of buffers, over all (default 512MiB)"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: use 1 or more")
    return number


def _axes(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := sorted(set(names) - set(AXES)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the axes are {', '.join(AXES)}")
    return names


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 when what was checked does not hold; 2 when a path is no checkpoint, or a number is wrong."""
    known: dict[str, Callable[[argparse.Namespace], int]] = {**commands.RUN, "reshard": _reshard}
    try:
        return known[args.checkpoint_command](args)
    except CheckpointError as error:
        print(f"ultrascale checkpoint {args.checkpoint_command}: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"error": str(error)}))
        return BAD_INPUT


def _reshard(args: argparse.Namespace) -> int:
    from ultrascale.reshard import Layout, reshard

    sizes = {axis: getattr(args, axis) for axis in AXES}
    if args.consolidated and (any(size > 1 for size in sizes.values()) or args.zero_stage):
        raise CheckpointError("--consolidated is one file with whole tensors; leave the axes and --zero-stage out")
    layout = Layout(
        **sizes,
        zero_stage=args.zero_stage,
        dp_shard=args.dp_shard,
        expert_axes=args.expert_axes,
        expert_tensor_axes=args.expert_tensor_axes,
        schedule=args.schedule,
        virtual_stages=args.virtual_stages,
        device=args.device,
    )
    source = find_checkpoint(args.source)
    with bar("resharding") as progress, Workers(args.processes, args.memory) as workers:
        done = reshard(source, args.target, layout, workers, progress)
    if args.json:
        print(json.dumps(asdict(done)))
        return 0
    axes = " ".join(f"{axis}={size}" for axis, size in done.axes.items() if size > 1) or "one process"
    zero = f" zero_stage={done.zero_stage}" if done.zero_stage else ""
    print(
        f"{done.path}: cut for {axes}{zero}; {done.tensors} tensors, {human_bytes(done.bytes)} in {done.files} "
        f"file{'s' if done.files > 1 else ''}; each tensor is the same on both sides"
    )
    return 0
