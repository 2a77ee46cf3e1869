"""`ultrascale generate RUN --prompt …`"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `ultrascale generate`."""
    parser.description = "Text from a trained model: the newest checkpoint of a run folder, or a checkpoint."
    parser.epilog = 'example:\n  ultrascale generate runs/demo --prompt "def " --tokens 100 --temperature 0.8'
    parser.add_argument("path", metavar="RUN", type=Path, help="run folder or checkpoint")
    parser.add_argument("--prompt", default="", help="text to go on from (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=100, metavar="N", help="at most so many (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and what follows it, as it comes."""
    for name, wrong in (
        ("--tokens", arguments.tokens < 1),
        ("--temperature", not arguments.temperature >= 0),
        ("--top-k", arguments.top_k is not None and arguments.top_k < 1),
    ):
        if wrong:
            print(f"ultrascale generate {name}: the value is too small", file=sys.stderr)
            return 2
    import torch

    from ultrascale.checkpoint.boxes import CheckpointError
    from ultrascale.checkpoint.folder import find_checkpoint
    from ultrascale.data.errors import DataError
    from ultrascale.data.tokenizer import open_tokenizer
    from ultrascale.generation import Sampling, generate, load_model

    try:
        checkpoint = find_checkpoint(arguments.path)
        assembly = load_model(checkpoint, torch.device("cpu"))
        tokenizer = open_tokenizer(assembly.config.data.tokenizer)
    except (CheckpointError, DataError) as error:
        print(error, file=sys.stderr)
        return 2
    prompt = [int(token) for token in tokenizer.encode(arguments.prompt)] or [tokenizer.end_of_document]
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.seed)
    ids: list[int] = []
    for token in generate(assembly, prompt, arguments.tokens, sampling):
        if token == tokenizer.end_of_document:
            break
        ids.append(token)
    text = tokenizer.decode(ids)
    if arguments.json:
        print(json.dumps({"checkpoint": str(checkpoint), "prompt": arguments.prompt, "text": text, "tokens": ids}))
    else:
        print(arguments.prompt + text)
    return 0
