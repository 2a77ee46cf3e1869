"""A Hugging Face model folder as stored tensors under our names. Needs no torch and no transformers.

config.json, and model.safetensors or model.safetensors.index.json with its shards. Strict both ways: a parameter that
is missing, a tensor that nobody knows, another shape is an error that names it. Nothing is ever downloaded, and no
pickled file is opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.checkpoint.boxes import CheckpointError, Dims, elements, pieces
from ultrascale.checkpoint.manifest import parse_json, refuse
from ultrascale.checkpoint.safetensors_file import Kept, read_head, width
from ultrascale.checkpoint.stored import Place, Reader, Scales, StoredTensor
from ultrascale.checkpoint.values import CONVERTIBLE
from ultrascale.config.model_section import Model
from ultrascale.models import hugging_face as mappings
from ultrascale.models.hugging_face import FamilyMapping, HuggingFaceError, Logical
from ultrascale.models.hugging_face_config import QUANTISATION, model_of
from ultrascale.models.hugging_face_families import of_config

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files that go along with the weights, as they are."""

FLOAT8 = "float8_e4m3fn"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.safetensors")
_COMPARED_BYTES = 1 << 20


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder whose tensors are those that its config.json describes.

    model      the resolved model section
    stored     our name → tensor, in the dtype of the folder, or in float32 where that is a scaled float8
    """

    path: Path
    config: Mapping[str, Any]
    mapping: FamilyMapping
    model: Model
    stored: dict[str, StoredTensor]


def read_config(path: Path) -> tuple[dict[str, Any], FamilyMapping, Model]:
    """config.json, the family that it names, and its model section; raises CheckpointError saying what is wrong.

    Layers that predict further tokens are part of the model where the folder has tensors of them: transformers drops
    these, and goes on saying how many there are.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: there is no such folder; give one that is on this machine, nothing is downloaded"
        )
    try:
        config = parse_json((path / CONFIG).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a Hugging Face folder: {CONFIG} cannot be read ({error.strerror or error})"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    try:
        mapping = of_config(config)
        model = model_of(mapping, config)
    except HuggingFaceError as error:
        raise CheckpointError(f"{path}: {error}") from error
    behind = f"model.layers.{model.num_hidden_layers}."
    if model.num_nextn_predict_layers and not any(name.startswith(behind) for name in _names(path)):
        model = model.model_copy(update={"num_nextn_predict_layers": 0})
    return config, mapping, model


def open_folder(path: Path, compare_copies: bool = True) -> HuggingFaceFolder:
    """The folder, checked: config, index, headers, names and shapes; values are not read.

    compare_copies   read a tied tensor that is there twice, and refuse it when the two differ

    Raises CheckpointError with all that is missing, left over or of another shape.
    """
    config, mapping, model = read_config(path)
    block = _scaled_blocks(path, config)
    tensors = _tensors(path)
    logical = mappings.logical_parameters(mapping, model, tensors, config)
    copies = {theirs: ours for theirs, ours in mappings.copies(mapping, model).items() if theirs in tensors}
    scales = _scales(logical, tensors, block)
    refuse(dict.fromkeys(_mismatches(path, mapping, logical, copies, tensors, scales)))
    stored = {name: _stored(one, tensors, scales) for name, one in logical.items()}
    if compare_copies:
        for theirs, ours in copies.items():
            _compare_copy(path, theirs, ours, tensors[theirs], stored[ours])
    return HuggingFaceFolder(path, config, mapping, model, stored)


def _scaled_blocks(path: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of the blocks that share a factor, where weights are float8; None: nothing is quantised."""
    given = config.get(QUANTISATION)
    if given is None:
        return None
    said = given if isinstance(given, dict) else {}
    block = said.get("weight_block_size")
    known = said.get("quant_method") == "fp8" and said.get("fmt", "e4m3") == "e4m3"
    if not (known and isinstance(block, list) and [type(n) for n in block] == [int, int] and min(block) > 0):
        raise CheckpointError(
            f"{path}: {CONFIG}: {QUANTISATION}={given!r} is not known; float8 e4m3 in blocks (quant_method fp8, "
            "weight_block_size of two numbers) can be read: load it with transformers, dequantise it, and "
            "save_pretrained() it first"
        )
    return block[0], block[1]


@dataclass(frozen=True)
class _Scale:
    """A tensor of factors beside one of float8."""

    theirs: str
    shape: Dims
    block: tuple[int, int]


def _scales(
    logical: Mapping[str, Logical], tensors: Mapping[str, tuple[Path, Kept]], block: tuple[int, int] | None
) -> dict[str, _Scale]:
    """Their name of each float8 matrix → its factors."""
    if block is None:
        return {}
    found = {}
    for part in (part for one in logical.values() for part in one.parts):
        if part.theirs in tensors and tensors[part.theirs][1].dtype == FLOAT8 and len(part.form) == 2:
            shape = (-(-part.form[0] // block[0]), -(-part.form[1] // block[1]))
            found[part.theirs] = _Scale(part.theirs + "_scale_inv", shape, block)
    return found


def _tensors(path: Path) -> dict[str, tuple[Path, Kept]]:
    """Their name → file and place of every tensor in the folder."""
    if (path / INDEX).is_file():
        return _indexed(path)
    if (path / SINGLE).is_file():
        return {name: (path / SINGLE, kept) for name, kept in read_head(path / SINGLE).items()}
    if any(path.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{path} holds its weights as pickled .bin files, which can run code when they are read; they are not "
            "opened: load them with transformers and save_pretrained() them as safetensors first"
        )
    raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}")


def _names(path: Path) -> Iterable[str]:
    """Their names of the tensors in the folder, without a look into files that an index describes."""
    return _weight_map(path) if (path / INDEX).is_file() else _tensors(path)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = parse_json((path / INDEX).read_bytes()).get("weight_map")
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{path / INDEX}: {error}") from error
    if not isinstance(weight_map, dict) or not all(type(file) is str for file in weight_map.values()):
        raise CheckpointError(f"{path / INDEX}: weight_map is no map of tensor names to files")
    return weight_map


def _indexed(path: Path) -> dict[str, tuple[Path, Kept]]:
    """By the index, which must say of each file what is in it."""
    weight_map = _weight_map(path)
    problems = []
    found: dict[str, tuple[Path, Kept]] = {}
    for file in sorted(set(weight_map.values())):
        if not _FILE.fullmatch(file):
            raise CheckpointError(
                f"{path / INDEX}: file name {file!r} is refused: a plain name inside the folder is wanted"
            )
        if not (path / file).is_file():
            raise CheckpointError(f"{path / file}: the file is missing; {INDEX} names it")
        head = read_head(path / file)
        named = {name for name, there in weight_map.items() if there == file}
        problems += [
            f"{path / file}: {name} is not in it, though {INDEX} says so" for name in sorted(named - set(head))
        ]
        problems += [
            f"{path / file}: {name} is in it, and {INDEX} does not say so" for name in sorted(set(head) - named)
        ]
        found |= {name: (path / file, kept) for name, kept in head.items()}
    refuse(problems)
    return found


def _mismatches(
    path: Path,
    mapping: FamilyMapping,
    logical: Mapping[str, Logical],
    copies: Mapping[str, str],
    tensors: Mapping[str, tuple[Path, Kept]],
    scales: Mapping[str, _Scale],
) -> Iterable[str]:
    known = {part.theirs for one in logical.values() for part in one.parts}
    known |= {scale.theirs for scale in scales.values()}
    for theirs, scale in scales.items():
        if scale.theirs not in tensors:
            yield f"{path}: {scale.theirs} is missing, which scales {theirs}"
        elif (tensors[scale.theirs][1].dtype, tensors[scale.theirs][1].shape) != ("float32", scale.shape):
            kept = tensors[scale.theirs][1]
            yield (
                f"{path}: {scale.theirs} is {kept.dtype} of shape {list(kept.shape)}; the blocks of {theirs} make it "
                f"float32 of shape {list(scale.shape)}"
            )
    for name, one in logical.items():
        dtypes = set()
        for part in one.parts:
            if part.theirs not in tensors:
                yield f"{path}: {part.theirs} is missing, which holds {name}"
                continue
            kept = tensors[part.theirs][1]
            dtypes.add(kept.dtype)
            if kept.shape != part.form:
                yield f"{path}: {part.theirs} has shape {list(kept.shape)}; {CONFIG} makes it {list(part.form)}"
            if kept.dtype not in CONVERTIBLE and part.theirs not in scales:
                yield f"{path}: {part.theirs} has dtype {kept.dtype}; {', '.join(CONVERTIBLE)} can be read"
        if len(dtypes) > 1:
            yield f"{path}: the tensors of {name} have different dtypes: {', '.join(sorted(dtypes))}"
    for theirs, ours in copies.items():
        if tensors[theirs][1].shape != logical[ours].shape:
            yield f"{path}: {theirs} has shape {list(tensors[theirs][1].shape)}; tied to {ours} it would have another"
    for theirs in tensors:
        if theirs not in known and theirs not in copies and not theirs.endswith(mapping.not_read):
            yield f"{path}: {theirs} is no tensor of {mapping.architecture} with this {CONFIG}"


def _stored(logical: Logical, tensors: Mapping[str, tuple[Path, Kept]], scales: Mapping[str, _Scale]) -> StoredTensor:
    dtype, places, factors = tensors[logical.parts[0].theirs][1].dtype, [], []
    for part in logical.parts:
        places.append(_place(part.theirs, tensors[part.theirs], part.offset, part.shape, part.start))
        if part.theirs in scales:
            scale, lead = scales[part.theirs], len(part.shape) - 2
            offset, shape = (*part.offset[:lead], 0, 0), (*part.shape[:lead], *scale.shape)
            factors.append(_place(scale.theirs, tensors[scale.theirs], offset, shape))
    if not factors:
        return StoredTensor(logical.shape, dtype, tuple(places), logical.rows)
    whole = (*logical.shape[:-2], *factors[0].shape[-2:])
    block = scales[logical.parts[0].theirs].block
    scaled = Scales(StoredTensor(whole, "float32", tuple(factors)), block, dtype)
    return StoredTensor(logical.shape, "float32", tuple(places), logical.rows, scaled)


def _place(theirs: str, found: tuple[Path, Kept], offset: Dims, shape: Dims, start: int = 0) -> Place:
    """A box that begins with element `start` of a tensor of theirs."""
    file, kept = found
    return Place(file, theirs, kept.start + start * width(kept.dtype), offset, shape, None)


def _compare_copy(path: Path, theirs: str, ours: str, found: tuple[Path, Kept], tensor: StoredTensor) -> None:
    file, kept = found
    place = Place(file, theirs, kept.start, (0,) * len(kept.shape), kept.shape, None)
    other = StoredTensor(kept.shape, kept.dtype, (place,))
    same = kept.dtype == tensor.dtype
    with Reader() as reader:
        for offset, shape in pieces((0,) * len(kept.shape), kept.shape, _COMPARED_BYTES // width(kept.dtype)):
            if not same or not np.array_equal(reader.box(other, offset, shape), reader.box(tensor, offset, shape)):
                raise CheckpointError(
                    f"{path}: {theirs} and {tensor.places[0].key} differ, and are one parameter by {CONFIG} "
                    f"(tie_word_embeddings, num_nextn_predict_layers): one of the two is wrong"
                )


def dtypes_of(stored: Mapping[str, StoredTensor]) -> tuple[str, dict[str, str]]:
    """The dtype that most elements have, and that of each tensor which has another; of scaled float8 that which it is
    published to be widened to."""
    dtypes = {name: "bfloat16" if tensor.scales else tensor.dtype for name, tensor in stored.items()}
    counts: dict[str, int] = {}
    for name, dtype in dtypes.items():
        counts[dtype] = counts.get(dtype, 0) + elements(stored[name].shape)
    most = max(counts, key=lambda dtype: counts[dtype])
    return most, {name: dtype for name, dtype in dtypes.items() if dtype != most}


def companions(path: Path) -> list[Path]:
    """The files beside the weights that belong to the model: tokenizer, generation settings."""
    return [path / name for name in COMPANIONS if (path / name).is_file()]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """As Hugging Face's own files look."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
