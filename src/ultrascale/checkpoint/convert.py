"""Hugging Face folders into checkpoints, and checkpoints into Hugging Face folders: streamed, whole or not there.

Masters are wide here and weights narrow there: reading widens, which is exact, and writing rounds to nearest. So what
came from a folder goes back into one bit for bit. Needs no torch and no transformers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import sync_folder, temporary_name
from ultrascale.checkpoint.hugging_face import (
    CONFIG,
    INDEX,
    SINGLE,
    HuggingFaceFolder,
    companions,
    dtypes_of,
    open_folder,
    write_json,
)
from ultrascale.checkpoint.manifest import Manifest, parse_json, read_manifest
from ultrascale.checkpoint.rewrite import (
    Count,
    Piece,
    Progress,
    cleared,
    compare_stored,
    in_shards,
    pieces_of,
    refuse_to_overwrite,
    write_checkpoint,
    write_files,
)
from ultrascale.checkpoint.safetensors_file import width
from ultrascale.checkpoint.stored import Stored, stored_tensors
from ultrascale.checkpoint.values import CONVERTIBLE
from ultrascale.checkpoint.workers import Workers
from ultrascale.config.model_section import Model
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import Config
from ultrascale.models import hugging_face as mappings
from ultrascale.models.hugging_face import HuggingFaceError
from ultrascale.models.hugging_face_config import config_json
from ultrascale.models.hugging_face_families import of_model
from ultrascale.models.sizes import tied

BESIDE = "hugging_face"
"""Folder in a converted checkpoint: config.json and the files beside the weights, as they came."""

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Converted:
    """What was written."""

    path: str
    family: str
    parameters: int
    dtype: str
    bytes: int
    files: int


# ---- in -------------------------------------------------------------------------------------------------------------


def from_hf(source: Path, target: Path, workers: Workers, progress: Progress | None = None) -> Converted:
    """Writes the folder's weights as a checkpoint of step 0, without optimizer state: float32, or float64 where any of
    them is.

    Raises CheckpointError when the folder is not one of a known family, or `target` is a whole checkpoint.
    """
    refuse_to_overwrite(target)
    folder = open_folder(source)
    dtype, others = dtypes_of(folder.stored)
    master = "float64" if "float64" in (dtype, *others.values()) else "float32"
    chosen = [piece for name, tensor in folder.stored.items() for piece in pieces_of(name, tensor, master)]

    def beside(temporary: Path) -> None:
        (temporary / BESIDE).mkdir()
        for path in [source / CONFIG, *companions(source)]:
            shutil.copyfile(path, temporary / BESIDE / path.name)

    header = _header(folder, target, dtype, others)
    advance = Count(sum(piece.bytes for piece in chosen), progress)
    size, files = write_checkpoint(target, header, folder.stored, chosen, workers, advance, beside)
    count = sum(tensor.bytes // width(tensor.dtype) for tensor in folder.stored.values())
    return Converted(str(target), folder.mapping.family, count, dtype, size, files)


def _header(folder: HuggingFaceFolder, target: Path, dtype: str, others: Mapping[str, str]) -> dict[str, Any]:
    """A manifest's header. Only the model section of its config is the folder's; the rest is what one must have."""
    tokenizer = target / BESIDE / "tokenizer.json"
    compute = dtype if dtype in ("float64", "float32", "bfloat16") else "float32"
    tree = {
        "run": {"name": folder.path.name or "from-hf", "steps": 1},
        "model": folder.model.model_dump(mode="json"),
        "batch": {"global_size": 1, "micro_size": 1, "sequence_length": folder.model.max_position_embeddings},
        "data": {
            "train": "builtin:stdlib",
            "tokenizer": str(tokenizer) if (folder.path / tokenizer.name).is_file() else "bytes",
        },
        "optimizer": {"lr": 0.0},
        "precision": {"compute": compute},
        "init": {"from_hf": str(folder.path)},
    }
    config = resolve(Config.model_validate(tree), 1)
    return {
        "step": 0,
        "config": config.model_dump(mode="json"),
        "data_position": {},
        "axes": dict.fromkeys(config.parallel.order, 1),
        "order": list(config.parallel.order),
        "ties": {group: list(names) for group, names in tied(folder.model).items()},
        "hugging_face": {"dtype": dtype, "dtypes": dict(others)},
    }


# ---- out ------------------------------------------------------------------------------------------------------------


def to_hf(
    source: Path,
    target: Path,
    workers: Workers,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint's parameters as a folder that transformers loads.

    dtype       of all weights; None: that of the folder they came from, else precision.compute
    tokenizer   a tokenizer.json, or a folder with tokenizer files; None: those of the folder that the weights came
                from, else the file that data.tokenizer names
    Before the folder gets its name, what was written is read back and compared, by the names and in the order of rows
    that an import takes, and so are the checksums of the source.

    Raises CheckpointError when the family has no mapping, a tensor does not fit it, or `target` exists.
    """
    refuse_to_overwrite(target)
    if dtype not in (None, *CONVERTIBLE):
        raise CheckpointError(f"--dtype {dtype}: one of {', '.join(CONVERTIBLE)} is wanted")
    if shard_bytes < 1:
        raise CheckpointError(f"--shard-bytes {shard_bytes}: use 1 or more")
    manifest = read_manifest(source)
    stored = {name: one for name, one in stored_tensors(source, manifest).items() if "/" not in name}
    config = Config.model_validate(manifest.header["config"], strict=False)
    came = manifest.header.get("hugging_face") or {}
    most = dtype or came.get("dtype") or ("bfloat16" if config.precision.compute == "fp8" else config.precision.compute)
    each = {} if dtype else came.get("dtypes") or {}
    try:
        mapping = of_model(config.model)
    except HuggingFaceError as error:
        raise CheckpointError(f"{source}: {error}") from error
    beside = _beside(source, manifest, config)
    base = parse_json((beside / CONFIG).read_bytes()) if beside and (beside / CONFIG).is_file() else None
    logical = mappings.logical_parameters(mapping, config.model, config=base)
    copies = mappings.written_copies(mapping, config.model)
    chosen = list(_their_pieces(source, logical, stored, most, each, copies, exactly=dtype is None and bool(came)))
    shards = in_shards(iter(chosen), shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(1, len(shards) + 1)]
    files = dict(zip(names, shards, strict=True))
    # Pieces are boxes in their order of rows.
    orders = {name: one.rows.reverse() for name, one in logical.items() if one.rows is not None}
    ordered = {name: replace(stored[name], rows=order) for name, order in orders.items()}
    total = sum(piece.bytes for piece in chosen)
    count = Count(sum(tensor.bytes for tensor in stored.values()) + total, progress)
    temporary = temporary_name(target)
    with cleared(temporary):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        write_files(temporary, {**stored, **ordered}, files, workers, count, {"format": "pt"})
        if len(files) > 1:
            weight_map = {piece.key: name for name, shard in files.items() for piece in shard}
            write_json(temporary / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        theirs = config_json(mapping, config.model, most, base)
        write_json(temporary / CONFIG, theirs)
        _write_companions(temporary, theirs, beside, tokenizer, config)
        compare_stored(stored, open_folder(temporary).stored, target, workers, count)
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        os.rename(temporary, target)
        sync_folder(target.parent)
    elements = sum(tensor.bytes // width(tensor.dtype) for tensor in stored.values())
    return Converted(str(target), mapping.family, elements, most, total, len(files))


def _their_pieces(
    source: Path,
    logical: Mapping[str, mappings.Logical],
    stored: Stored,
    most: str,
    each: Mapping[str, str],
    copies: Mapping[str, str],
    exactly: bool,
) -> Iterator[Piece]:
    """What is written, and from where.

    copies    their name → ours, of tensors that are written once more
    exactly   whether the dtypes are those that the weights came in: then even those of tensors that are kept wide
    """
    problems = [f"{source}: tensor {name} is missing" for name in logical if name not in stored]
    problems += [
        f"{source}: tensor {name} has no place in the family's mapping" for name in stored if name not in logical
    ]
    problems += [
        f"{source}: tensor {name} has shape {list(stored[name].shape)}; its config makes it {list(one.shape)}"
        for name, one in logical.items()
        if name in stored and stored[name].shape != one.shape
    ]
    if problems:
        raise CheckpointError("\n".join(problems))
    for name, one in logical.items():
        dtype = each.get(name, most)
        if one.wide and not exactly and dtype in ("bfloat16", "float16"):
            dtype = "float32"
        for part in one.parts:
            yield Piece(part.theirs, name, part.offset, part.shape, part.form, dtype)
        for theirs in (theirs for theirs, ours in copies.items() if ours == name):
            yield Piece(theirs, name, (0,) * len(one.shape), one.shape, one.shape, dtype)


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _beside(source: Path, manifest: Manifest, config: Config) -> Path | None:
    """The folder with the files that once came with the weights, where it still is."""
    if (source / BESIDE).is_dir():
        return source / BESIDE
    came = config.init.from_hf
    return Path(came) if came and Path(came).is_dir() else None


def _write_companions(
    target: Path, config: Mapping[str, Any], beside: Path | None, tokenizer: Path | None, run: Config
) -> None:
    """Tokenizer files and generation settings: what came with the weights, or else what the run knows."""
    if tokenizer is not None and not tokenizer.exists():
        raise CheckpointError(f"--tokenizer {tokenizer}: there is no such file or folder")
    for path in companions(beside) if beside else []:
        if tokenizer is None or path.name == "generation_config.json":
            shutil.copyfile(path, target / path.name)
    if tokenizer is not None and tokenizer.is_dir():
        for path in companions(tokenizer):
            if path.name != "generation_config.json":
                shutil.copyfile(path, target / path.name)
    own = tokenizer or Path(run.data.tokenizer)
    if own.is_file() and not (target / "tokenizer.json").exists():
        shutil.copyfile(own, target / "tokenizer.json")
    if (target / "tokenizer.json").exists() and not (target / "tokenizer_config.json").exists():
        write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    if not (target / "generation_config.json").exists():
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key)}
        write_json(target / "generation_config.json", {"_from_model_config": True, **special})


def model_section(path: Path) -> Model:
    """The model section of a config that fits the folder."""
    return open_folder(path, compare_copies=False).model
