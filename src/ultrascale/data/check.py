"""What is wrong with a config's data and batch sections.

`check` looks at the settings alone: a config can be shown, planned and verified far from its data.
`check_files` looks at the files that they name, for a program that is about to read them. Neither imports
torch or `tokenizers`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from ultrascale.config.problem import Problem, choices
from ultrascale.data.blend import quantise
from ultrascale.data.builtin import BUILTINS, STDLIB, UNEVEN
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import bin_path, idx_path
from ultrascale.data.loader import entries_of, too_many_ids
from ultrascale.data.tokenizer import BYTES, BYTES_VOCAB_SIZE, vocabulary_size_of_file

_SIDES = ("train", "validation")


def check(config: Any) -> list[Problem]:
    """Problems of config.data and config.batch that need no file to be seen."""
    problems = list(_batch_problems(config))
    for side in _SIDES:
        problems += _side_problems(config, side)
    train = {path for path, _ in _entries(config, "train")} - set(BUILTINS)
    for path, _ in _entries(config, "validation"):
        if path in train:
            message = (
                f"data.validation={path} is also in data.train, so nothing would be held out; prepare with "
                f"--validation-fraction and use {path}.validation"
            )
            problems.append(Problem("data.validation", message))
    used = {path for side in _SIDES for path, _ in _entries(config, side)}
    if STDLIB in used and config.data.tokenizer == BYTES and config.model.vocab_size < BYTES_VOCAB_SIZE:
        problems.append(Problem("model.vocab_size", too_many_ids(BYTES, BYTES_VOCAB_SIZE, config.model.vocab_size)))
    return problems + list(_idle_problems(config.data, used))


def check_files(config: Any) -> list[Problem]:
    """Problems of the files that config.data names: missing, empty, or a tokenizer larger than the model's
    vocabulary.
    """
    problems = []
    for side in _SIDES:
        for path, _ in _entries(config, side):
            if not path.startswith("builtin:"):
                problems += [Problem(f"data.{side}", message) for message in _missing(path)]
    used = {path for side in _SIDES for path, _ in _entries(config, side)}
    if config.data.tokenizer != BYTES and used != {UNEVEN}:
        try:
            size = vocabulary_size_of_file(config.data.tokenizer)
        except DataError as error:
            problems.append(Problem("data.tokenizer", str(error)))
        else:
            if size > config.model.vocab_size:
                message = too_many_ids(config.data.tokenizer, size, config.model.vocab_size)
                problems.append(Problem("data.tokenizer", message))
    return problems


def _batch_problems(config: Any) -> Iterator[Problem]:
    batch, parallel = config.batch, config.parallel
    for name in ("global_size", "micro_size", "sequence_length"):
        value = getattr(batch, name)
        if value < 1:
            yield Problem(f"batch.{name}", f"batch.{name}={value} is not at least 1; use a positive number")
    if parallel.dp is None or min(batch.global_size, batch.micro_size, parallel.dp, parallel.ep) < 1:
        return
    replicas = parallel.dp * parallel.ep
    rows = replicas * batch.micro_size
    if batch.global_size % rows == 0:
        return
    below = batch.global_size // rows * rows
    sizes = f"{below} or {below + rows}" if below else f"{rows}"
    way_out = f"use batch.global_size={sizes}"
    if batch.global_size % replicas == 0:
        share = batch.global_size // replicas
        micro_sizes = [size for size in range(1, share + 1) if share % size == 0]
        nearest = sorted(sorted(micro_sizes, key=lambda size: abs(size - batch.micro_size))[:4])
        way_out += f", or batch.micro_size={choices(nearest)}"
    yield Problem(
        "batch.global_size",
        f"batch.global_size={batch.global_size} is no multiple of dp·ep·batch.micro_size = "
        f"{parallel.dp}·{parallel.ep}·{batch.micro_size} = {rows}; {way_out}",
    )


def _idle_problems(data: Any, used: set[str]) -> Iterator[Problem]:
    if data.cut_documents and used == {UNEVEN}:
        message = f"data.cut_documents=true has no effect on {UNEVEN}, whose documents are never too long; leave it out"
        yield Problem("data.cut_documents", message, kind="idle")
    if data.packing != "none":
        return
    if data.cut_documents and used != {UNEVEN}:
        message = "data.cut_documents=true has no effect under data.packing=none; use data.packing=best_fit"
        yield Problem("data.cut_documents", message, kind="idle")
    if data.reset_positions and not data.document_mask:
        message = (
            "data.reset_positions=true has no effect without data.document_mask or data.packing, as documents are not "
            "told apart; set data.document_mask=true"
        )
        yield Problem("data.reset_positions", message, kind="idle")


def _side_problems(config: Any, side: str) -> Iterator[Problem]:
    key = f"data.{side}"
    entries = _entries(config, side)
    if not entries:
        if getattr(config.data, side) is not None:
            yield Problem(key, f"{key}=[] names no dataset; give a prefix, a list of {{path, weight}}, or {STDLIB}")
        return
    paths = [path for path, _ in entries]
    for path in paths:
        message = _wrong_kind(key, path)
        if message:
            yield Problem(key, message)
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield Problem(key, f"{key} lists {path} {paths.count(path)} times; keep one, with the weights added")
    if UNEVEN in paths and len(paths) > 1:
        yield Problem(key, f"{key}: {UNEVEN} cannot be blended with other data; give it alone")
    try:
        quantise([weight for _, weight in entries])
    except DataError as error:
        yield Problem(key, f"{key}: {error}")


def _wrong_kind(key: str, path: str) -> str | None:
    if not path:
        return f"{key}='' is no path; give a prefix PATH of PATH.bin and PATH.idx, or {STDLIB}"
    if path.startswith("builtin:") and path not in BUILTINS:
        near = difflib.get_close_matches(path, BUILTINS, 1, cutoff=0.0)[0]
        return f"{key}={path} is no builtin dataset (there are {' and '.join(BUILTINS)}); did you mean {near}?"
    if path.endswith((".bin", ".idx")):
        return f"{key}={path} is a file; give the prefix without its ending: {path[:-4]}"
    if path.endswith((".txt", ".jsonl", ".json", ".gz")):
        return (
            f"{key}={path} is text, not tokens; turn it into a prefix with "
            f"`ultrascale data prepare {path} --output PREFIX` and give that"
        )
    return None


def _missing(prefix: str) -> Iterator[str]:
    for path in (bin_path(prefix), idx_path(prefix)):
        try:
            size = path.stat().st_size
        except OSError as error:
            yield f"{path}: cannot be read ({error.strerror}); make it with `ultrascale data prepare`"
            continue
        if size == 0:
            yield f"{path}: is empty; prepare it again with `ultrascale data prepare`"


def _entries(config: Any, side: str) -> list[tuple[str, float]]:
    setting = getattr(config.data, side)
    return [] if setting is None else entries_of(setting)
