"""What this machine has, as data: hardware, libraries, environment. Imports torch when asked, and not before."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from ultrascale.comm.backends import backends
from ultrascale.data.cache import cache_folder
from ultrascale.kernels.choice import installed
from ultrascale.parallel.experts import choice

RESOLVE_SECONDS = 2.0
"""How long to wait for a name server that may not be there."""
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
SHARED_MEMORY = Path("/dev/shm")

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?P<versions>[^;\s]*)\s*(;\s*extra == \"(?P<extra>\w+)\")?")
_LEAST = re.compile(r">=([\d.]+)")


@dataclass(frozen=True)
class Package:
    """One that ultrascale requires, or that an extra of it does."""

    name: str
    versions: str
    """That fit, e.g. ">=2.11"."""
    extra: str | None
    """None: always needed."""
    installed: str | None

    @property
    def fits(self) -> bool:
        """Whether it is there and not too old."""
        least = _LEAST.search(self.versions)
        return self.installed is not None and (least is None or _numbers(self.installed) >= _numbers(least[1]))

    @property
    def command(self) -> str:
        """Installs it, with what else belongs to its extra."""
        if self.extra is None:
            return f"pip install '{self.name}{self.versions}'"
        # flash-attn is built against the torch that is installed.
        return f"pip install 'ultrascale[{self.extra}]'" + " --no-build-isolation" * (self.extra == "flash")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: str
    """Compute capability, e.g. "9.0"."""


@dataclass(frozen=True)
class Host:
    name: str
    resolves: bool
    """Whether the name leads to an address, which processes on other hosts need."""
    system: str
    processor: str
    cores: int
    """That this process may use."""
    memory_bytes: int
    """Of the host, or of the container where that has less."""
    shared_memory_bytes: int
    """Size of /dev/shm, through which the GPUs of a host talk where they have no direct way; 0 = there is none."""


@dataclass(frozen=True)
class Torch:
    version: str
    cuda: str | None
    """Version of CUDA that it was built for; None: a CPU build."""
    threads: int
    backends: dict[str, str]
    """Communication library → version."""


@dataclass(frozen=True)
class Machine:
    host: Host
    python: str
    executable: str
    torch: Torch | None
    """None: it cannot be imported."""
    driver: str | None
    """Version of the NVIDIA driver."""
    gpus: tuple[Gpu, ...]
    packages: tuple[Package, ...]
    omp_num_threads: str | None
    """The environment variable."""
    cache: str
    cache_writable: bool
    deep_ep: str | None
    """Version of the package by which tokens can travel to experts, and which is on no index."""


def look() -> Machine:
    """This machine, as this Python sees it."""
    cache = cache_folder()
    return Machine(
        host=_host(),
        python=platform.python_version(),
        executable=sys.executable,
        torch=_torch(),
        driver=_driver(),
        gpus=_gpus(),
        packages=_packages(importlib.metadata.requires("ultrascale") or []),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        cache=str(cache),
        cache_writable=_writable(cache),
        deep_ep=installed(choice.PACKAGE),
    )


def _host() -> Host:
    name = socket.gethostname()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(
        name=name,
        resolves=_resolves(name),
        system=platform.platform(),
        processor=_processor(),
        cores=cores,
        memory_bytes=_memory(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
    )


def _resolves(name: str) -> bool:
    """In a thread, as a look-up cannot be given a time limit."""
    found = threading.Event()

    def ask() -> None:
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            return
        found.set()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(RESOLVE_SECONDS)
    return found.is_set()


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.machine()


def _memory() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = MEMORY_LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def _torch() -> Torch | None:
    try:
        import torch
    except ImportError:
        return None
    return Torch(torch.__version__, torch.version.cuda, torch.get_num_threads(), backends())


def _driver() -> str | None:
    try:
        text = NVIDIA_DRIVER.read_text(encoding="utf-8")
    except OSError:
        return None
    number = re.search(r"\b\d{3,}\.[\d.]+\b", text)
    return number[0] if number else "unknown"


def _gpus() -> tuple[Gpu, ...]:
    try:
        import torch
    except ImportError:
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(Gpu(about.name, about.total_memory, f"{about.major}.{about.minor}"))
    return tuple(found)


def _packages(requirements: list[str]) -> tuple[Package, ...]:
    """In the order of pyproject.toml, without the tools of development."""
    found = []
    for requirement in requirements:
        parts = _REQUIREMENT.match(requirement)
        if parts and parts["extra"] != "dev":
            found.append(Package(parts["name"], parts["versions"], parts["extra"], _version(parts["name"])))
    return tuple(found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` → (2, 13, 0)"""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _writable(folder: Path) -> bool:
    """Whether files can be written there, in a folder that may have to be made first."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)
