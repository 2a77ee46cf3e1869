"""`ultrascale convert from-hf | to-hf | from-dcp | config`: Hugging Face folders in and out, other trainers' in.

Needs no torch, no transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import yaml

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.byte_count import byte_count
from ultrascale.checkpoint.commands import command
from ultrascale.checkpoint.convert import SHARD_BYTES, Converted, from_hf, model_section, to_hf
from ultrascale.checkpoint.convert_dcp import Imported, Options, from_dcp
from ultrascale.checkpoint.folder import find_checkpoint
from ultrascale.checkpoint.progress import bar
from ultrascale.checkpoint.tree import human_bytes
from ultrascale.checkpoint.values import CONVERTIBLE
from ultrascale.checkpoint.workers import Workers
from ultrascale.config.collect import check
from ultrascale.config.load import load
from ultrascale.config.resolve import smallest_world

BAD_INPUT = 2
MEMORY = 512 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands of `ultrascale convert`."""
    commands = parser.add_subparsers(dest="convert_command", metavar="COMMAND", required=True)
    parser = command(
        commands,
        "from-hf",
        "a Hugging Face folder to a checkpoint of step 0: to generate from, inspect, compare",
        "ultrascale convert from-hf models/llama checkpoints/llama",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("target", metavar="DST", type=Path, help="the checkpoint, which is not there yet")
    _resources(parser)

    parser = command(
        commands,
        "to-hf",
        "a checkpoint's parameters to a folder that transformers loads",
        "ultrascale convert to-hf runs/debug export/debug --dtype bfloat16",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="a checkpoint, or a run folder: its newest whole one")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder, which is not there yet")
    parser.add_argument(
        "--dtype",
        choices=CONVERTIBLE,
        help="of the weights (default: that of the folder they came from, else precision.compute)",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", type=Path, help="a tokenizer.json, or a folder (default: the run's own)"
    )
    parser.add_argument(
        "--shard-bytes", metavar="N", type=byte_count, default=SHARD_BYTES, help="largest file (default 5GB)"
    )
    _resources(parser)

    parser = command(
        commands,
        "from-dcp",
        "a checkpoint of TorchTitan or Megatron-Core (torch_dist), or another DCP folder, to one of the config's run",
        "ultrascale convert from-dcp outputs/checkpoint/step-1000 checkpoints/llama --config llama.yaml",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with .metadata and .distcp files")
    parser.add_argument("target", metavar="DST", type=Path, help="the checkpoint, which is not there yet")
    parser.add_argument(
        "--config", metavar="F", required=True, help="config file (YAML) whose model section is that of SRC"
    )
    parser.add_argument("overrides", metavar="a.b=value", nargs="*", help="values that replace those of the file")
    parser.add_argument("--weights-only", action="store_true", help="leave moments where they are: step 0")
    parser.add_argument(
        "--rope",
        choices=("interleaved", "halves"),
        help="features of queries and keys that SRC turns together: neighbours, or the two halves of a head "
        "(default: as its trainer does it)",
    )
    parser.add_argument("--step", metavar="N", type=int, help="completed steps (default: what SRC says)")
    parser.add_argument(
        "--verify",
        choices=("full", "off"),
        default="full",
        help="full: compare all values with the checksums of their archives first (default)",
    )
    _resources(parser)

    parser = command(
        commands,
        "config",
        "the model section of a config that fits a Hugging Face folder, for a run that starts from it (init.from_hf)",
        "ultrascale convert config models/llama > model.yaml",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with config.json and safetensors files")


def _resources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", metavar="N", type=int, default=1, help="that share the work (default 1)")
    parser.add_argument(
        "--memory", metavar="BYTES", type=byte_count, default=MEMORY, help="of buffers, over all (default 512MiB)"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 2 when something does not fit."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "from-hf": _from_hf,
        "to-hf": _to_hf,
        "from-dcp": _from_dcp,
        "config": _config,
    }
    try:
        return commands[args.convert_command](args)
    except CheckpointError as error:
        print(f"ultrascale convert {args.convert_command}: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"error": str(error)}))
        return BAD_INPUT


def _from_hf(args: argparse.Namespace) -> int:
    with bar("converting") as progress, Workers(args.processes, args.memory) as workers:
        done = from_hf(args.source, args.target, workers, progress)
    return _say(args, done)


def _to_hf(args: argparse.Namespace) -> int:
    source = find_checkpoint(args.source)
    with bar("converting") as progress, Workers(args.processes, args.memory) as workers:
        done = to_hf(
            source,
            args.target,
            workers,
            dtype=args.dtype,
            shard_bytes=args.shard_bytes,
            tokenizer=args.tokenizer,
            progress=progress,
        )
    return _say(args, done)


def _from_dcp(args: argparse.Namespace) -> int:
    if args.step is not None and args.step < 0:
        raise CheckpointError(f"--step {args.step}: use 0 or more")
    loaded = load(args.config, args.overrides)
    config = check(loaded, smallest_world(loaded.config))
    paired = None if args.rope is None else args.rope == "interleaved"
    options = Options(args.weights_only, paired, args.step, args.verify)
    with bar("converting") as progress, Workers(args.processes, args.memory) as workers:
        done = from_dcp(args.source, args.target, config, workers, options, progress)
    if args.json:
        print(json.dumps(asdict(done)))
    else:
        _say_imported(done)
    return 0


def _say_imported(done: Imported) -> None:
    taken = f"AdamW's moments, step {done.step}" if done.moments else "no moments: step 0"
    print(
        f"{done.path}: {done.family} from {done.trainer}'s names, {done.parameters:,} parameters of {done.source} in "
        f"{done.dtype}, {taken}; {human_bytes(done.bytes)} in {done.files} file{'s' if done.files > 1 else ''}"
    )
    if done.left_out:
        print(f"not taken: {', '.join(done.left_out)}")


def _say(args: argparse.Namespace, done: Converted) -> int:
    if args.json:
        print(json.dumps(asdict(done)))
    else:
        print(
            f"{done.path}: {done.family}, {done.parameters:,} parameters, {done.dtype} in Hugging Face's folder, "
            f"{human_bytes(done.bytes)} in {done.files} file{'s' if done.files > 1 else ''}"
        )
    return 0


def _config(args: argparse.Namespace) -> int:
    model = model_section(args.source).model_dump(mode="json", exclude_defaults=True)
    found = {"model": model, "init": {"from_hf": str(args.source)}}
    print(json.dumps(found) if args.json else yaml.safe_dump(found, sort_keys=False).rstrip())
    return 0
