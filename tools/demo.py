"""`make demo`: a small Llama learns Python from the standard library on this machine, resumes once, and writes.

Every step is a command that can be pasted; this program only runs them one after the other, and compares the result
with a unigram model, which knows how often each token occurs and nothing else.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table

from ultrascale.data.indexed import IndexedDataset

ROOT = Path(__file__).parents[1]
CONFIG = "configs/demo.yaml"
PREPARE = "ultrascale data prepare builtin:stdlib --output {train} --tokenizer train:{vocab} --validation-fraction 0.02"
TRAIN = f"torchrun --standalone --nproc-per-node 4 -m ultrascale.train --config {CONFIG} --device cpu"
GENERATE = "ultrascale generate {run} --prompt {prompt} --tokens 80"
PROMPTS = ("def ", "class ")
MARGIN = 0.5
"""Nats per token by which the model must beat the unigram model; it does by three times as much."""


def main() -> int:
    """Exit code 0 when every step went well and the model beats the unigram model."""
    console = Console(highlight=False)
    config = yaml.safe_load((ROOT / CONFIG).read_text())
    train, validation = config["data"]["train"], config["data"]["validation"]
    run, half = f"runs/{config['run']['name']}", config["run"]["steps"] // 2
    for folder in (ROOT / run, (ROOT / train).parent):
        shutil.rmtree(folder, ignore_errors=True)

    console.print("The commands below run in this folder, with [bold].venv/bin[/] first in PATH.")
    times = {}
    for title, command in (
        ("The corpus, and a tokenizer for it", PREPARE.format(train=train, vocab=config["model"]["vocab_size"])),
        ("Train the first half: two replicas, each cut over two processes", f"{TRAIN} run.steps={half}"),
        ("Go on from the checkpoint to the end", TRAIN),
    ):
        times[title] = step(console, title, command)
    for number, prompt in enumerate(PROMPTS):
        title = "" if number else "What it writes"
        times["What it writes"] = times.get("What it writes", 0) + step(
            console, title, GENERATE.format(run=run, prompt=shlex.quote(prompt))
        )

    unigram = unigram_loss(ROOT / train, ROOT / validation)
    losses = [json.loads(line) for line in (ROOT / run / "metrics.jsonl").read_text().splitlines()]
    final = next(record["validation_loss"] for record in reversed(losses) if "validation_loss" in record)
    table = Table(title="Loss on text that was held out", title_justify="left", title_style="bold")
    table.add_column("model")
    table.add_column("nats per token", justify="right")
    table.add_row("uniform", f"{np.log(config['model']['vocab_size']):.3f}")
    table.add_row("unigram", f"{unigram:.3f}")
    table.add_row(f"this one, after {losses[-1]['step']} steps", f"{final:.3f}")
    console.print(table)
    console.print(f"The run lies in [bold]{ROOT / run}[/]: metrics.jsonl, ledger.json, manifest.json, checkpoints/ …")
    console.print(", ".join(f"{title.split(':')[0].lower()} {seconds:.0f} s" for title, seconds in times.items()))
    if not final < unigram - MARGIN:
        console.print(f"[red]The final loss is not {MARGIN} below the unigram model's.[/]")
        return 1
    return 0


def step(console: Console, title: str, command: str) -> float:
    """Shows a command and runs it; returns its seconds, or ends the demo with its exit code."""
    if title:
        console.rule(f"[bold]{title}", align="left")
    console.print(f"[green]$ {command}[/]", soft_wrap=True)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    code = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, check=False).returncode
    if code:
        console.print(f"[red]exit code {code}[/]")
        sys.exit(code)
    return time.monotonic() - begun


def unigram_loss(train: Path, validation: Path) -> float:
    """Cross entropy, in nats per token, of `validation` under the frequencies of tokens in `train`."""
    seen, held_out = (counts(prefix) for prefix in (train, validation))
    size = max(len(seen), len(held_out))
    seen, held_out = (np.pad(part, (0, size - len(part))) for part in (seen, held_out))
    probability = (seen + 1) / (seen + 1).sum()  # one more of each, so that no token is impossible
    return float(-(held_out * np.log(probability)).sum() / held_out.sum())


def counts(prefix: Path) -> np.ndarray:
    """How often each token id occurs in PREFIX.bin; int64 [largest id + 1]."""
    dataset = IndexedDataset(prefix)
    return np.bincount(np.concatenate([dataset[number] for number in range(len(dataset))]))


if __name__ == "__main__":
    sys.exit(main())
