"""A run's checkpoints: saving its state under a step, and going on from one, whatever layout wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.background import Background
from ultrascale.checkpoint.boxes import Box, CheckpointError
from ultrascale.checkpoint.first_weights import FirstWeights, fill_from_checkpoint, fill_from_hf
from ultrascale.checkpoint.folder import (
    checkpoints,
    find_checkpoint,
    folder_name,
    latest,
    point_to,
    retain,
    set_aside_after,
    step_of,
    sweep,
    torn,
)
from ultrascale.checkpoint.manifest import Manifest
from ultrascale.checkpoint.read import Verify, load, open_manifest
from ultrascale.checkpoint.state import refuse_not_finite, state_boxes
from ultrascale.checkpoint.storage import Unreachable
from ultrascale.checkpoint.upload import News, Uploads
from ultrascale.checkpoint.write import save
from ultrascale.comm.agreement import together
from ultrascale.comm.collectives import gather_json
from ultrascale.comm.group import Group
from ultrascale.comm.process_groups import beside_training, end
from ultrascale.config.meaning import CONTENT, Change, differences, refused, way_out
from ultrascale.config.schema import Init
from ultrascale.data.loader import differences as data_differences
from ultrascale.optim.optimizer import Optimizer

_COMPARED_ALREADY = ("global_size", "sequence_length", "seed")
"""Parts of the data's fingerprint that are keys of meaning too."""
_SETTINGS = {"datasets": CONTENT, "packing_version": ("data.packing",)}
"""Keys that stand for the other parts, where they are not those of config.data."""


class Snapshots:
    """Saves and restores one run's state.

    root     the run's checkpoints/ folder
    header   what a manifest says beside step and data_position: config, axes, ties, data, …
    keep, keep_every   which are kept: the newest so many (None: all), and those of steps that are a multiple
    asynchronous   whether training goes on while a checkpoint is written
    storage  a URL where whole checkpoints are copied to, and come from when theirs are newer
    before   called on each rank when a save begins to write, as part of it
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
        keep_every: int | None = None,
        storage: str | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.optimizer, self.root, self.header = optimizer, root, dict(header)
        self.world, self.verify = world, verify
        self.keep, self.keep_every = keep, keep_every
        self.set_aside: list[str] = []
        """Later checkpoints that `restore` moved out of the way; rank 0 knows."""
        self.passed_over: list[str] = []
        """Why folders that are newer than the one that `find` found are not taken; rank 0 knows."""
        self.permitted: list[Change] = []
        """What is not as it was in the checkpoint that `restore` read, by leave of checkpoint.allow_changes."""

        self._news: list[News] = []
        self._before = before
        # Its calls wait for a thread, or for storage, for as long as it takes.
        self._beside = asynchronous or storage is not None
        self._group = beside_training(world) if self._beside else world
        self._background = Background(self._write) if asynchronous else None
        self._uploads: Uploads | None = None
        if storage is not None:
            self._uploads = together(lambda: self._uploads_to(storage), self._group, CheckpointError)

    def _uploads_to(self, storage: str) -> Uploads | None:
        """On rank 0, which sees all files."""
        return Uploads(storage, self.keep, self.keep_every, self._news.append) if self._group.index == 0 else None

    def save(self, step: int, data_position: Mapping[str, Any]) -> None:
        """Saves the state after `step`; collective. In the background, it returns when the state may change.

        Raises CheckpointError as `checkpoint.write.save` does; in the background, for the save before this one.
        """
        begun = time.perf_counter()
        folder = self.root / folder_name(step)
        header = {"step": step, "data_position": dict(data_position), **self.header}
        boxes = state_boxes(self.optimizer, owned=True)
        if self._background is None:
            self._write(folder, boxes, header)
            return
        if self._background.busy:
            self._background.wait()
            seconds = time.perf_counter() - begun
            self._news.append(News("checkpoint_waited", {"step": step, "seconds": seconds}))
        self._background.start(folder, boxes, header)

    def _write(self, folder: Path, boxes: Iterable[Box], header: Mapping[str, Any]) -> None:
        begun, boxes = time.perf_counter(), list(boxes)
        with self._group.ledger.during("checkpoint"):
            together(lambda: self._prepare(boxes), self._group, CheckpointError)
            save(folder, boxes, header, self._group)
        seconds = time.perf_counter() - begun
        self._news.append(News("checkpoint", {"step": header["step"], "path": str(folder), "seconds": seconds}))
        if self._group.index == 0:
            self._tidy(folder)

    def _prepare(self, boxes: Iterable[Box]) -> None:
        try:
            self._before()
        except OSError as error:
            raise CheckpointError(f"the checkpoint was not saved: {error}") from error
        refuse_not_finite(boxes)

    def _tidy(self, newest: Path) -> None:
        """What follows a save that is whole. It is whole whether or not old ones can be removed: that is said."""
        if self._uploads is not None:
            self._uploads.add(newest)
        try:
            point_to(self.root, newest)
            self._remove_old()
        except (CheckpointError, OSError) as error:
            self._news.append(
                News("checkpoint_not_removed", {"reason": str(error)}, f"an old checkpoint stays: {error}")
            )

    def _remove_old(self) -> None:
        """What is not on storage yet is kept until it is."""
        spare = self._uploads.pending() if self._uploads is not None else []
        retain(self.root, self.keep, self.keep_every, spare)

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed; `wait` and the next `save` raise why."""
        return self._background is not None and self._background.failed

    def news(self) -> list[News]:
        """What has happened since this was asked last; of storage and old checkpoints, rank 0 knows."""
        count = len(self._news)
        told, self._news[:count] = self._news[:count], []
        return told

    def wait(self) -> None:
        """Returns when nothing is being saved or copied to storage; collective. Raises CheckpointError when a save
        failed."""
        if self._background is not None:
            self._background.wait()
        if self._uploads is not None:
            self._uploads.wait()
            with suppress(CheckpointError):  # it was said when it was tried first
                self._remove_old()
        if self._beside:
            gather_json(None, self._group)

    def close(self) -> None:
        """Ends what runs beside training, whether or not it fails."""
        if self._uploads is not None:
            self._uploads.close()
        if self._background is not None:
            with suppress(Exception):
                self._background.wait()
            self._background = None
        if self._beside:
            end(self._group)
            self._beside = False

    def find(self, resume: str) -> Path | None:
        """The checkpoint that `run.resume` means; rank 0 looks, so that all ranks agree. None: a new run."""
        look = self._group.index == 0
        found = together(lambda: str(self._find(resume) or "") if look else "", self._group, CheckpointError)
        found = gather_json(found, self._group)[0]
        return Path(found) if found else None

    def _find(self, resume: str) -> Path | None:
        sweep(self.root)
        self.passed_over = self._fetch_newer(resume)
        own = latest(self.root)
        self.passed_over += [str(reason) for reason in torn(self.root)]
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

    def _fetch_newer(self, resume: str) -> list[str]:
        """Brings the newest checkpoint from storage when it is newer than those here; returns why others are not taken.

        Raises CheckpointError when storage cannot be asked: what is here may be old.
        """
        by_name = resume not in ("auto", "never") and Path(resume).resolve().parent == self.root.resolve()
        if self._uploads is None or by_name:
            return []
        own, damaged = latest(self.root), []
        for name in self._uploads.storage.names():
            if own is not None and step_of(Path(name)) <= step_of(own):
                break
            if resume == "never":
                raise CheckpointError(
                    f"checkpoint.storage={self._uploads.storage} holds checkpoints of a run, up to {name}, and "
                    "run.resume=never wants none; use run.resume=auto to go on from there, or another URL"
                )
            try:
                folder = self._uploads.storage.fetch(name, self.root)
            except Unreachable:
                raise
            except CheckpointError as error:
                damaged.append(str(error))
            else:
                self._news.append(
                    News("download", {"step": step_of(folder), "path": f"{self._uploads.storage}/{name}"})
                )
                break
        return damaged

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
            return load(folder, wanted, self.verify, manifest=manifest, claimed=names, among=together_with)

        together_with = (self.world.index, self.world.size)
        # A rank alone may find damage in what only it reads; then none may go on.
        manifest = together(fill, self.world, CheckpointError)
        self.optimizer.weights.publish()
        in_own_past = go_back and folder.resolve().parent == self.root.resolve()
        back_to, orders = manifest.step if in_own_past else None, self._group.index == 0
        together(lambda: self._settle(back_to) if orders else None, self._group, CheckpointError)
        return manifest

    def _settle(self, back_to: int | None) -> None:
        """Puts the folder and storage in order before the run goes on.

        back_to   an earlier step of this very run: what came after it is set aside, not overwritten
        """
        if back_to is not None:
            self.set_aside = [str(path) for path in set_aside_after(self.root, back_to)]
            if self._uploads is not None:
                names = self._uploads.storage.set_aside_after(back_to)
                self.set_aside += [f"{self._uploads.storage}/{name}" for name in names]
        kept = list(checkpoints(self.root))
        if kept:
            point_to(self.root, kept[0])
        if self._uploads is not None:
            # What could not be sent before the run was broken off.
            milestones = [f for f in kept[:0:-1] if self.keep_every is not None and step_of(f) % self.keep_every == 0]
            for path in (*milestones, *kept[:1]):
                self._uploads.add(path)

    def start_from(self, init: Init) -> FirstWeights:
        """Fills the masters from the folder or the checkpoint that it names, each rank its own boxes; collective.

        Raises CheckpointError when what is there is not this model, and no rule allows the difference.
        """
        self.optimizer.weights.settle()
        wanted = [box for box in state_boxes(self.optimizer, owned=False) if "/" not in box.name]
        mine = sorted({(box.name, box.shape) for box in wanted})
        shapes = {name: tuple(shape) for part in gather_json(mine, self.world) for name, shape in part}

        def newest() -> str:
            return str(find_checkpoint(Path(init.from_checkpoint))) if init.from_checkpoint and first else ""

        def fill() -> FirstWeights:
            if init.from_checkpoint is not None:
                among = (self.world.index, self.world.size)
                return fill_from_checkpoint(Path(folder), wanted, shapes, init.rules, self.verify, among)
            assert init.from_hf is not None
            return fill_from_hf(Path(init.from_hf), wanted, shapes, init.rules, compare_copies=first)

        # Rank 0 looks: the source may be a run that saves meanwhile.
        first = self.world.index == 0
        folder = gather_json(together(newest, self.world, CheckpointError), self.world)[0]
        done = together(fill, self.world, CheckpointError)
        self.optimizer.weights.publish()
        return done

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
