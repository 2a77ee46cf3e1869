"""What a rank of ours does with a Hugging Face folder; apart from the tests, for importing transformers costs a worker
seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from pool import Context
from small import assembled, boxes, step_batch_of, tokens
from ultrascale.checkpoint import stored
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.stored import Reader
from ultrascale.config.schema import Config


def start(context: Context | None, config: Config, path: str) -> dict[str, Any]:
    """One rank's weights after it started from the folder, the bytes that it read for them, and logits."""
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
        snapshots.start_from_hf(Path(path))
    held = sum(box.tensor.numel() for box in state_boxes(assembly.optimizer, owned=False) if "/" not in box.name)
    inputs, _ = tokens(config)
    logits = assembly.evaluation.run(step_batch_of(assembly, inputs, None))
    return {
        "weights": boxes(assembly, "masters"),
        "read": read,
        "held": held,
        "logits": torch.cat([out["logits"] for out in logits], dim=1).double().numpy() if logits else None,
    }
