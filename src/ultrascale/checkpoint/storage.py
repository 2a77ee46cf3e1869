"""Copies of checkpoints on storage that fsspec reaches, and the way back. Needs no torch.

    URL/step-00000010/rank-00000.safetensors …
    URL/step-00000010/manifest.json     put there last, taken away first

So there too, a folder with a manifest is whole and any other is no checkpoint, without a rename, which object stores do
not have. What is fetched is compared with every checksum before it gets its name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import metadata
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from uuid import uuid4

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.commit import refuse_to_replace
from ultrascale.checkpoint.folder import is_step_name, set_aside, step_of, surplus, sync_folder, temporary_name, whole
from ultrascale.checkpoint.manifest import MANIFEST, Manifest, decode
from ultrascale.checkpoint.scan import scan_all
from ultrascale.checkpoint.stored import stored_tensors

Result = TypeVar("Result")

PAUSES = (1.0, 4.0, 15.0)
"""Seconds before each further attempt: a storage that is away for some seconds costs nothing but them."""
AT_A_TIME = 4
"""Files on their way."""


class Unreachable(CheckpointError):
    """Storage did not answer, or refused, each time that it was asked."""


class Storage:
    """Checkpoints below a URL: Storage("s3://bucket/runs/a").

    pause   waits some seconds; another may raise, to give up

    Raises CheckpointError when fsspec does not know the protocol, or a package is missing.
    """

    def __init__(self, url: str, pause: Callable[[float], None] = time.sleep) -> None:
        self.url, self._pause = url.rstrip("/"), pause
        self._files, root = _filesystem(url)
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        """Names of the checkpoints that have a manifest, newest first."""

        def listed() -> list[str]:
            self._files.invalidate_cache()
            if not self._files.isdir(self._root):
                return []
            found = (PurePosixPath(path.rstrip("/")).name for path in self._files.ls(self._root, detail=False))
            return [n for n in found if is_step_name(n) and self._files.exists(self._path(n, MANIFEST))]

        return sorted(self._again("list", listed), key=lambda name: step_of(Path(name)), reverse=True)

    def is_whole(self, name: str) -> bool:
        """Whether the manifest is valid and all files are there in their sizes."""
        try:
            manifest = self._manifest(name)
        except Unreachable:
            raise
        except CheckpointError:
            return False
        return manifest.step == step_of(Path(name)) and not self._missing(name, manifest)

    def whole_ones(self) -> Iterator[str]:
        """Newest first; each is looked at only when it is asked for."""
        return (name for name in self.names() if self.is_whole(name))

    def put(self, folder: Path) -> bool:
        """Copies a whole checkpoint there; returns False when it is there already. Raises CheckpointError when it
        cannot."""
        manifest, name = whole(folder), folder.name
        text = (folder / MANIFEST).read_bytes()

        def copied(file: str) -> None:
            put = partial(self._files.put_file, str(folder / file), self._path(name, file))
            self._again(f"write {name}/{file}", put)

        if self._again(f"look for {name}", partial(self._files.exists, self._path(name, MANIFEST))):
            there = self._again(f"read {name}/{MANIFEST}", partial(self._files.cat_file, self._path(name, MANIFEST)))
            if there == text and not self._missing(name, manifest):
                return False
            # Another one of this step, of a future that the run went back from.
            self._again(f"remove {name}", partial(self._forget, name))
        self._again(f"make {name}", partial(self._files.makedirs, self._path(name), exist_ok=True))
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            list(pool.map(copied, manifest.files))
        if missing := self._missing(name, manifest):
            raise CheckpointError(f"{self.url}/{name}: {missing[0]} did not arrive whole")
        self._again(f"write {name}/{MANIFEST}", partial(self._files.pipe_file, self._path(name, MANIFEST), text))
        return True

    def fetch(self, name: str, root: Path) -> Path:
        """Copies a checkpoint into the folder `root`, compares every checksum, and gives it its name; returns it.

        What stands there under that name, and is not whole, is set aside. Raises CheckpointError when the checkpoint
        cannot be read, or is damaged, or a whole one would be replaced.
        """
        folder = root / name
        refuse_to_replace(folder)
        manifest = self._manifest(name)
        root.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(folder)
        temporary.mkdir()

        def copied(file: str) -> None:
            get = partial(self._files.get_file, self._path(name, file), str(temporary / file))
            self._again(f"read {name}/{file}", get)
            _sync(temporary / file)

        try:
            with ThreadPoolExecutor(AT_A_TIME) as pool:
                list(pool.map(copied, manifest.files))
            damage = _damage(temporary, manifest)
            if manifest.step != step_of(folder):
                damage.append(f"its manifest is of step {manifest.step}")
            if damage:
                raise CheckpointError(f"{self.url}/{name}: {'; '.join(damage[:3])}")
            (temporary / MANIFEST).write_bytes(manifest.encode())
            _sync(temporary / MANIFEST)
            sync_folder(temporary)
            if folder.exists():
                set_aside(folder)
            os.rename(temporary, folder)
            sync_folder(root)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return folder

    def retain(self, keep: int | None, keep_every: int | None) -> list[str]:
        """Removes the whole checkpoints that are surplus, as `folder.retain` does; returns those removed."""
        found = [] if keep is None else [Path(name) for name in self.whole_ones()]
        old = [folder.name for folder in surplus(found, keep, keep_every)]
        for name in old:
            self._again(f"remove {name}", partial(self._forget, name))
        return old

    def set_aside_after(self, step: int) -> list[str]:
        """Takes their manifests from the checkpoints of later steps: a run that went back must not resume into its old
        future. Their files stay until others of the same step are put there."""
        later = [name for name in self.names() if step_of(Path(name)) > step]
        for name in later:
            aside = self._path(name, f"{MANIFEST}.set-aside-{uuid4().hex[:12]}")
            self._again(f"rename {name}", partial(self._files.mv, self._path(name, MANIFEST), aside))
        return later

    def _forget(self, name: str) -> None:
        if self._files.exists(self._path(name, MANIFEST)):
            self._files.rm_file(self._path(name, MANIFEST))
        if self._files.exists(self._path(name)):  # an empty folder is nothing to an object store
            self._files.rm(self._path(name), recursive=True)

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _manifest(self, name: str) -> Manifest:
        data = self._again(f"read {name}/{MANIFEST}", partial(self._files.cat_file, self._path(name, MANIFEST)))
        try:
            return decode(data)
        except CheckpointError as error:
            raise CheckpointError(f"{self.url}/{name}/{MANIFEST}: {error}") from error

    def _missing(self, name: str, manifest: Manifest) -> list[str]:
        """Files that are not there in their size."""

        def listed() -> dict[str, int]:
            self._files.invalidate_cache()
            return {PurePosixPath(f["name"]).name: f["size"] for f in self._files.ls(self._path(name), detail=True)}

        sizes = self._again(f"list {name}", listed)
        return [file for file, entry in manifest.files.items() if sizes.get(file) != entry.bytes]

    def _again(self, what: str, work: Callable[[], Result]) -> Result:
        """What `work` returns; when it fails, it is tried again after each of PAUSES."""
        for pause in (*PAUSES, None):
            try:
                return work()
            except Exception as error:
                said = f"{self.url}: cannot {what}: {type(error).__name__}: {error}"
                if isinstance(error, FileNotFoundError):
                    raise CheckpointError(said) from error
                if pause is None:
                    raise Unreachable(said) from error
                self._pause(pause)
        raise AssertionError


def open_storage(url: str) -> None:
    """Raises CheckpointError when there is no such kind of storage here; makes no connection."""
    _known(url)


def _filesystem(url: str) -> tuple[Any, str]:
    _known(url)
    from fsspec.core import url_to_fs

    try:
        found: tuple[Any, str] = url_to_fs(url)
    except Exception as error:
        raise CheckpointError(f"{url}: {error}") from error
    return found


def _known(url: str) -> None:
    from fsspec.registry import get_filesystem_class

    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        raise CheckpointError(
            f"{url}: fsspec knows no storage {protocol}://; use a URL as s3://, gs://, abfs://, sftp:// or file://"
        ) from error
    except ImportError as error:
        extras = metadata("fsspec").get_all("Provides-Extra") or []
        missing = getattr(error.__cause__, "name", None) or protocol
        package = f"'fsspec[{protocol}]'" if protocol in extras else missing
        raise CheckpointError(f"{url}: a package is missing ({error}); run: pip install {package}") from error


def _damage(folder: Path, manifest: Manifest) -> list[str]:
    """What does not match its checksum."""
    stored = stored_tensors(folder, manifest)
    places = [(name, tensor, place) for name, tensor in stored.items() for place in tensor.places]
    scans = scan_all([(tensor, place) for _, tensor, place in places], values=False)
    return [
        f"{place.file.name}: checksum of tensor {name} (key {place.key!r}) does not match: damaged"
        for (name, _, place), scan in zip(places, scans, strict=True)
        if scan.checksum != place.checksum
    ]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
