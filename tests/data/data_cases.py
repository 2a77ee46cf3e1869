"""Small corpora and configs for the tests of data, written without the code under test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

STRUCT_CODES = {"<u1": 1, "<i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def config(
    train: Any = "builtin:uneven",
    validation: Any = None,
    tokenizer: str = "bytes",
    vocab_size: int = 257,
    global_size: int = 8,
    micro_size: int = 2,
    sequence_length: int = 16,
    seed: int = 1,
    dp: int | None = 1,
    ep: int = 1,
    **data: Any,
) -> Any:
    """What the package reads of a config; `data` are keys of its data section that differ from their defaults."""

    def entries(setting: Any) -> Any:
        if isinstance(setting, list):
            return [SimpleNamespace(path=path, weight=weight) for path, weight in setting]
        return setting

    return SimpleNamespace(
        data=SimpleNamespace(
            **{
                "train": entries(train),
                "validation": entries(validation),
                "tokenizer": tokenizer,
                "document_mask": False,
                "reset_positions": False,
                "packing": "none",
                "cut_documents": False,
                **data,
            }
        ),
        batch=SimpleNamespace(global_size=global_size, micro_size=micro_size, sequence_length=sequence_length),
        model=SimpleNamespace(vocab_size=vocab_size, num_nextn_predict_layers=0),
        run=SimpleNamespace(seed=seed),
        parallel=SimpleNamespace(dp=dp, ep=ep, cp=1),
    )


def write_tokens(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    dtype: str = "<u2",
    gap: int = 0,
    per_sequence: int | None = None,
) -> str:
    """A token file by the layout's description: `gap` unused tokens behind each sequence, documents cut into
    sequences of `per_sequence` tokens."""
    lengths: list[int] = []
    offsets: list[int] = []
    first = [0]
    raw = b""
    for document in documents:
        step = per_sequence or max(1, len(document))
        for start in range(0, max(1, len(document)), step):
            part = list(document[start : start + step])
            offsets.append(len(raw))
            lengths.append(len(part))
            raw += np.array(part, dtype).tobytes() + np.full(gap, 7, dtype).tobytes()
        first.append(len(lengths))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, STRUCT_CODES[dtype], len(lengths), len(first))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    index += struct.pack(f"<{len(first)}q", *first)
    Path(f"{prefix}.bin").write_bytes(raw)
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix)


def counting_tokens(prefix: Path, tokens: int, base: int = 0, vocab_size: int = 257) -> str:
    """One document whose token i is (base + i) mod vocab_size."""
    return write_tokens(prefix, [[(base + i) % vocab_size for i in range(tokens)]])
