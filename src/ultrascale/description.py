"""What a run says of itself: in its folder's manifest, and in the header of its checkpoints."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from ultrascale.assembly import Assembly, planned_groups
from ultrascale.comm import collectives
from ultrascale.config.schema import Config
from ultrascale.data.loader import Data
from ultrascale.mesh.groups import describe
from ultrascale.observe import mfu
from ultrascale.precision.policy import Policy


def config_tree(config: Config) -> dict[str, Any]:
    """The resolved config as plain dicts, lists and scalars."""
    return config.model_dump(mode="json")


def precision(policy: Policy) -> dict[str, str]:
    """The dtype of each hop of a gradient."""
    stages = {
        "compute": policy.compute,
        "master": policy.master,
        "accumulate": policy.accumulate,
        "reduce": policy.reduce,
    }
    return {stage: str(dtype).removeprefix("torch.") for stage, dtype in stages.items()}


def versions() -> dict[str, str]:
    """What computes."""
    return {
        "ultrascale": version("ultrascale"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def checkpoint_header(assembly: Assembly, data: Data) -> dict[str, Any]:
    """A checkpoint manifest's keys beside step and data position."""
    return {
        "config": config_tree(assembly.config),
        "axes": dict(assembly.mesh.sizes),
        "order": list(assembly.mesh.order),
        "ties": {tie.group: list(tie.names) for tie in assembly.store.ties()},
        "data": data.fingerprint(),
        "precision": precision(assembly.policy),
        "versions": versions(),
    }


def tokens_so_far(header: Mapping[str, Any]) -> int:
    """Tokens read up to a checkpoint: not those of a step times the step, where sequences became longer in between."""
    batch = header["config"]["batch"]
    return header["data_position"].get("tokens", header["step"] * batch["global_size"] * batch["sequence_length"])


def run_manifest(assembly: Assembly, parameters: int) -> dict[str, Any]:
    """What this run is, for people and programs that look at it later; collective."""
    mesh = assembly.mesh
    places = collectives.gather_json([socket.gethostname(), str(assembly.device)], assembly.groups.world)
    return {
        "world_size": mesh.world_size,
        "axes": dict(mesh.sizes),
        "order": list(mesh.order),
        "ranks": [
            {"rank": rank, "coordinates": mesh.coordinates(rank), "host": host, "device": device}
            for rank, (host, device) in enumerate(places)
        ],
        "groups": describe(mesh, planned_groups(assembly.config, mesh)),
        "schedule": {
            "name": assembly.plan.name,
            "stages": assembly.plan.stages,
            "micro_batches": assembly.plan.micro_batches,
            "layers": [list(stage.layers) for stage in assembly.split],
        },
        "precision": precision(assembly.policy),
        "bucket_bytes": assembly.store.bucket_bytes,
        "parameters": parameters,
        "mfu_formula": mfu.FORMULA,
        "versions": versions(),
    }
