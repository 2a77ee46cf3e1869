"""What is wrong with a config, as data: found by the packages' checks, shown to the user in one place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one key.

    `message` is a whole sentence with key, value, rule and nearest fix:
    "parallel.tp=3 does not divide model.num_attention_heads=32; use 1, 2, 4, 8, 16 or 32".

    kind `error`: the run cannot start. kind `idle`: the key has no effect under the other settings, which
    is a notice when a file set it, an error when the command line did, and nothing when it is a default.

    `origin` ("file:line", "command line") is filled in by the collector; checks leave it empty.
    """

    key: str
    message: str
    kind: Literal["error", "idle"] = "error"
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}" if self.origin else self.message


class ConfigError(Exception):
    """A config that cannot run. `str()` is what the user reads: all the problems, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def choices(values: Sequence[object]) -> str:
    """`[1, 2, 4]` → "1, 2 or 4", for the end of a message."""
    words = [str(value) for value in values]
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
