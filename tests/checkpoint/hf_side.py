"""What a rank of ours does with a Hugging Face folder; apart from the tests, for importing transformers costs a worker
seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pool import Context
from small import assembled, step_batch_of, tokens
from ultrascale.checkpoint import stored
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.stored import Reader
from ultrascale.config.schema import Config, Init


def start(context: Context | None, config: Config, init: Init) -> dict[str, Any]:
    """One rank's weights after it started from a folder, the bytes that it read for them, and logits."""
    assembly = assembled(config, context)
    snapshots = Snapshots(assembly.optimizer, Path("nowhere"), {}, assembly.groups.world, None, "full")
    read = 0
    original = Reader._read

    def counted(self: Reader, path: Path, start: int, out: Any) -> None:
        nonlocal read
        read += out.nbytes
        original(self, path, start, out)

    # As with rows of a real size, which are read one by one and without what lies between them.
    with patch.object(Reader, "_read", counted), patch.object(stored, "SHORT_RUN", 1):
        snapshots.start_from(init)
    state = list(state_boxes(assembly.optimizer, owned=False))
    mine, moments = [box for box in state if "/" not in box.name], [box for box in state if "/" in box.name]
    inputs, _ = tokens(config)
    logits = assembly.evaluation.run(step_batch_of(assembly, inputs, None))
    return {
        "weights": [(box.name, box.shape, box.offset, box.tensor.double().numpy().copy()) for box in mine],
        "moments": sorted({v for box in moments for v in box.tensor.unique().tolist()}),
        "read": read,
        "held": sum(box.tensor.numel() for box in mine),
        "logits": torch.cat([out["logits"] for out in logits], dim=1).double().numpy() if logits else None,
    }
