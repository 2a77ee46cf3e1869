"""What a person reads of a doctor's report. A line is never folded: it may be a command to copy."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ultrascale.observe.doctor import Examined, Report
from ultrascale.observe.machine import Machine, Package
from ultrascale.parallel.experts import choice

Line = tuple[str, str, str]
"""(what, how it is, what to do)"""
GOOD, BAD = "green", "red"


def show(report: Report) -> None:
    """Prints it."""
    console = Console(highlight=False, soft_wrap=True)
    _section(console, "This machine", _machine(report.machine, report.device))
    _section(console, "Packages", _packages(report.machine))
    demand = report.demand
    on = f"on {report.device}, for {demand.compute} and heads of {demand.head_dim}"
    _section(console, f"Attention {on}", _attention(report))
    if report.findings:
        _section(console, "To know or to do", (("", finding.text, finding.fix) for finding in report.findings))
    if report.config is None:
        console.print(Text("With --config F: whether a config runs here, and with which kernels.", "dim"))
    else:
        _config(console, report.config, report.device)


def _section(console: Console, title: str, lines: Iterator[Line]) -> None:
    rows = list(lines)
    width = max(len(what) for what, _, _ in rows)
    console.print(Text(title, "bold"))
    for what, how, todo in rows:
        console.print(Text.assemble("  ", f"{what:<{width}}", "  " if width else "", how))
        if todo:
            console.print(Text.assemble("  ", " " * width, "    → ", (todo, "cyan")))
    console.print()


def _machine(machine: Machine, device: str) -> Iterator[Line]:
    host, torch = machine.host, machine.torch
    yield "host", f"{host.name}{'' if host.resolves else ' (leads to no address)'}, {host.system}", ""
    yield "processor", f"{host.processor}, {host.cores} cores, {_gib(host.memory_bytes)}", ""
    yield "python", f"{machine.python} ({machine.executable})", ""
    if torch is None:
        yield "torch", "cannot be imported", ""
    else:
        build = f"CUDA {torch.cuda}" if torch.cuda else "a build for CPUs"
        libraries = [f"{name} {version}".strip() for name, version in torch.backends.items()]
        yield "torch", f"{torch.version}, {build}, {torch.threads} threads", ""
        yield "communication", ", ".join(libraries) or "none", ""
    yield "NVIDIA driver", machine.driver or "none", ""
    for number, gpu in enumerate(machine.gpus):
        yield f"GPU {number}", f"{gpu.name}, {_gib(gpu.memory_bytes)}, compute capability {gpu.capability}", ""
    yield "OMP_NUM_THREADS", machine.omp_num_threads or "not set", ""
    yield "cache", f"{machine.cache}{'' if machine.cache_writable else ' (cannot be written)'}", ""
    yield "runs compute on", device, ""


def _package(package: Package) -> Line:
    needed = f"optional, extra {package.extra}" if package.extra else "needed"
    here = package.installed or f"not installed ({needed})"
    return package.name, here, "" if package.fits else package.command


def _packages(machine: Machine) -> Iterator[Line]:
    yield from map(_package, machine.packages)
    how = "not installed (optional, for experts on GPUs)"
    yield choice.PACKAGE, machine.deep_ep or how, "" if machine.deep_ep else choice.INSTALL


def _attention(report: Report) -> Iterator[Line]:
    for verdict in report.verdicts:
        asked = verdict.name == report.attention
        if not verdict.refusals:
            yield verdict.name, f"{'used: ' if asked else 'can run: '}{verdict.about}", ""
        for refusal in verdict.refusals:
            yield verdict.name, f"{'asked for, and ' if asked else ''}cannot run: it {refusal.text}", refusal.fix


def _config(console: Console, config: Examined, device: str) -> None:
    for notice in config.notices:
        console.print(Text(f"notice: {notice}"))
    for problem in config.problems:
        console.print(Text(problem, BAD))
    processes = "" if config.world_size is None else f" on {config.world_size} process{'es' * (config.world_size > 1)}"
    can = ("cannot run", BAD) if config.problems else ("can run", GOOD)
    console.print(Text.assemble(f"{config.path}{processes}, {device}: ", can))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
