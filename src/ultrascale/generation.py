"""Text from a trained model: one process, any checkpoint, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ultrascale.assembly import Assembly, assemble
from ultrascale.checkpoint.read import load, open_manifest
from ultrascale.checkpoint.state import state_boxes
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.schema import Config, Kernels, Pipeline
from ultrascale.mesh.axes import Mesh
from ultrascale.models.batch import MicroBatch
from ultrascale.parallel.init import uniform_at
from ultrascale.parallel.passes import Pass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Draw only among the k likeliest."""
    seed: int = 0


def load_model(checkpoint: Path, device: torch.device) -> Assembly:
    """The checkpoint's model on one process, in the precision that it was trained in."""
    manifest = open_manifest(checkpoint)
    config = Config.model_validate(manifest.header["config"], strict=False)
    one = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "sequence_parallel": False}
    config = config.model_copy(
        # One stage, and the kernels of this machine.
        update={
            "parallel": config.parallel.model_copy(update=one),
            "pipeline": Pipeline(),
            "kernels": Kernels(),
        }
    )
    mesh = Mesh.of(config)
    assembly = assemble(config, mesh, 0, create(mesh, (), Ledger()), device)
    parameters = [box for box in state_boxes(assembly.optimizer, owned=False) if "/" not in box.name]
    load(checkpoint, parameters, manifest=manifest)
    assembly.optimizer.weights.publish()
    return assembly


@torch.no_grad()
def generate(assembly: Assembly, prompt: Sequence[int], count: int, sampling: Sampling) -> Iterator[int]:
    """Up to `count` further token ids, one by one; draws are a function of (seed, place), not of a stream.

    The context is cut at `model.max_position_embeddings` from the left.
    """
    ids = list(prompt)
    (stage,) = assembly.stages.values()
    window = assembly.config.model.max_position_embeddings
    for place in range(count):
        context = torch.tensor(ids[-window:], dtype=torch.int64, device=assembly.device).unsqueeze(1)
        positions = torch.arange(context.shape[0], device=assembly.device).unsqueeze(1)
        out = stage(None, MicroBatch(context, (), positions), Pass(0, 0, None))
        assert isinstance(out, dict)
        token = _draw(out["logits"][-1, 0], place, sampling)
        ids.append(token)
        yield token


def _draw(logits: torch.Tensor, place: int, sampling: Sampling) -> int:
    """One token id from logits [vocabulary]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.to(torch.float64) / sampling.temperature
    if sampling.top_k is not None:
        kept = logits.topk(min(sampling.top_k, logits.numel())).values
        logits = logits.masked_fill(logits < kept[-1], -torch.inf)
    index = torch.tensor([place], dtype=torch.int64, device=logits.device)
    draw = uniform_at(index, sampling.seed, "generation")
    cumulative = logits.softmax(-1).cumsum(-1)
    return int(torch.searchsorted(cumulative, draw * cumulative[-1]).clamp(max=logits.numel() - 1))
