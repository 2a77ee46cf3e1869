"""First weights from a Hugging Face folder: each rank reads the bytes of its own boxes, and no more."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import torch

from ultrascale.checkpoint.boxes import Box, CheckpointError, pieces, slices
from ultrascale.checkpoint.hugging_face import open_folder
from ultrascale.checkpoint.manifest import refuse
from ultrascale.checkpoint.stored import Reader
from ultrascale.checkpoint.values import convert, exact
from ultrascale.checkpoint.write import DTYPE_NAMES

BLOCK = 1 << 22
"""Elements that are read at a time."""


@torch.no_grad()
def fill_from_hf(path: Path, wanted: Iterable[Box], names: Collection[str], compare_copies: bool = True) -> None:
    """Fills the boxes of masters, in place. Not collective.

    names            all parameters of the whole job: those of the folder must be the same
    compare_copies   whether this rank reads both of a tied tensor that is there twice

    Raises CheckpointError with everything that does not fit.
    """
    folder = open_folder(path, compare_copies)
    problems = [
        f"{path}: the model has {name}, the family's mapping does not" for name in set(names) - set(folder.stored)
    ]
    problems += [f"{path}: {name} is no parameter of this model" for name in sorted(set(folder.stored) - set(names))]
    refuse(sorted(problems))
    with Reader() as reader:
        for box in wanted:
            tensor, dtype = folder.stored[box.name], DTYPE_NAMES[box.tensor.dtype]
            if tensor.shape != box.shape:
                raise CheckpointError(
                    f"{path}: {box.name} has shape {list(tensor.shape)}, this run wants {list(box.shape)}"
                )
            if not exact(tensor.dtype, dtype):
                raise CheckpointError(
                    f"{path}: {box.name} is {tensor.dtype} there and masters are {dtype} here, which cannot hold it; "
                    f"use precision.compute={tensor.dtype}, or convert the folder"
                )
            for offset, shape in pieces(box.offset, tuple(box.tensor.shape), BLOCK):
                bits = np.ascontiguousarray(convert(reader.box(tensor, offset, shape).reshape(-1), tensor.dtype, dtype))
                values = torch.from_numpy(bits.view(np.uint8)).view(box.tensor.dtype).reshape(shape)
                box.tensor[slices(offset, shape, box.offset)].copy_(values)
