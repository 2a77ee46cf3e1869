"""Which attention backend a config gets, and what it is told when it asks for one that cannot run."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch

from small import config_of
from ultrascale import train
from ultrascale.config.schema import Kernels
from ultrascale.kernels import choice
from ultrascale.kernels.attention_cpu import CpuFlashAttention
from ultrascale.kernels.attention_cuda import CudaFlashAttention
from ultrascale.kernels.attention_flash import FlashAttention
from ultrascale.kernels.attention_reference import ReferenceAttention
from ultrascale.kernels.check import check, check_device
from ultrascale.kernels.choice import BEST_FIRST, FLASH_ATTN, Demand, Place, attention_backend, choose, verdicts

ROOT = Path(__file__).parents[2]
HALF = Demand("bfloat16", 128)
GPU = Place("cuda", (9, 0), None)
WITH_PACKAGE = Place("cuda", (9, 0), "2.8.3.post1")

Install = Callable[[str | None], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a version of flash-attn seem installed, or none."""

    def pretend(version: str | None) -> None:
        def of(package: str) -> str:
            assert package == "flash-attn"
            if version is None:
                raise PackageNotFoundError
            return version

        monkeypatch.setattr(choice, "version", of)

    return pretend


def test_auto_is_the_first_that_can_run_on_every_machine() -> None:
    computes, heads = ("float64", "float32", "bfloat16", "float16"), (2, 64, 256, 512)
    capabilities, packages = ((7, 5), (8, 0), (12, 0)), (None, "2.5.9", "2.7.0", "3.0.0b1")
    places = [Place("cpu", (0, 0), package) for package in packages]
    places += [Place("cuda", *rest) for rest in product(capabilities, packages)]
    for compute, head, place in product(computes, heads, places):
        demand = Demand(compute, head)
        found = verdicts(demand, place)
        assert [one.name for one in found] == list(BEST_FIRST)
        can = [one.name for one in found if not one.refusals]
        assert choose("auto", demand, place).name == can[0]
        assert "reference" in can
        half = compute in ("bfloat16", "float16") and head <= 256 and place.capability >= (8, 0)
        assert ("sdpa" in can) == (place.device == "cpu" or half)
        assert ("flash_attn" in can) == (half and place.flash_attn == "2.7.0")


@pytest.mark.parametrize(
    ("demand", "place", "said"),
    [
        (HALF, Place("cpu", (0, 0), "2.8.0"), "runs on GPUs alone"),
        (HALF, GPU, "needs the package flash-attn, which is not installed"),
        (HALF, Place("cuda", (9, 0), "2.6.3"), "needs flash-attn>=2.7,<3, and 2.6.3 is installed"),
        (HALF, Place("cuda", (7, 5), "2.8.0"), "compute capability 8.0 (Ampere) or later, and this one has 7.5"),
        (Demand("float64", 128), WITH_PACKAGE, "precision.compute=float64"),
        (Demand("bfloat16", 320), WITH_PACKAGE, "heads of up to 256, and model.head_dim=320"),
    ],
)
def test_what_keeps_flash_attn_from_running_is_said(demand: Demand, place: Place, said: str) -> None:
    (refusal,) = choose("flash_attn", demand, place).refusals
    assert said in refusal.text


def asking(name: str, **keys: Any) -> Any:
    return config_of({"kernels.attention": name, "precision.compute": "bfloat16", **keys})


def test_a_backend_that_can_run_nowhere_is_a_problem_of_the_config(install: Install) -> None:
    install(None)
    (problem,) = check(asking("flash_attn"))
    assert problem.key == "kernels.attention"
    assert "pip install 'ultrascale[flash]' --no-build-isolation, or use kernels.attention=auto" in problem.message
    install("2.8.1")
    assert not check(asking("flash_attn"))
    (problem,) = check(asking("flash_attn", **{"precision.compute": "float64"}))
    assert "precision.compute=float64; use precision.compute=bfloat16, or" in problem.message
    (problem,) = check(asking("flash_attn", **{"model.head_dim": 512}))
    assert "model.head_dim=512; use model.head_dim=256 or less, or" in problem.message
    for name in ("auto", "sdpa", "reference"):
        assert not check(asking(name, **{"precision.compute": "float64"}))


def test_a_backend_that_cannot_run_on_this_device_is_a_problem_there(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("2.8.1")
    (problem,) = check_device(asking("flash_attn"), "cpu")
    assert "runs on GPUs alone, and this run is on cpu; use kernels.attention=auto" in problem.message
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    (problem,) = check_device(asking("sdpa"), "cuda")
    assert "this one has 7.0; use kernels.attention=auto" in problem.message
    assert not check_device(asking("auto"), "cuda")
    assert not check_device(asking("reference"), "cuda")


def test_training_refuses_such_a_backend_before_any_process_group(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("2.8.1")
    words = ["kernels.attention=flash_attn", "precision.compute=bfloat16", "--device", "cpu"]
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "nowhere.invalid",
        "MASTER_PORT": "1",
    }
    assert train.main(["--config", str(ROOT / "configs/debug.yaml"), *words], environment) == 2
    assert "command line: kernels.attention=flash_attn runs on GPUs alone" in capsys.readouterr().err


def test_the_backend_that_was_chosen_is_the_one_that_is_made(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert isinstance(attention_backend(asking("auto"), cpu), CpuFlashAttention)
    assert isinstance(attention_backend(asking("reference"), cpu), ReferenceAttention)
    assert isinstance(attention_backend(asking("auto"), cuda), CudaFlashAttention)
    float32 = asking("auto", **{"precision.compute": "float32"})
    assert isinstance(attention_backend(float32, cuda), ReferenceAttention)
    install("2.7.4")
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    assert isinstance(attention_backend(asking("auto"), cuda), FlashAttention)
    assert isinstance(attention_backend(asking("sdpa"), cuda), CudaFlashAttention)


def test_the_schema_and_the_extra_name_what_there_is() -> None:
    assert set(get_args(Kernels.model_fields["attention"].annotation)) == {"auto", *BEST_FIRST}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, behind = (".".join(map(str, numbers)) for numbers in FLASH_ATTN)
    assert project["optional-dependencies"]["flash"] == [f"flash-attn>={first},<{behind}"]
