"""The one exception of this package."""

from __future__ import annotations


class DataError(Exception):
    """Token data, a corpus or a tokenizer cannot be used; the message names the file, what is wrong and a way
    out.
    """
