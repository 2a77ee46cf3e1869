"""`ultrascale <command>`: finds the module behind a command, and imports no other.

A command is an entry of COMMANDS. Its module has `add_arguments(parser)` and `run(arguments) -> exit code`; with
--json it prints JSON and nothing else on standard output. It imports what needs torch inside `run`, so that
`--help` answers at once.
"""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale.config.problem import ConfigError


@dataclass(frozen=True)
class Command:
    module: str
    summary: str
    example: str


COMMANDS = {
    "checkpoint": Command(
        "ultrascale.checkpoint_command",
        "look into checkpoints, check and compare them, remove old ones",
        "ultrascale checkpoint inspect runs/debug",
    ),
    "config": Command(
        "ultrascale.config.commands",
        "show a config as it will run; print the schema",
        "ultrascale config show --config configs/debug.yaml parallel.tp=2",
    ),
    "convert": Command(
        "ultrascale.checkpoint.convert_commands",
        "Hugging Face folders in and out, other trainers' checkpoints in",
        "ultrascale convert to-hf runs/debug export/debug",
    ),
    "data": Command(
        "ultrascale.data.commands",
        "turn text into token files, and look into them",
        "ultrascale data prepare corpus.jsonl --output data/corpus --tokenizer train:8192",
    ),
    "doctor": Command(
        "ultrascale.observe.doctor",
        "what this machine has, what is missing, which kernels a config will use",
        "ultrascale doctor --config configs/debug.yaml",
    ),
    "generate": Command(
        "ultrascale.generation_command",
        "text from a trained model",
        'ultrascale generate runs/demo --prompt "def "',
    ),
    "report": Command(
        "ultrascale.observe.commands",
        "a page about a run: curves, timeline, memory, traffic",
        "ultrascale report runs/debug --out report.html",
    ),
    "schedule": Command(
        "ultrascale.pipeline.command",
        "validate, simulate and draw a pipeline schedule",
        "ultrascale schedule 1f1b --stages 4 --microbatches 8",
    ),
}

_WIDTH = max(map(len, COMMANDS))
_HELP = f"""usage: ultrascale COMMAND [arguments] [--json]

commands:
{chr(10).join(f"  {name:<{_WIDTH}}  {command.summary}" for name, command in COMMANDS.items())}

`ultrascale COMMAND --help` says more. To train:
  torchrun --nproc-per-node 2 -m ultrascale.train --config configs/debug.yaml

example:
  ultrascale config show --config configs/debug.yaml parallel.tp=2"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 what was checked does not hold, 2 asked wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        print(_HELP)
        return 0 if name else 2
    if name == "--version":
        from importlib.metadata import version

        print(version("ultrascale"))
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"ultrascale {name} is not a command; {fix}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    try:
        module = importlib.import_module(command.module)
        parser = argparse.ArgumentParser(
            prog=f"ultrascale {name}",
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(parser)
        code: int = module.run(_parse(parser, words[1:]))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of `ultrascale … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Like parse_args, but overrides (a.b=value) may stand among the options, as they may for training."""
    arguments, rest = parser.parse_known_args(words)
    if rest and ("overrides" not in arguments or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
