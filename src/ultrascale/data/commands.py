"""`ultrascale data prepare | info | check | pack`: arguments, progress and what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ultrascale.data.errors import DataError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ultrascale.data.prepare import Prepared, Progress

BAD_INPUT = 2  # as for a config error
NOT_WHOLE = 1

_PREPARE = """examples:
  ultrascale data prepare corpus.jsonl --output data/corpus --tokenizer train:8192 --validation-fraction 0.01
  ultrascale data prepare ~/src/project --output data/project --tokenizer bytes
  ultrascale data prepare book.txt --separator '<|endoftext|>' --output data/books --tokenizer tokenizer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands to the parser of `ultrascale data`; `run` takes what it parses."""
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    _add_prepare(commands)
    info = _command(
        commands,
        "info",
        "documents, tokens, type, largest id of token files",
        "ultrascale data info data/corpus",
    )
    info.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="path of PREFIX.bin and PREFIX.idx, without the ending"
    )
    check = _command(
        commands,
        "check",
        f"reads token files whole; exit {NOT_WHOLE} when something is wrong",
        "ultrascale data check data/corpus --vocab-size 8192",
    )
    check.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="path of PREFIX.bin and PREFIX.idx, without the ending"
    )
    check.add_argument(
        "--vocab-size", type=int, metavar="N", help="refuse ids of N and above (default: what was recorded)"
    )
    check.add_argument(
        "--record",
        action="store_true",
        help="write PREFIX.meta.json for files that have none, or that changed",
    )
    pack = _command(
        commands,
        "pack",
        "packs whole documents into sequences, ahead of a run with data.packing=best_fit",
        "ultrascale data pack data/corpus --sequence-length 4096",
    )
    pack.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="path of PREFIX.bin and PREFIX.idx; writes PREFIX.packed-N"
    )
    pack.add_argument(
        "--sequence-length", type=int, required=True, metavar="N", help="tokens of a sequence: batch.sequence_length"
    )
    pack.add_argument(
        "--cut-documents", action="store_true", help="cut documents of more than N tokens, as data.cut_documents does"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command of `args`; returns its exit status: 0, 1 (check: not whole) or 2 (bad input)."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "prepare": _prepare,
        "info": _info,
        "check": _check,
        "pack": _pack,
    }
    try:
        return commands[args.data_command](args)
    except (DataError, ImportError) as error:
        print(f"ultrascale data {args.data_command}: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"error": str(error)}))
        return BAD_INPUT


def _command(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    epilog = example if example.startswith("examples:") else f"example:\n  {example}"
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    return parser


def _add_prepare(commands: Any) -> None:
    parser = _command(commands, "prepare", "text, JSONL or folders of source code to token files", _PREPARE)
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text files, .jsonl or .jsonl.gz (a document a line), folders, or builtin:stdlib",
    )
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, …")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="T",
        help="bytes (default), path of a tokenizer.json, or train:VOCAB: a byte-level BPE learned "
        "from the input, saved as tokenizer.json in the folder of PREFIX",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--validation-fraction",
        type=float,
        default=0.0,
        metavar="X",
        help="share of documents held out, by document hash, into PREFIX.validation (default: 0)",
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="the token of a tokenizer.json that ends documents (default: found)",
    )
    parser.add_argument("--text-field", default="text", metavar="F", help="field of a JSON line (default: text)")
    parser.add_argument("--separator", metavar="S", help="what stands between documents in text files that are named")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")


def _prepare(args: argparse.Namespace) -> int:
    from ultrascale.data.prepare import prepare

    with _bar() as bar:
        prepared = prepare(
            args.inputs,
            args.output,
            args.tokenizer,
            args.workers,
            args.validation_fraction,
            end_of_document=args.end_of_document,
            text_field=args.text_field,
            separator=args.separator,
            overwrite=args.overwrite,
            on_progress=_reporter(bar),
        )
    if args.json:
        print(json.dumps(asdict(prepared), indent=2))
    else:
        _print_prepared(prepared, args.validation_fraction)
    return 0


def _print_prepared(prepared: Prepared, validation_fraction: float) -> None:
    rows = [(prepared.prefix, prepared.train)]
    if prepared.validation is not None:
        rows.append((f"{prepared.prefix}.validation", prepared.validation))
    for prefix, metadata in rows:
        print(f"{prefix}: {metadata.documents:,} documents, {metadata.tokens:,} tokens, largest id {metadata.max_id}")
    if prepared.validation is None and validation_fraction > 0:
        print(f"no document was held out: too few for --validation-fraction {validation_fraction}; raise it")
    left_out = [
        f"{count:,} {what}" for count, what in ((prepared.empty, "empty"), (prepared.not_text, "not text")) if count
    ]
    if left_out:
        print(f"left out: {', '.join(left_out)}")
    rate = prepared.input_bytes / 1e6 / max(prepared.seconds, 1e-9)
    print(f"{prepared.input_bytes / 1e6:,.1f} MB in {prepared.seconds:.1f} s ({rate:,.1f} MB/s)")
    vocab_size = prepared.train.vocab_size
    validation = "" if prepared.validation is None else f" data.validation={prepared.prefix}.validation"
    print(
        f"use with: data.train={prepared.prefix}{validation} data.tokenizer={prepared.tokenizer} "
        f"model.vocab_size={vocab_size}"
    )


def _info(args: argparse.Namespace) -> int:
    from ultrascale.data.inspection import describe

    found = [describe(prefix) for prefix in args.prefixes]
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for one in found:
        print(one.pop("prefix"))
        for key, value in one.items():
            shown = "not recorded" if value is None else f"{value:,}" if isinstance(value, int) else value
            shown = f"{shown:,.1f}" if isinstance(shown, float) else shown
            print(f"  {key.replace('_', ' '):16s} {shown}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from ultrascale.data.inspection import Checked, check_prefix

    results: list[Checked] = []
    with _bar() as bar:
        for prefix in args.prefixes:
            task = bar.add_task(str(prefix), total=None, documents="")

            def advance(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            try:
                results.append(check_prefix(prefix, args.vocab_size, args.record, advance))
            except DataError as error:
                results.append(Checked(str(prefix), 0, 0, (str(error),)))
    if args.json:
        print(json.dumps([asdict(one) | {"whole": not one.problems} for one in results], indent=2))
    else:
        for one in results:
            if not one.problems:
                note = "; recorded" if one.recorded else ""
                print(f"{one.prefix}: whole; {one.documents:,} documents, {one.tokens:,} tokens{note}")
            for problem in one.problems:
                print(problem)
    return NOT_WHOLE if any(one.problems for one in results) else 0


def _pack(args: argparse.Namespace) -> int:
    from ultrascale.data.inspection import pack

    packed = []
    with _bar() as bar:
        for prefix in args.prefixes:
            task = bar.add_task(str(prefix), total=None, documents="")

            def advance(done: int, total: int, task: Any = task) -> None:
                bar.update(task, completed=done, total=total)

            packed.append(pack(prefix, args.sequence_length, args.cut_documents, advance))
    if args.json:
        print(json.dumps([asdict(one) for one in packed], indent=2))
        return 0
    for one in packed:
        print(
            f"{one.path}: {one.documents:,} documents in {one.bins:,} sequences of {one.sequence_length:,} tokens, "
            f"{one.padding_share:.3%} padding; the longest document has {one.longest_document:,} tokens"
        )
    cut = " data.cut_documents=true" if args.cut_documents else ""
    print(f"use with: data.packing=best_fit batch.sequence_length={args.sequence_length}{cut}")
    return 0


@contextmanager
def _bar() -> Iterator[Bar]:
    """A progress bar on standard error, so that standard output stays what was asked for."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[documents]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield bar


def _reporter(bar: Bar) -> Callable[[Progress], None]:
    names = {"tokenizer": "training the tokenizer", "tokens": "tokenising"}
    tasks: dict[str, Any] = {}

    def report(progress: Progress) -> None:
        if progress.phase not in tasks:
            tasks[progress.phase] = bar.add_task(names[progress.phase], total=None, documents="")
        bar.update(
            tasks[progress.phase],
            completed=progress.bytes_done,
            total=progress.bytes_total,
            documents=f"{progress.documents:,} documents",
        )

    return report
