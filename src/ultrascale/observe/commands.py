"""`ultrascale report`: a page about a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ultrascale.observe import report
from ultrascale.observe.run_folder import RunFolderError
from ultrascale.observe.run_record import RunRecord, read_run
from ultrascale.pipeline.draw_html import html
from ultrascale.pipeline.export import chrome_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments and example of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Write one HTML page about a run that is over or still going on: curves, experts, timeline as it ran beside\n"
        "the predicted one, memory, traffic, stragglers, events. It loads nothing, so it can be mailed as it is."
    )
    parser.epilog = "example:\n  ultrascale report runs/debug --out report.html"
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder (run.dir)")
    parser.add_argument("--out", metavar="F", type=Path, help="the page (default: RUN/report.html)")
    parser.add_argument(
        "--timeline", metavar="F", type=Path, help="write F: the recorded timeline, to zoom into (HTML)"
    )
    parser.add_argument("--trace", metavar="F", type=Path, help="write F: the same for ui.perfetto.dev (JSON)")
    parser.add_argument("--json", action="store_true", help="print the page's numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0, or 2 when the folder holds no run, lacks what was asked for, or a file cannot be written."""
    try:
        record = read_run(args.run)
        written = _write(args, record)
    except RunFolderError as error:
        print(f"ultrascale report: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({**report.summary(record), "out": written[0]}))
    else:
        print("wrote " + ", ".join(written))
    return 0


def _write(args: argparse.Namespace, record: RunRecord) -> list[str]:
    out = args.out or args.run / "report.html"
    contents = [(out, lambda: report.page(record))]
    if args.timeline or args.trace:
        if record.recording is None:
            raise RunFolderError(f"{args.run} has no recorded timeline; train with profile.timeline=true")
        timeline = record.recording.timeline()
        if args.timeline:
            contents.append((args.timeline, lambda: html(timeline)))
        if args.trace:
            contents.append((args.trace, lambda: chrome_trace(timeline)))
    for path, content in contents:
        try:
            path.write_text(content(), encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written: {error.strerror or error}; give another file") from error
    return [str(path) for path, _ in contents]
