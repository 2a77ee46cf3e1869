"""Counts of bytes as people write them."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", re.ASCII)


def byte_count(text: str) -> int:
    """1073741824, 5GB or 1.5GiB; an argument's type."""
    found = _FORM.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write for example 500MB, 5GB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])
