"""`python -m ultrascale.train --config F [a.b=value ...]`, alone or under torchrun.

Thin on purpose: everything that can be wrong about the config or the launch is found here, in well under a
second and alike on every rank, before torch is imported and before any process group exists.

Exit codes: 0 finished; 2 the config or the launch is wrong; 3 stopped on purpose, with a checkpoint saved.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ultrascale.config import collect
from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LaunchError(Exception):
    """The command line or the launcher's environment is wrong."""


@dataclass(frozen=True)
class Launch:
    """This process's place among those of the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def main(argv: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Check everything, then train. Returns the exit code."""
    try:
        arguments = _parser().parse_intermixed_args(argv)
        launch = read_launch(environment)
        loaded = load(arguments.config, arguments.overrides)
        config = collect.check(loaded, launch.world_size, files=True)
        device = _device(arguments.device)
        collect.check_device(loaded, config, device)
    except (ConfigError, LaunchError) as error:
        if environment.get("LOCAL_RANK", "0") == "0":  # once for each host, not once for each GPU
            print(error, file=sys.stderr)
        return 2
    if launch.rank == 0:
        for notice in loaded.notices:
            print(f"notice: {notice}", file=sys.stderr)

    from ultrascale import trainer

    return trainer.run(
        config,
        device=device,
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
    )


def read_launch(environment: Mapping[str, str]) -> Launch:
    """One process when torchrun's variables are absent. Raises LaunchError when they are half set or make
    no sense."""
    there = [name for name in _TORCHRUN if environment.get(name)]
    if not there:
        return Launch()
    missing = [name for name in _TORCHRUN if name not in there]
    if missing:
        raise LaunchError(
            f"environment: torchrun's variables are half set: {', '.join(there)} without "
            f"{', '.join(missing)}; start with torchrun, which sets them all, or unset {', '.join(there)} "
            "to run one process"
        )
    numbers = {}
    for name in _TORCHRUN:
        if name == "MASTER_ADDR":
            continue
        text = environment[name]
        if not (text.isascii() and text.isdigit()):
            raise LaunchError(f"environment: {name}={text} is not a whole number; start with torchrun, which sets it")
        numbers[name] = int(text)
    rank, world_size, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
    if not local_rank <= rank < world_size:
        raise LaunchError(
            f"environment: LOCAL_RANK={local_rank}, RANK={rank} and WORLD_SIZE={world_size} do not fit "
            "(local rank ≤ rank < world size); start with torchrun, which sets them"
        )
    return Launch(rank, world_size, local_rank)


def _device(asked: str | None) -> str:
    """What was asked for, or the best there is. The first to import torch."""
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise LaunchError("--device cuda: this torch sees no CUDA device; use --device cpu, or install a CUDA build")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Like every other error: said once for each host, by `main`."""
        raise LaunchError(f"{self.format_usage()}{message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m ultrascale.train",
        description="Train. Under torchrun on many processes, otherwise on one.",
        epilog="example:\n  torchrun --nproc-per-node 2 -m ultrascale.train --config configs/debug.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="F", help="config file (YAML)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to set over the file's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
