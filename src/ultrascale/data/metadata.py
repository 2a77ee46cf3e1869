"""What is known of a token file beside its bytes: `PREFIX.meta.json`, written by `data prepare` and `data
check --record`.

Files that other programs wrote have no such sidecar and are read all the same; see `loader.py` for what is
then checked.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ultrascale.data.errors import DataError

FORMAT = "ultrascale.tokens/1"
_LARGEST_FILE = 1 << 20  # bytes; a sidecar has a few hundred


@dataclass(frozen=True)
class Metadata:
    """Facts recorded once about PREFIX.bin and PREFIX.idx.

    fingerprint is IndexedDataset.fingerprint at the time of writing: a sidecar left over from other files is
    seen. tokenizer is None when nobody said with what the tokens were made.
    """

    documents: int
    tokens: int
    max_id: int
    max_id_at: int  # index of the first token with that id
    fingerprint: str
    bin_sha256: str
    idx_sha256: str
    tokenizer: str | None = None  # as it was given: bytes, or a file
    tokenizer_fingerprint: str | None = None
    vocab_size: int | None = None
    end_of_document: int | None = None


def metadata_path(prefix: str | Path) -> Path:
    """PREFIX.meta.json."""
    return Path(f"{prefix}.meta.json")


def to_json(metadata: Metadata) -> str:
    """The text of a sidecar."""
    return json.dumps({"format": FORMAT, **asdict(metadata)}, indent=2) + "\n"


def read_metadata(prefix: str | Path) -> Metadata | None:
    """The sidecar of a prefix, or None where there is none. Raises DataError when it is there and cannot be
    understood.
    """
    path = metadata_path(prefix)
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(f"{path}: larger than {_LARGEST_FILE} bytes, so no sidecar of a token file; move it away")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error}); {_remedy(prefix)}") from error
    return _parse(content, path, prefix)


def _parse(content: Any, path: Path, prefix: str | Path) -> Metadata:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path}: its format is {found!r}, not {FORMAT!r}; {_remedy(prefix)}")
    values: dict[str, Any] = {}
    for name, annotation in Metadata.__annotations__.items():
        kind = int if annotation.startswith("int") else str
        value = content.get(name)
        missing_allowed = annotation.endswith("None")
        if value is None and missing_allowed:
            values[name] = None
        elif isinstance(value, kind) and not isinstance(value, bool):
            values[name] = value
        else:
            raise DataError(f"{path}: {name}={value!r} is not of type {kind.__name__}; {_remedy(prefix)}")
    return Metadata(**values)


def _remedy(prefix: str | Path) -> str:
    return f"write it anew with `ultrascale data check {prefix} --record`"
