"""From text to token ids and back: bytes, or a `tokenizer.json`.

A tokenizer never adds tokens of its own accord here: `encode` gives the ids of the text alone, and whoever
writes documents appends `end_of_document` once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ultrascale.data.errors import DataError

Ints = NDArray[np.int64]

BYTES = "bytes"
BYTES_VOCAB_SIZE = 257
END_OF_DOCUMENT = "<|endoftext|>"
# What the published tokenizers call it, in the order in which we believe them.
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]")
SMALLEST_BPE = BYTES_VOCAB_SIZE  # 256 bytes and the end of a document


class Tokenizer(Protocol):
    """name is what config.data.tokenizer says; vocab_size is one more than the largest id it can give."""

    name: str
    fingerprint: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> Ints:
        """Ids [n] of a text, without an end."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[Ints]:
        """`encode` of each."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; ends of documents are left out."""
        ...


class ByteTokenizer:
    """The UTF-8 bytes 0 … 255, and 256 for the end of a document."""

    name = BYTES
    fingerprint = BYTES
    vocab_size = BYTES_VOCAB_SIZE
    end_of_document = 256

    def encode(self, text: str) -> Ints:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int64)

    def encode_many(self, texts: Sequence[str]) -> list[Ints]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Text that spells a special token is encoded as text, so that a document cannot forge the end of one. The
    end of a document is `end_of_document` when given, else `eos_token` of a tokenizer_config.json beside the
    file, else the first of KNOWN_ENDS that it has. Raises DataError when the file is missing, no tokenizer,
    or has no such token, and ImportError with the pip command when `tokenizers` is not installed.
    """

    def __init__(self, path: str | Path, end_of_document: str | None = None) -> None:
        self.path = Path(path)
        self.name = str(path)
        raw = _read(self.path)
        self.fingerprint = hashlib.sha256(raw).hexdigest()
        library = _library()
        try:
            self._tokenizer: Any = library.Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"{path}: is no tokenizer.json that `tokenizers` understands ({error})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{path}: has no vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = self._find_end(vocabulary, end_of_document)

    def __reduce__(self) -> tuple[type[FileTokenizer], tuple[str, str | None]]:
        return FileTokenizer, (self.name, self._tokenizer.id_to_token(self.end_of_document))

    def encode(self, text: str) -> Ints:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_many(self, texts: Sequence[str]) -> list[Ints]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text

    def _find_end(self, vocabulary: dict[str, int], given: str | None) -> int:
        if given is not None:
            if given not in vocabulary:
                raise DataError(f"{self.path}: has no token {given!r} to end documents with")
            return vocabulary[given]
        for candidate in (_eos_beside(self.path), *KNOWN_ENDS):
            if candidate is not None and candidate in vocabulary:
                return vocabulary[candidate]
        raise DataError(
            f"{self.path}: has none of {', '.join(KNOWN_ENDS)} to end documents with; "
            "name its token: --end-of-document TOKEN, or eos_token in a tokenizer_config.json beside it"
        )


def open_tokenizer(specification: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes` or a path. Raises DataError as FileTokenizer
    does.
    """
    if specification == BYTES:
        if end_of_document is not None:
            raise DataError(
                "the tokenizer `bytes` ends documents with id 256; --end-of-document is for a tokenizer.json"
            )
        return ByteTokenizer()
    return FileTokenizer(specification, end_of_document)


def vocabulary_size_of_file(path: str | Path) -> int:
    """One more than the largest id in a `tokenizer.json`, read without the `tokenizers` library. Raises
    DataError.
    """
    try:
        content = json.loads(_read(Path(path)))
        model = content["model"]
        vocabulary = model["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in content.get("added_tokens") or []]
        return int(max(ids)) + 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: is no tokenizer.json ({type(error).__name__}: {error})") from error


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> None:
    """Trains a byte-level BPE of at most `vocab_size` tokens on `texts` and writes it to `path`.

    Ids 0 … are: the end of a document, the 256 bytes, merges by frequency. Fewer come out when the text has
    too few pairs. Raises DataError for a vocabulary under 257.
    """
    if vocab_size < SMALLEST_BPE:
        raise DataError(
            f"train:{vocab_size}: a byte-level vocabulary needs at least {SMALLEST_BPE} tokens "
            "(256 bytes and the end of a document)"
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    tokenizer.save(str(path))


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a folder; name the tokenizer.json in it: {path / 'tokenizer.json'}")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such tokenizer file; data.tokenizer is `bytes` or the path of a tokenizer.json"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not raw:
        raise DataError(f"{path}: is empty, so no tokenizer.json")
    return raw


def _eos_beside(path: Path) -> str | None:
    """`eos_token` of a Hugging Face tokenizer_config.json in the same folder, if there is one."""
    beside = path.parent / "tokenizer_config.json"
    try:
        content = json.loads(beside.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{beside}: cannot be read ({error})") from error
    token = content.get("eos_token") if isinstance(content, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            'a tokenizer.json needs the package `tokenizers`: pip install "ultrascale[hf]", or use '
            "data.tokenizer: bytes"
        ) from error
    return tokenizers
