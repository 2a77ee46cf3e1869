"""How many bytes of gradients are reduced at a time: what the config says, or what its links ask for. Needs no torch.

A function of config and kind of device alone, so that all ranks cut their buckets alike.
"""

from __future__ import annotations

from ultrascale.config.schema import Config
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.links import best_bucket, link_between
from ultrascale.parallel.layout import BATCH_AXES
from ultrascale.parallel.shards import Sharding

MOST = 512 * 2**20
"""Bytes of an automatic bucket. A sum under way holds its bucket again as it travels, and once more as pieces arrive;
beyond this, memory for them grows and little latency is saved."""

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def bucket_bytes(config: Config, mesh: Mesh, parameters: int, device: str) -> int:
    """Bytes of gradients, as they are accumulated, that share a bucket at ZeRO stages 0 and 1.

    config       resolved
    parameters   of the whole model
    device       cpu or cuda

    Automatic: the best size of `mesh/links.py` for what a rank sums (P/(tp·pp) gradients in the dtype of travel) over
    the axes that share them out, at most MOST, as a whole number of layers: units stay whole, so it is at least the
    largest. From stage 2 on every unit is a bucket of its own, which is what 0 stands for.
    """
    settings, stage = config.parallel, config.parallel.zero_stage
    if stage >= 2:
        return 0
    if settings.bucket_bytes != "auto":
        return settings.bucket_bytes

    accumulated = _BYTES["float64" if config.precision.compute == "float64" else "float32"]
    travels = _BYTES[config.precision.reduce] if config.precision.reduce else accumulated
    replicas = mesh.expand(BATCH_AXES)
    ranks = mesh.members(0, Sharding.on(mesh, stage, BATCH_AXES).of(replicas) or replicas)
    elements = -(-parameters // (settings.tp * settings.pp))
    best: float = elements
    if len(ranks) > 1:  # else nothing travels
        best = best_bucket(elements * travels, len(ranks), link_between(ranks, device)) / travels
    size = min(best, MOST / accumulated)
    layer, vocabulary = _units(config, parameters)
    whole = elements if size >= elements else max(layer * max(1, round(size / layer)), vocabulary)
    return min(elements, whole) * accumulated


def _units(config: Config, parameters: int) -> tuple[int, int]:
    """Parameters that a rank holds of a layer, and of the embedding or head."""
    model, tp = config.model, config.parallel.tp
    vocabulary = model.vocab_size * model.hidden_size
    layers = parameters - vocabulary * (1 if model.tie_word_embeddings else 2)
    return -(-layers // (model.num_hidden_layers * tp)), -(-vocabulary // tp)
