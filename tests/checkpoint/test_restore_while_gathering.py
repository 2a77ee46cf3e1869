"""A run builds its model, begins to gather the weights of other shards, and then reads a checkpoint: the gather, which
may write until it is waited for, must not write what was there before over what was read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from checkpoint_cases import header

from pool import Context, pool
from small import assembled, boxes, config_of, whole
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.checkpoint.state import state_boxes
from ultrascale.checkpoint.write import save
from ultrascale.comm import collectives
from ultrascale.config.schema import Config


class Late:
    """A gather whose last write, that of this rank's own part, comes just before its end."""

    def __init__(self, pending: Any, part: torch.Tensor, value: torch.Tensor) -> None:
        self._pending, self._part, self._value = pending, part, value

    def wait(self) -> Any:
        done = self._pending.wait()
        self._part.copy_(self._value)
        return done


def restored(context: Context, config: Config, source: Path) -> list[Any]:
    """A rank's masters after a resume in which every gather is as late as it may be."""
    original = collectives.all_gather

    def late(tensor: torch.Tensor, group: Any, into: torch.Tensor | None = None) -> Any:
        if into is None:
            return original(tensor, group)
        value, size = tensor.clone(), tensor.numel()
        part = into[group.index * size : (group.index + 1) * size]
        return Late(original(tensor, group, into=into), part, value)

    with patch.object(collectives, "all_gather", late):
        assembly = assembled(config, context)
        own = {"config": config.model_dump(mode="json"), "data": {}}
        Snapshots(assembly.optimizer, source.parent, own, assembly.groups.world, None, "full").restore(source)
        assembly.optimizer.weights.settle()
    return boxes(assembly, "masters")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_restored_is_not_overwritten_by_a_gather_that_was_under_way(tmp_path: Path, stage: int) -> None:
    one = assembled(config_of({"run.seed": 3}))
    for box in state_boxes(one.optimizer, owned=True):
        box.tensor.add_(1)
    expected = whole([boxes(one, "masters")])
    config = config_of({"parallel.dp": 2, "parallel.zero_stage": stage}, 2)
    saved = {**header(3), "config": config.model_dump(mode="json")}
    save(tmp_path / "step-00000003", state_boxes(one.optimizer, owned=True), saved)
    found = whole(pool(2).run(restored, config, tmp_path / "step-00000003"))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
