"""`ultrascale doctor`: what this machine has, what is missing, which kernels a config will use, and whether it runs."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ultrascale.config import collect
from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError, Problem
from ultrascale.config.resolve import resolve, smallest_world
from ultrascale.kernels.choice import Demand, Place, Verdict, choose, verdicts
from ultrascale.observe.machine import Machine, look

WITHOUT_CONFIG = {"cuda": Demand("bfloat16", 128), "cpu": Demand("float32", 128)}
"""What is asked of kernels where no config says it."""
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL takes some tens of megabytes per pair of GPUs; containers come with 64 MiB."""


@dataclass(frozen=True)
class Finding:
    """Something to know or do about the machine."""

    text: str
    fix: str
    """A command or a sentence."""


@dataclass(frozen=True)
class Examined:
    """A config on this machine."""

    path: str
    world_size: int | None
    """None: the config says too little, or what cannot be."""
    problems: tuple[str, ...]
    """None: it can run."""
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    machine: Machine
    device: str
    """On which a run would compute: cpu or cuda."""
    findings: tuple[Finding, ...]
    demand: Demand
    attention: str
    """What will be used."""
    verdicts: tuple[Verdict, ...]
    config: Examined | None

    @property
    def runs(self) -> bool:
        return self.config is None or not self.config.problems

    def as_json(self) -> dict[str, Any]:
        machine = asdict(self.machine)
        return {
            **machine,
            "device": self.device,
            "packages": [
                {**about, "fits": package.fits, "command": package.command}
                for about, package in zip(machine["packages"], self.machine.packages, strict=True)
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "kernels": {
                "attention": {
                    "used": self.attention,
                    "for": asdict(self.demand),
                    "candidates": [asdict(verdict) for verdict in self.verdicts],
                }
            },
            "config": asdict(self.config) if self.config else None,
            "runs": self.runs,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments and example of the command."""
    parser.description = (
        "Say what this machine has, what is missing and how to get it, and which kernels will be used and why.\n"
        "Exit code 1 when --config names a config that cannot run here."
    )
    parser.epilog = "example:\n  ultrascale doctor --config configs/debug.yaml precision.compute=bfloat16"
    parser.add_argument("--config", metavar="F", help="config file (YAML) to check, and to choose kernels for")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="keys to set over the file's")
    parser.add_argument("--world", type=_processes, metavar="N", help="processes (default: as many as the axes need)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--json", action="store_true", help="print JSON alone")


def _processes(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} processes cannot run anything; use 1 or more")
    return number


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0, or 1 when the config cannot run."""
    from ultrascale.observe.doctor_text import show

    report = examine(look(), arguments.config, arguments.overrides, arguments.world, arguments.device)
    if arguments.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    return 0 if report.runs else 1


def examine(
    machine: Machine,
    path: str | None = None,
    overrides: Sequence[str] = (),
    world: int | None = None,
    device: str | None = None,
) -> Report:
    """The machine, and a config on it. Raises ConfigError when it is asked about what is not there."""
    if path is None and overrides:
        key = overrides[0].partition("=")[0]
        raise ConfigError(
            [Problem(key, f"{overrides[0]}: an override needs a config that it stands over; add --config F")]
        )
    if device == "cuda" and not machine.gpus:
        message = "--device cuda: this torch sees no CUDA device; leave it out, or ask on a machine with GPUs"
        raise ConfigError([Problem("--device", message)])
    device = device or ("cuda" if machine.gpus else "cpu")
    place = _place(machine, device)
    demand, asked, examined = WITHOUT_CONFIG[device], "auto", None
    if path is not None:
        demand, asked, examined = _config(path, overrides, world, device, demand)
    return Report(
        machine,
        device,
        tuple(findings(machine, device)),
        demand,
        choose(asked, demand, place).name,
        tuple(verdicts(demand, place)),
        examined,
    )


def _place(machine: Machine, device: str) -> Place:
    """Its first GPU: those of one host are alike."""
    capability = machine.gpus[0].capability if device == "cuda" else "0.0"
    major, minor = map(int, capability.split("."))
    package = next((one.installed for one in machine.packages if one.name == "flash-attn"), None)
    return Place(device, (major, minor), package)


def findings(machine: Machine, device: str) -> Iterator[Finding]:
    """What is wrong with the machine, or may surprise."""
    for package in machine.packages:
        if package.extra is None and not package.fits:
            there = f"{package.installed} is installed" if package.installed else "it is not installed"
            yield Finding(f"{package.name}{package.versions} is needed, and {there}", package.command)
    yield from _gpu_findings(machine)
    host = machine.host
    if not host.resolves:
        fix = f"add a line for it to /etc/hosts, or give torchrun --rdzv-endpoint an address instead of {host.name}"
        yield Finding(f"the host's name {host.name} leads to no address, which runs on several hosts need", fix)
    if not machine.cache_writable:
        fix = "export ULTRASCALE_CACHE=/a/folder/that/can"
        yield Finding(f"the cache {machine.cache} cannot be written; prepared data go there", fix)
    if device == "cpu" and machine.omp_num_threads is None and machine.torch is not None:
        threads = machine.torch.threads
        text = f"OMP_NUM_THREADS is not set: a process alone computes on {threads} threads, each of torchrun's on one"
        yield Finding(text, f"export OMP_NUM_THREADS to {host.cores} cores / processes of this host")


def _gpu_findings(machine: Machine) -> Iterator[Finding]:
    torch, gpus = machine.torch, machine.gpus
    if torch is None:
        return
    if machine.driver and torch.cuda is None:
        text = f"there is an NVIDIA driver ({machine.driver}), and torch {torch.version} is a build for CPUs"
        yield Finding(text, "pip install --force-reinstall torch")
    elif machine.driver and not gpus:
        text = f"torch {torch.version} sees no GPU beside the NVIDIA driver {machine.driver}"
        yield Finding(text, f"unset CUDA_VISIBLE_DEVICES, or update the driver to one for CUDA {torch.cuda}")
    if gpus and "nccl" not in torch.backends:
        yield Finding("this torch has no NCCL, by which GPUs communicate", "pip install --force-reinstall torch")
    if len(gpus) > 1 and machine.host.shared_memory_bytes < SHARED_MEMORY_BYTES:
        size = machine.host.shared_memory_bytes >> 20
        yield Finding(f"/dev/shm has {size} MiB, by which GPUs may have to talk", "docker run --shm-size=8g")


def _config(
    path: str, overrides: Sequence[str], world: int | None, device: str, demand: Demand
) -> tuple[Demand, str, Examined]:
    """What the config asks of attention, as far as that can be told, and what is wrong with it."""
    try:
        loaded = load(path, overrides)
    except ConfigError as error:
        return demand, "auto", Examined(path, world, tuple(map(str, error.problems)), ())
    world_size = world or smallest_world(loaded.config)
    with contextlib.suppress(ConfigError):  # the checks below say it, with the ways to cut the world
        demand = Demand.of(resolve(loaded.config, world_size))
    problems: tuple[str, ...] = ()
    try:
        config = collect.check(loaded, world_size, files=True)
        collect.check_device(loaded, config, device)
    except ConfigError as error:
        problems = tuple(map(str, error.problems))
    return demand, loaded.config.kernels.attention, Examined(path, world_size, problems, tuple(loaded.notices))
