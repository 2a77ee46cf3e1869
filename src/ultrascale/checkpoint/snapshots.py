"""A run's checkpoints: saving its state under a step, and going on from one, whatever layout wrote it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.background import Background
from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.first_weights import fill_from_hf
from ultrascale.checkpoint.folder import folder_name, latest, retain, set_aside_after, sweep, torn
from ultrascale.checkpoint.manifest import Manifest
from ultrascale.checkpoint.read import Verify, load, open_manifest
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.write import save
from ultrascale.comm.agreement import together
from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group
from ultrascale.comm.process_groups import beside_training, end
from ultrascale.config.meaning import CONTENT, Change, differences, refused, way_out
from ultrascale.data.loader import differences as data_differences
from ultrascale.optim.optimizer import Optimizer

_COMPARED_ALREADY = ("global_size", "sequence_length", "seed")
"""Parts of the data's fingerprint that are keys of meaning too."""
_SETTINGS = {"datasets": CONTENT, "packing_version": ("data.packing",)}
"""Keys that stand for the other parts, where they are not those of config.data."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is whole, and how long its writing took."""

    step: int
    folder: Path
    seconds: float


class Snapshots:
    """Saves and restores one run's state.

    root     the run's checkpoints/ folder
    header   what a manifest says beside step and data_position: config, axes, ties, data, …
    asynchronous   whether training goes on while a checkpoint is written
    """

    def __init__(
        self,
        optimizer: Optimizer,
        root: Path,
        header: Mapping[str, Any],
        world: Group,
        keep: int | None,
        verify: Verify,
        asynchronous: bool = False,
    ) -> None:
        self.optimizer, self.root, self.header = optimizer, root, dict(header)
        self.world, self.keep, self.verify = world, keep, verify
        self.set_aside: list[str] = []
        """Later checkpoints that `restore` moved out of the way; rank 0 knows."""
        self.passed_over: list[str] = []
        """Why folders that are newer than the one that `find` found are not taken; rank 0 knows."""
        self.permitted: list[Change] = []
        """What is not as it was in the checkpoint that `restore` read, by leave of checkpoint.allow_changes."""

        self._ended: list[Saved] = []
        self._group = beside_training(world) if asynchronous else world
        self._background = Background(self._write) if asynchronous else None

    def save(self, step: int, data_position: Mapping[str, Any]) -> None:
        """Saves the state after `step`; collective. In the background, it returns when the state may change.

        Raises CheckpointError as `checkpoint.write.save` does; in the background, for the save before this one.
        """
        folder = self.root / folder_name(step)
        header = {"step": step, "data_position": dict(data_position), **self.header}
        boxes = state_boxes(self.optimizer, owned=True)
        if self._background is None:
            self._write(folder, boxes, header)
        else:
            self._background.start(folder, boxes, header)

    def _write(self, folder: Path, boxes: Iterable[Box], header: Mapping[str, Any]) -> None:
        begun = time.perf_counter()
        with self._group.ledger.during("checkpoint"):
            save(folder, boxes, header, self._group)
        if self._group.index == 0:
            retain(self.root, self.keep)
        self._ended.append(Saved(header["step"], folder, time.perf_counter() - begun))

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed; `wait` and the next `save` raise why."""
        return self._background is not None and self._background.failed

    def ended(self) -> list[Saved]:
        """The saves that are whole now, and were not when this was asked last."""
        count = len(self._ended)
        saved, self._ended[:count] = self._ended[:count], []
        return saved

    def wait(self) -> None:
        """Returns when nothing is being saved; raises CheckpointError when that failed."""
        if self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Ends what runs beside training, whether or not it fails."""
        if self._background is not None:
            with suppress(Exception):
                self._background.wait()
            end(self._group)
            self._background = None

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
        would change what the run means, unless checkpoint.allow_changes names them.
        """
        # A gather under way writes what was there before over what is read: masters may lie in its memory.
        self.optimizer.weights.settle()
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

    def start_from_hf(self, path: Path) -> None:
        """Fills the masters from a Hugging Face folder, each rank its own boxes; collective.

        Raises CheckpointError when the folder does not hold this model.
        """
        self.optimizer.weights.settle()
        wanted = [box for box in state_boxes(self.optimizer, owned=False) if "/" not in box.name]
        names = {name for part in gather_json(sorted({box.name for box in wanted}), self.world) for name in part}
        together(
            lambda: fill_from_hf(path, wanted, names, compare_copies=self.world.index == 0), self.world, CheckpointError
        )
        self.optimizer.weights.publish()

    def _refuse_other_meaning(self, folder: Path, manifest: Manifest) -> None:
        config = self.header["config"]
        changed = differences(manifest.header.get("config", {}), config)
        changed += _data_changes(manifest.header.get("data", {}), self.header["data"])
        if unnamed := refused(changed, config):
            raise CheckpointError(
                f"{folder} cannot be gone on from: {'; '.join(change.text for change in unnamed)}; "
                f"{way_out(unnamed, config)}, or start a new run in another run.dir"
            )
        self.permitted = changed


def _data_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Change]:
    """What differs between two fingerprints of the data and is no key of meaning already."""
    changes = []
    for key in {**saved, **current}:
        if key in _COMPARED_ALREADY:
            continue
        as_it_was = {name: value for name, value in current.items() if name != key}
        as_it_was |= {key: saved[key]} if key in saved else {}
        keys = _SETTINGS.get(key, (f"data.{key}",))
        changes += [Change(keys, text) for text in data_differences(as_it_was, dict(current))]
    return changes
