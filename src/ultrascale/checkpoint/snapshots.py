"""A run's checkpoints: saving its state under a step, and going on from one, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import folder_name, latest, retain, set_aside_after, sweep, torn
from ultrascale.checkpoint.manifest import Manifest
from ultrascale.checkpoint.read import Verify, load, open_manifest
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.write import save
from ultrascale.comm.agreement import together
from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group
from ultrascale.config.meaning import differences
from ultrascale.data.loader import differences as data_differences
from ultrascale.optim.optimizer import Optimizer


class Snapshots:
    """Saves and restores one run's state.

    root     the run's checkpoints/ folder
    header   what a manifest says beside step and data_position: config, axes, ties, data, …
    """

    def __init__(
        self,
        optimizer: Optimizer,
        root: Path,
        header: Mapping[str, Any],
        world: Group,
        keep: int | None,
        verify: Verify,
    ) -> None:
        self.optimizer, self.root, self.header = optimizer, root, dict(header)
        self.world, self.keep, self.verify = world, keep, verify
        self.set_aside: list[str] = []
        """Later checkpoints that `restore` moved out of the way; rank 0 knows."""
        self.passed_over: list[str] = []
        """Why folders that are newer than the one that `find` found are not taken; rank 0 knows."""

    def save(self, step: int, data_position: Mapping[str, Any]) -> Path:
        """Saves the state after `step`; collective. Raises CheckpointError as `checkpoint.write.save` does."""
        folder = self.root / folder_name(step)
        header = {"step": step, "data_position": dict(data_position), **self.header}
        with self.world.ledger.during("checkpoint"):
            save(folder, state_boxes(self.optimizer, owned=True), header, self.world)
        if self.world.index == 0:
            retain(self.root, self.keep)
        return folder

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` means; rank 0 looks, so that all ranks agree. None: a new run."""
        look = self.world.index == 0
        found = together(lambda: str(self._find(resume) or "") if look else "", self.world, CheckpointError)
        found = gather_json(found, self.world)[0]
        return Path(found) if found else None

    def _find(self, resume: str) -> Path | None:
        sweep(self.root)
        own = latest(self.root)
        self.passed_over = [str(reason) for reason in torn(self.root)]
        if own is None and self.passed_over:
            raise CheckpointError(
                f"{self.root} holds checkpoints, and none is whole: {'; '.join(self.passed_over)}; mend them, or move "
                "them away to start from step 0"
            )
        if resume in ("auto", "never"):
            return own
        path = Path(resume)
        if not path.exists():
            raise CheckpointError(f"run.resume={resume}: there is no such checkpoint or run folder")
        if path.resolve().parent == self.root.resolve():
            return path
        if own is not None:
            # A run that was started from elsewhere and has saved since goes on from its own.
            return own
        if (path / "checkpoints").is_dir():
            found = latest(path / "checkpoints")
            if found is None:
                raise CheckpointError(f"run.resume={resume}: the run folder holds no whole checkpoint")
            return found
        return path

    def restore(self, folder: Path, go_back: bool = False) -> Manifest:
        """Fills masters and moments from a checkpoint of any layout; collective.

        go_back   whether this checkpoint was asked for by name: then later ones of the same run are set aside

        Raises CheckpointError when the checkpoint is damaged, is of another model, or was made under settings that
        would change what the run means.
        """
        wanted = list(state_boxes(self.optimizer, owned=False))
        names = {name for part in gather_json(sorted({box.name for box in wanted}), self.world) for name in part}

        def fill() -> Manifest:
            manifest = open_manifest(folder)
            self._refuse_other_meaning(folder, manifest)
            return load(folder, wanted, self.verify, manifest=manifest, claimed=names)

        # A rank alone may find damage in what only it reads; then none may go on.
        manifest = together(fill, self.world, CheckpointError)
        self.optimizer.weights.publish()
        if go_back and self.world.index == 0 and folder.resolve().parent == self.root.resolve():
            # To an earlier step of this very run: what came after it is set aside, not overwritten.
            self.set_aside = [str(path) for path in set_aside_after(self.root, manifest.step)]
        return manifest

    def _refuse_other_meaning(self, folder: Path, manifest: Manifest) -> None:
        changed = differences(manifest.header.get("config", {}), self.header["config"])
        changed += data_differences(manifest.header.get("data", {}), self.header["data"])
        if changed:
            raise CheckpointError(
                f"{folder} cannot be gone on from: {'; '.join(changed)}; set these back, or start a new run in another "
                "run.dir"
            )
