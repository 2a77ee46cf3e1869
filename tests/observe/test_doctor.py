"""What the doctor says of this machine, of machines that lack something, and of configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ultrascale import cli
from ultrascale.config.problem import ConfigError
from ultrascale.observe import machine as machines
from ultrascale.observe.doctor import examine
from ultrascale.observe.doctor_text import show
from ultrascale.observe.machine import Gpu, Host, Machine, Package, Torch, look

CONFIG = str(Path(__file__).parents[2] / "configs" / "debug.yaml")
HOST = Host("node1", True, "Linux", "a processor", 16, 128 << 30, 64 << 30)
TORCH = Torch("2.11.0", "13.0", 16, {"gloo": "", "nccl": "2.28.9"})
GPUS = (Gpu("NVIDIA H200", 139 << 30, "9.0"),) * 8
CORE = Package("torch", ">=2.11", None, "2.11.0")
FLASH = Package("flash-attn", ">=2.7,<3", "flash", None)
WHOLE = Machine(HOST, "3.12.3", "python", TORCH, "580.65.06", GPUS, (CORE, FLASH), "1", "/cache", True, None)


def test_this_machine_is_what_python_and_torch_say_of_it() -> None:
    found = look()
    assert found.torch is not None
    assert (found.torch.version, found.torch.cuda) == (torch.__version__, torch.version.cuda)
    assert "gloo" in found.torch.backends
    assert len(found.gpus) == torch.cuda.device_count()
    assert found.host.cores >= 1
    assert found.host.memory_bytes > 1 << 28
    by_name = {package.name: package for package in found.packages}
    assert {"torch", "numpy", "flash-attn", "tokenizers"} <= set(by_name)
    assert by_name["torch"].fits
    assert "pytest" not in by_name  # a tool of development


def test_json_stands_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--config", CONFIG, "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    attention = report["kernels"]["attention"]
    assert attention["used"] == "sdpa"
    assert attention["for"] == {"compute": "float32", "head_dim": 8}
    assert [one["name"] for one in attention["candidates"] if one["refusals"]] == ["flash_attn"]
    assert report["config"]["problems"] == []
    assert report["runs"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kernels.attention=flash_attn"], "precision.compute=float32; use precision.compute=bfloat16"),
        (["parallel.tp=3"], "parallel.tp=3 does not divide"),
        (["parallel.tpp=3"], "did you mean parallel.tp?"),
        (["data.train=no/such/data"], "no/such/data"),
    ],
)
def test_a_config_that_cannot_run_is_exit_1_and_the_machine_is_shown_all_the_same(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--config", CONFIG, "--device", "cpu", *words]) == 1
    text = capsys.readouterr().out
    assert torch.__version__ in text
    assert said in text
    assert text.endswith("cannot run\n")


def test_without_a_config_nothing_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert "With --config F" in capsys.readouterr().out
    assert cli.main(["doctor", "run.steps=3"]) == 2
    assert "add --config F" in capsys.readouterr().err


def test_a_machine_that_lacks_nothing_has_no_findings() -> None:
    report = examine(WHOLE)
    assert not report.findings
    assert (report.device, report.attention) == ("cuda", "sdpa")


CPU_BUILD = replace(TORCH, version="2.13.0+cpu", cuda=None, backends={"gloo": ""})
LACKING: list[tuple[Machine, str, str]] = [
    (replace(WHOLE, torch=CPU_BUILD, gpus=()), "580.65.06", "pip install --force-reinstall torch"),
    (replace(WHOLE, gpus=()), "sees no GPU beside the NVIDIA driver", "for CUDA 13.0"),
    (replace(WHOLE, torch=replace(TORCH, backends={"gloo": ""})), "no NCCL", "pip install"),
    (replace(WHOLE, host=replace(HOST, shared_memory_bytes=64 << 20)), "/dev/shm has 64 MiB", "--shm-size"),
    (replace(WHOLE, host=replace(HOST, resolves=False)), "node1 leads to no address", "/etc/hosts"),
    (replace(WHOLE, cache_writable=False), "/cache cannot be written", "ULTRASCALE_CACHE"),
    (replace(WHOLE, packages=(replace(CORE, installed="2.9.1"),)), "2.9.1 is installed", "pip install 'torch>=2.11'"),
    (replace(WHOLE, packages=(replace(CORE, installed=None),)), "it is not installed", "pip install 'torch>=2.11'"),
    (replace(WHOLE, driver=None, gpus=(), omp_num_threads=None), "OMP_NUM_THREADS is not set", "16 cores"),
]


@pytest.mark.parametrize(("machine", "said", "fix"), LACKING)
def test_what_a_machine_lacks_is_said_with_what_to_do(
    machine: Machine, said: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examine(machine)
    (finding,) = report.findings
    assert said in finding.text
    assert fix in finding.fix
    show(report)
    assert f"→ {finding.fix}\n" in capsys.readouterr().out  # on a line of its own, to copy


def test_a_gpu_that_is_too_old_is_said_with_what_runs_instead(capsys: pytest.CaptureFixture[str]) -> None:
    report = examine(replace(WHOLE, gpus=(Gpu("Tesla T4", 15 << 30, "7.5"),)))
    assert report.attention == "reference"
    show(report)
    assert "needs a GPU of compute capability 8.0 (Ampere) or later, and this one has 7.5" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "line"), [(None, "not installed"), ("1.2.1+abc", "1.2.1+abc\n")])
def test_deep_ep_is_there_or_how_it_comes_there(
    version: str | None, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examine(replace(WHOLE, deep_ep=version))
    assert report.as_json()["deep_ep"] == version
    show(report)
    text = capsys.readouterr().out
    assert line in next(part for part in text.split("deep_ep")[1:2])
    assert ("github.com/deepseek-ai/DeepEP" in text) == (version is None)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="sees no CUDA device"):
        examine(replace(WHOLE, gpus=()), device="cuda")


@pytest.mark.parametrize(
    ("versions", "installed", "fits"),
    [
        (">=2.11", "2.11.0", True),
        (">=2.11", "2.9.1+cu128", False),
        (">=13.7", "13.10.1", True),
        (">=2.7,<3", None, False),
        ("", "1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(versions: str, installed: str | None, fits: bool) -> None:
    assert Package("name", versions, None, installed).fits == fits


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machines, "MEMORY_LIMIT", limit)
    whole = look().host.memory_bytes
    limit.write_text("max\n")
    assert look().host.memory_bytes == whole
    limit.write_text(f"{1 << 20}\n")
    assert look().host.memory_bytes == 1 << 20


def test_a_folder_that_is_not_there_yet_can_be_written_where_its_parent_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ULTRASCALE_CACHE", str(tmp_path / "a" / "b"))
    assert look().cache_writable
    (tmp_path / "a").write_text("a file")
    assert not look().cache_writable


@pytest.mark.parametrize(
    ("text", "version"),
    [("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC 12.3", "580.65.06"), (None, None)],
)
def test_the_drivers_version_is_read(
    text: str | None, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(machines, "NVIDIA_DRIVER", path)
    assert look().driver == version
