"""The end of a run as a Hugging Face folder, by what `ultrascale convert to-hf` does. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.convert import to_hf
from ultrascale.checkpoint.folder import latest
from ultrascale.checkpoint.workers import Workers

MEMORY = 512 << 20
"""Bytes of buffers."""


def export_latest(root: Path, target: Path) -> None:
    """Writes the newest checkpoint under `root` as `target`, unless that is there already.

    Raises CheckpointError when there is no checkpoint, or it cannot be written.
    """
    newest = latest(root)
    if newest is None:
        raise CheckpointError(f"{root} holds no whole checkpoint to export")
    if not target.exists():
        with Workers(1, MEMORY) as workers:
            to_hf(newest, target, workers)
