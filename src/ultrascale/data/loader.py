"""The batches of a run: which samples a step takes, and what one replica gets of them.

Sample numbers run through the whole training: step t (from 1) takes samples (t − 1)·G … t·G − 1 of the blend,
with G sequences in the global batch. Micro-batch m of replica r takes, within the step, samples m·(R·b) + r·b
… + b − 1, with R replicas and micro-batches of b sequences. So the samples of a step, and their order, depend
on neither.

    data = Data(config)
    for micro in data.batch(step, replica=0, replicas=2, micro_size=4): ...

Nothing here has state: a batch is a function of its arguments, whatever was read before and by whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.bin_index import PACKING_VERSION, find_or_build
from ultrascale.data.bins import Bins
from ultrascale.data.builtin import BUILTINS, STDLIB, UNEVEN, Uneven, open_stdlib
from ultrascale.data.documents import crosses, positions_within
from ultrascale.data.errors import DataError
from ultrascale.data.indexed import IndexedDataset
from ultrascale.data.metadata import Metadata, metadata_path, read_metadata
from ultrascale.data.samples import Chunks, Sample, Source, out_of_range
from ultrascale.data.streams import BlendStream, Stream, UnevenStream
from ultrascale.data.tokenizer import BYTES, Tokenizer, open_tokenizer

Ints = NDArray[np.int64]

NO_TARGET = -100
# Files without a sidecar are read whole on opening up to this size, so that a wrong id is seen before the
# first step.
SCANNED_TOKENS = 1 << 26
# What fingerprints say of documents, and what those say that leave it out.
_DOCUMENT_SETTINGS = {
    "document_mask": False,
    "reset_positions": False,
    "packing": "none",
    "packing_version": PACKING_VERSION,
    "cut_documents": False,
}


@dataclass(frozen=True)
class MicroArrays:
    """One micro-batch of one replica; fresh int64 arrays.

    inputs          [seq, micro]  token ids
    labels          [seq, micro]  the token that follows each input, −100 where it is no target; shifted over
                                  the whole
                                  sequence, before anything cuts it
    positions       [seq, micro]  0 … seq − 1, or from 0 in each document (data.reset_positions)
    further_labels  for each deeper prediction d = 2 … lookahead, [seq, micro]: the token d places on, −100 where it
                    is no target
    further_inputs  for each of them the token d − 1 places on, target or not: what it is predicted from
    samples         [micro]       sample numbers of the run
    documents       for each column, the tokens at which its documents begin: 0 first, ascending, all below seq. None
                    unless data.document_mask
    padding         [micro]       tokens at a sequence's end that only fill it up
    """

    inputs: Ints
    labels: Ints
    positions: Ints
    further_labels: tuple[Ints, ...]
    further_inputs: tuple[Ints, ...]
    samples: Ints
    documents: tuple[tuple[int, ...], ...] | None
    padding: Ints


class Data:
    """Training and validation batches of a config.

    Reads config.data, config.batch.{global_size, sequence_length},
    config.model.{vocab_size, num_nextn_predict_layers} and config.run.seed. `lookahead` is 1 + the depth of multi-token
    prediction; None = as the model says.

    Raises DataError when a file is missing, empty or corrupt, a dataset is too short for one sample, a document too
    long for a packed one, the
    tokenizer has more ids than the model, or a token id is out of range; the last also from `batch`, as every
    batch is checked.
    """

    def __init__(self, config: Any, lookahead: int | None = None) -> None:
        self._global_size: int = config.batch.global_size
        self._sequence_length: int = config.batch.sequence_length
        self._lookahead: int = lookahead or 1 + config.model.num_nextn_predict_layers
        self._packing: str = config.data.packing
        self._cut_documents: bool = config.data.cut_documents
        self._document_mask: bool = config.data.document_mask
        self._reset_positions: bool = config.data.reset_positions
        self._tokenizer: Tokenizer | None = None
        self._train = self._open_side(config, config.data.train, "train")
        validation = config.data.validation
        self._validation = None if validation is None else self._open_side(config, validation, "validation")

    @property
    def has_validation(self) -> bool:
        """Whether config.data.validation names anything."""
        return self._validation is not None

    def batch(self, step: int, replica: int, replicas: int, micro_size: int) -> list[MicroArrays]:
        """Micro-batches of step `step` (from 1) for one of `replicas` (dp·ep) replicas.

        Raises DataError when the global batch does not divide, ValueError for a step or replica out of range.
        """
        return self._batch(self._train, step, replica, replicas, micro_size)

    def validation_batch(self, number: int, replica: int, replicas: int, micro_size: int) -> list[MicroArrays]:
        """The same of validation batch `number`, from 1: the same samples in every evaluation. Needs
        has_validation.
        """
        if self._validation is None:
            raise DataError(
                "data.validation=null: there is nothing to evaluate on; name a prefix, or set evaluation.every=0"
            )
        return self._batch(self._validation, number, replica, replicas, micro_size)

    def position(self, step: int) -> dict[str, Any]:
        """Where the data stand after step `step`, as JSON for the checkpoint; a function of the step
        alone.
        """
        return {"step": step, **self._train.position(step * self._global_size)}

    def fingerprint(self) -> dict[str, Any]:
        """What decides the training samples of every step, as JSON; a run resumes only where it is the same.

        It holds contents and not paths: data may be moved. See `differences`.
        """
        return {
            "global_size": self._global_size,
            "sequence_length": self._sequence_length,
            "document_mask": self._document_mask,
            "reset_positions": self._reset_positions,
            **self._packing_identity(),
            **self._train.identity(),
        }

    def _packing_identity(self) -> dict[str, Any]:
        if self._packing == "none":
            return {"packing": "none"}
        return {
            "packing": self._packing,
            "packing_version": PACKING_VERSION,
            "cut_documents": self._cut_documents,
        }

    @property
    def _documents_apart(self) -> bool:
        """Whether no token is predicted from another document than its own."""
        return self._document_mask or self._packing != "none"

    def _batch(self, stream: Stream, step: int, replica: int, replicas: int, micro_size: int) -> list[MicroArrays]:
        if step < 1:
            raise ValueError(f"step {step}: steps count from 1")
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} is not in [0, {replicas})")
        rows = replicas * micro_size
        if micro_size < 1 or self._global_size % rows:
            raise DataError(
                f"batch.global_size={self._global_size} is no multiple of {replicas} replicas × "
                f"batch.micro_size={micro_size}"
            )
        grid = np.arange(self._global_size, dtype=np.int64).reshape(-1, replicas, micro_size)
        numbers = (step - 1) * self._global_size + grid[:, replica]  # [micro-batches, micro]
        samples = stream.read(numbers.reshape(-1))
        return [
            self._arrays(samples[m * micro_size : (m + 1) * micro_size], numbers[m]) for m in range(numbers.shape[0])
        ]

    def _arrays(self, samples: list[Sample], numbers: Ints) -> MicroArrays:
        length = self._sequence_length
        tokens = np.stack([sample.tokens for sample in samples], axis=1)  # [seq + lookahead, micro]
        targets = tokens.copy()
        for column, sample in enumerate(samples):
            if sample.live is not None:
                targets[~sample.live, column] = NO_TARGET
        depths = [targets[depth : depth + length].copy() for depth in range(1, self._lookahead + 1)]
        positions = np.repeat(np.arange(length, dtype=np.int64)[:, None], len(samples), axis=1)
        bounds: list[tuple[int, ...]] = []
        for column, sample in enumerate(samples):
            if sample.starts is None:
                continue
            for depth, labels in enumerate(depths, start=1):
                labels[crosses(sample.starts, depth, length), column] = NO_TARGET
            if self._reset_positions:
                positions[:, column] = positions_within(sample.starts, length)
            bounds.append(tuple(sample.starts[sample.starts < length].tolist()))
        documents = tuple(bounds) if self._document_mask else None
        filled = [length if sample.filled is None else min(length, sample.filled) for sample in samples]
        return MicroArrays(
            inputs=tokens[:length].copy(),
            labels=depths[0],
            positions=positions,
            further_labels=tuple(depths[1:]),
            further_inputs=tuple(tokens[depth : depth + length].copy() for depth in range(1, self._lookahead)),
            samples=numbers.copy(),
            documents=documents,
            padding=length - np.array(filled, np.int64),
        )

    def _open_side(self, config: Any, setting: Any, side: str) -> Stream:
        entries = entries_of(setting)
        paths = [path for path, _ in entries]
        if UNEVEN in paths:
            if len(paths) > 1:
                raise DataError(f"data.{side}: {UNEVEN} cannot be blended; give it alone")
            uneven = Uneven(
                config.model.vocab_size,
                config.run.seed,
                self._global_size,
                self._sequence_length,
                self._lookahead,
                side,
                documents=self._documents_apart,
            )
            return UnevenStream(uneven)
        sources = [self._open(config, path, side) for path in paths]
        held: dict[str, str] = {}
        for path, source in zip(paths, sources):
            if source.fingerprint in held:
                raise DataError(
                    f"data.{side}: {held[source.fingerprint]} and {path} hold the same tokens; keep "
                    "one, with both weights added"
                )
            held[source.fingerprint] = path
        return BlendStream(sources, [weight for _, weight in entries], config.run.seed)

    def _open(self, config: Any, path: str, side: str) -> Source:
        vocab_size: int = config.model.vocab_size
        if path in BUILTINS:
            dataset = open_stdlib(self._open_tokenizer(config), validation=side == "validation")
        else:
            if path.startswith("builtin:"):
                raise DataError(
                    f"data.{side}={path}: there is no such builtin; use {' or '.join(BUILTINS)}, or a prefix"
                )
            dataset = IndexedDataset(path)
            if config.data.tokenizer != BYTES:
                self._open_tokenizer(config)
        metadata = current_metadata(dataset)
        if metadata is not None and path != STDLIB:
            self._check_made_with(config, metadata, dataset)
        _check_ids(dataset, metadata, vocab_size)
        if self._packing == "none":
            return Chunks(dataset, self._sequence_length, self._lookahead, vocab_size, self._documents_apart)
        index = find_or_build(dataset, self._sequence_length, self._cut_documents)
        return Bins(dataset, index, self._lookahead, vocab_size)

    def _check_made_with(self, config: Any, metadata: Metadata, dataset: IndexedDataset) -> None:
        if metadata.tokenizer_fingerprint is None:
            return
        given: str = config.data.tokenizer
        fingerprint = BYTES if given == BYTES else self._open_tokenizer(config).fingerprint
        if fingerprint != metadata.tokenizer_fingerprint:
            raise DataError(
                f"data.tokenizer={given} is not what {dataset.prefix} was prepared with; "
                f"set data.tokenizer={metadata.tokenizer}, or prepare the text again"
            )

    def _open_tokenizer(self, config: Any) -> Tokenizer:
        if self._tokenizer is None:
            tokenizer = open_tokenizer(config.data.tokenizer)
            if tokenizer.vocab_size > config.model.vocab_size:
                raise DataError(too_many_ids(config.data.tokenizer, tokenizer.vocab_size, config.model.vocab_size))
            self._tokenizer = tokenizer
        return self._tokenizer


def entries_of(setting: Any) -> list[tuple[str, float]]:
    """(path, weight) of each dataset that data.train or data.validation names."""
    if isinstance(setting, str):
        return [(setting, 1.0)]
    return [(entry.path, entry.weight) for entry in setting]


def too_many_ids(tokenizer: str, has: int, vocab_size: int) -> str:
    """The sentence for a tokenizer that the model's vocabulary cannot hold."""
    return (
        f"data.tokenizer={tokenizer} has ids up to {has - 1}, which model.vocab_size={vocab_size} "
        "cannot hold; "
        f"set model.vocab_size to at least {has}, or use a smaller tokenizer"
    )


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """What differs between two `Data.fingerprint()`s, a clause each; empty when the samples are the same."""
    settings = ("global_size", "sequence_length", "seed", *_DOCUMENT_SETTINGS)
    before, now = ({**_DOCUMENT_SETTINGS, **side} for side in (saved, current))
    found = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in settings if before.get(key) != now.get(key)
    ]
    blend = [side.get("datasets") or [] for side in (saved, current)]
    fingerprints = [[one["fingerprint"] for one in side] for side in blend]
    if fingerprints[0] != fingerprints[1]:
        found.append(f"the data are not the same tokens ({len(blend[0])} datasets before, {len(blend[1])} now)")
    elif blend[0] != blend[1]:
        weights = [[one["weight"] for one in side] for side in blend]
        found.append(f"the weights of the blend were {weights[0]} and are {weights[1]}")
    return found


def current_metadata(dataset: IndexedDataset) -> Metadata | None:
    """The sidecar of a dataset, if any. Raises DataError when it was written for other files."""
    metadata = read_metadata(dataset.prefix)
    if metadata is None:
        return None
    recorded = (metadata.fingerprint, metadata.documents, metadata.tokens)
    if recorded != (dataset.fingerprint, dataset.documents, dataset.tokens):
        raise DataError(
            f"{metadata_path(dataset.prefix)}: was written for other files ({metadata.documents} documents, "
            f"{metadata.tokens} tokens) than {dataset.bin_path.name} and {dataset.idx_path.name} "
            f"({dataset.documents} "
            f"documents, {dataset.tokens} tokens); they changed, or are damaged: prepare them again, or "
            "accept them with "
            f"`ultrascale data check {dataset.prefix} --record`"
        )
    return metadata


def _check_ids(dataset: IndexedDataset, metadata: Metadata | None, vocab_size: int) -> None:
    """Raises DataError when a token of the file is known to be out of range; later every batch is looked
    at.
    """
    if metadata is not None:
        if metadata.max_id >= vocab_size:
            raise DataError(out_of_range(dataset, metadata.max_id, metadata.max_id_at, vocab_size))
        return
    if dataset.tokens > SCANNED_TOKENS:
        return
    found = dataset.scan()
    if found.min_id < 0:
        raise DataError(out_of_range(dataset, found.min_id, found.min_id_at, vocab_size))
    if found.max_id >= vocab_size:
        raise DataError(out_of_range(dataset, found.max_id, found.max_id_at, vocab_size))
