"""`ultrascale checkpoint inspect | check | diff | prune | fetch`: arguments, and what is printed. Needs no torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from ultrascale.checkpoint import inspection
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import (
    checkpoints,
    find_checkpoint,
    is_step_name,
    is_whole,
    named,
    point_to,
    retain,
    step_of,
    surplus,
)
from ultrascale.checkpoint.hugging_face import CONFIG, open_folder
from ultrascale.checkpoint.manifest import MANIFEST, read_manifest
from ultrascale.checkpoint.progress import bar
from ultrascale.checkpoint.storage import Storage
from ultrascale.checkpoint.stored import Stored, stored_tensors
from ultrascale.checkpoint.tree import human_bytes, tree

FAILED = 1
"""check: not whole; diff: different."""

MOST_LINES = 20
"""Of tensors that differ."""


def command(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A sub-command's parser, with its example and --json."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    return parser


def add_commands(commands: Any) -> None:
    """Adds the sub-commands to the parser of `ultrascale checkpoint`; RUN commands take what it parses."""
    parser = command(
        commands,
        "inspect",
        "tensors, sizes, dtypes, and the layout that saved them",
        "ultrascale checkpoint inspect runs/debug --norms",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run folder: its newest whole one")
    parser.add_argument("--norms", action="store_true", help="read the values, and print the norm of each tensor")
    parser.add_argument("--all", action="store_true", help="a line for every tensor; layers are not put together")

    parser = command(
        commands,
        "check",
        f"read every byte: is it whole, do checksums match, are all values finite; exit {FAILED} when not",
        "ultrascale checkpoint check runs/debug",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint, or a run folder: all of its checkpoints")

    parser = command(
        commands,
        "diff",
        f"largest difference of each tensor of two checkpoints; exit {FAILED} when they differ",
        "ultrascale checkpoint diff runs/a runs/b/checkpoints/step-00000010 --tolerance 1e-6",
    )
    parser.add_argument(
        "a", metavar="A", type=Path, help="a checkpoint, a run folder (its newest whole one), or a Hugging Face folder"
    )
    parser.add_argument("b", metavar="B", type=Path, help="the other")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="relative difference up to which tensors count as equal (default 0: every bit)",
    )
    parser.add_argument("--parameters", action="store_true", help="leave optimizer state out")

    parser = command(
        commands,
        "prune",
        "remove old checkpoints of a run, never the only whole one; without --yes, only say which",
        "ultrascale checkpoint prune runs/debug --keep 2 --yes",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="a run folder, or its folder of checkpoints")
    parser.add_argument("--keep", type=int, required=True, metavar="K", help="the newest K whole ones stay")
    parser.add_argument("--keep-every", type=int, metavar="N", help="and those of steps that are a multiple of N")
    parser.add_argument("--yes", action="store_true", help="remove them")

    parser = command(
        commands,
        "fetch",
        "copy a checkpoint from storage into a folder, and compare every checksum",
        "ultrascale checkpoint fetch s3://bucket/run fetched",
    )
    parser.add_argument(
        "url", metavar="URL", help="checkpoint.storage of a run: its newest whole one; or URL/step-00000010"
    )
    parser.add_argument("target", metavar="FOLDER", type=Path, help="where it is put, under its own name")


def inspect(args: argparse.Namespace) -> int:
    with bar("reading") as progress:
        found = inspection.describe(find_checkpoint(args.path), args.norms, progress)
    if args.json:
        print(json.dumps(found))
        return 0
    print(found["path"])
    layout = " ".join(f"{axis}={size}" for axis, size in found["layout"].items()) or "one process"
    version = (found["versions"] or {}).get("ultrascale")
    print(
        f"step {found['step']}, {len(found['tensors'])} tensors, {human_bytes(found['bytes'])} in {found['files']} "
        f"file{'s' if found['files'] > 1 else ''}; saved under {layout}"
        + (f" by ultrascale {version}" if version else "")
    )
    rows = tree(found["tensors"], args.all)
    wide = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:<{wide}}  {text}")
    return 0


def check(args: argparse.Namespace) -> int:
    if (args.path / MANIFEST).is_file() and not (args.path / "checkpoints").is_dir():
        folders = [args.path]
    else:
        folders = named(args.path)
        if not folders and not args.path.is_dir():
            raise CheckpointError(f"{args.path}: there is no such folder; give a checkpoint or a run folder")
        if not folders:
            folders = [args.path]  # no checkpoint: say so as for one that lost its manifest
    results = []
    for folder in folders:
        with bar(folder.name) as progress:
            results.append(inspection.check(folder, progress))
    if args.json:
        print(json.dumps([asdict(one) | {"whole": not one.problems} for one in results]))
    else:
        for one in results:
            if not one.problems:
                print(f"{one.path}: whole; step {one.step}, {one.tensors} tensors, {human_bytes(one.bytes)}")
            for line in (*one.problems, *(f"notice: {notice}" for notice in one.notices)):
                print(line)
    return FAILED if any(one.problems for one in results) else 0


def diff(args: argparse.Namespace) -> int:
    if not args.tolerance >= 0:
        raise CheckpointError(f"--tolerance {args.tolerance} is below 0; use 0, which is every bit, or more")
    folders, steps, sides = zip(*map(_side, (args.a, args.b)))
    if args.parameters:
        sides = tuple({name: tensor for name, tensor in side.items() if "/" not in name} for side in sides)
    with bar("comparing") as progress:
        found = inspection.compare(sides[0], sides[1], progress)
    beyond = [one for one in found if not one.compared or one.relative > args.tolerance or not args.tolerance]
    if args.json:
        rows = [asdict(one) for one in found]
        for row in rows:  # JSON has no infinity
            row |= {key: None for key in ("relative", "absolute") if not isfinite(row[key])}
        names = {name for side in sides for name in side}
        print(json.dumps({"equal": not beyond, "steps": steps, "tensors": len(names), "differences": rows}))
        return FAILED if beyond else 0
    for side, folder, step in zip("AB", folders, steps):
        print(f"{side} {folder}: {'Hugging Face' if step is None else f'step {step}'}")
    for one in sorted(beyond, key=lambda one: (not one.what, -one.relative))[:MOST_LINES]:
        text = f"largest relative difference {one.relative:.3g}, absolute {one.absolute:.3g}, {one.elements:,} elements"
        print(f"{one.name}: {'; '.join(filter(None, (one.what, text if one.compared else '')))}")
    if len(beyond) > MOST_LINES:
        print(f"… and {len(beyond) - MOST_LINES} more; --json lists all")
    within = "" if not args.tolerance else f" within {args.tolerance:g}"
    print(f"{len(beyond)} tensors differ" if beyond else f"equal{within}: {len(sides[0])} tensors")
    return FAILED if beyond else 0


def _side(path: Path) -> tuple[Path, int | None, Stored]:
    """(folder, step, tensors) of a checkpoint, of a run's newest one, or of a Hugging Face folder (no step)."""
    if (path / CONFIG).is_file() and not (path / MANIFEST).is_file():
        return path, None, open_folder(path).stored
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    return folder, manifest.step, stored_tensors(folder, manifest)


def prune(args: argparse.Namespace) -> int:
    if args.keep < 1:
        raise CheckpointError(f"--keep {args.keep}: at least one stays; use 1 or more")
    if args.keep_every is not None and args.keep_every < 1:
        raise CheckpointError(f"--keep-every {args.keep_every}: use 1 or more, or leave it out")
    root = args.path / "checkpoints" if (args.path / "checkpoints").is_dir() else args.path
    if not named(root):
        raise CheckpointError(f"{args.path} holds no checkpoints; give a run folder, or its checkpoints/")
    whole = list(checkpoints(root))
    torn = [folder for folder in named(root) if not is_whole(folder)]
    old = surplus(whole, args.keep, args.keep_every)
    if args.yes:
        old = retain(root, args.keep, args.keep_every)
        point_to(root, whole[0] if whole else None)
    kept = [folder for folder in whole if folder not in old]
    if args.json:
        shown = {"removed" if args.yes else "would_remove": [*map(str, old)], "kept": [*map(str, kept)]}
        print(json.dumps(shown | {"not_whole": [str(folder) for folder in torn]}))
        return 0
    for folder in old:
        print(f"{'removed' if args.yes else 'would remove'} {folder}")
    for folder in torn:
        print(f"notice: {folder} is not whole; it is neither counted nor removed")
    kept_names = ", ".join(folder.name for folder in kept) or "nothing, for none is whole"
    print(f"kept: {kept_names}" + ("" if args.yes or not old else "; --yes removes the others"))
    return 0


def fetch(args: argparse.Namespace) -> int:
    parent, _, last = args.url.rstrip("/").rpartition("/")
    storage = Storage(parent if is_step_name(last) else args.url)
    name = last if is_step_name(last) else next(storage.whole_ones(), None)
    if name is None:
        raise CheckpointError(f"{args.url} holds no whole checkpoint; give a run's checkpoint.storage")
    folder = storage.fetch(name, args.target)
    if args.json:
        print(json.dumps({"path": str(folder), "step": step_of(folder)}))
    else:
        print(f"{folder}: whole, and as it was written; step {step_of(folder)}")
    return 0


RUN = {"inspect": inspect, "check": check, "diff": diff, "prune": prune, "fetch": fetch}
