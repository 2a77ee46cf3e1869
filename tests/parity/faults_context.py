"""Faults of context parallelism: parts of attention, masks, positions, what goes round a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from fault_registry import Patch, fault

from ultrascale import step as stepping
from ultrascale.data.loader import NO_TARGET
from ultrascale.models.batch import MicroBatch
from ultrascale.parallel.context import ring
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.context.split import CONTIGUOUS
from ultrascale.parallel.context.ulysses import Exchange
from ultrascale.parallel.layout import Layout


@fault
def gradients_are_not_summed_over_cp() -> Patch:
    """Each cp rank keeps what its own tokens say."""
    original = Layout.gradient_axes

    def without_cp(self: Layout, mesh: Any) -> tuple[str, ...]:
        return tuple(leaf for leaf in original(self, mesh) if not leaf.startswith("cp"))

    return patch.object(Layout, "gradient_axes", without_cp)


@fault
def parts_of_attention_are_averaged() -> Patch:
    """What ring steps give is joined without regard to how much each has seen."""

    def average(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        out.add_(part).div_(2)

    return patch.object(ring, "merge", average)


@fault
def gradients_of_keys_do_not_come_home() -> Patch:
    """Forward is right; what the others made of a rank's keys is lost."""

    def own_part(self: Any) -> ring.Block:
        self._sending.wait()
        self._home.wait()
        return self._here  # type: ignore[no-any-return]

    return patch.object(ring._Gradients, "of_own", own_part)


@fault
def a_blocks_gradient_is_overwritten_on_its_way() -> Patch:
    """Each place sends its own part on, and not the sum."""
    original = ring._Gradients.add

    def add(self: Any, step: int, part: Any) -> None:
        coming = self._coming
        self._coming = ring.Nothing(self.group)
        original(self, step, part)
        coming.wait()

    return patch.object(ring._Gradients, "add", add)


def _called_with(**fixed: Any) -> Patch:
    original = ContextAttention.__call__

    def call(self: ContextAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> torch.Tensor:
        keywords = dict(zip(("documents", "window", "scale"), given))
        return original(self, q, k, v, **{**keywords, **fixed})

    return patch.object(ContextAttention, "__call__", call)


@fault
def documents_are_ignored_by_attention() -> Patch:
    """Packed documents see each other."""
    return _called_with(documents=None)


@fault
def windows_are_ignored_by_attention() -> Patch:
    """A sliding window is silently dropped."""
    return _called_with(window=None)


@fault
def masks_are_those_of_another_split() -> Patch:
    """Tokens are cut by zigzag, and masked as if they were contiguous."""
    original = ContextAttention.of

    def contiguous(*args: Any, **kwargs: Any) -> ContextAttention:
        attention = original(*args, **kwargs)
        attention.meeting.cut = dataclasses.replace(attention.cut, kind=CONTIGUOUS)
        return attention

    return patch.object(ContextAttention, "of", contiguous)


@fault
def copies_of_a_key_head_keep_their_own_gradients() -> Patch:
    """Of the ranks to which Ulysses sends one KV head only the first one's gradient counts."""

    def first(self: Exchange, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, kv_heads: int) -> Any:
        dq, dk, dv = self._gathered(dq, dk, dv)
        return dq, dk.unflatten(2, (kv_heads, -1))[:, :, :, 0], dv.unflatten(2, (kv_heads, -1))[:, :, :, 0]

    return patch.object(Exchange, "to_tokens_gradients", first)


def _cut_otherwise(change: Callable[[MicroBatch], MicroBatch]) -> Patch:
    original = stepping.micro_batch
    return patch.object(stepping, "micro_batch", lambda assembly, arrays: change(original(assembly, arrays)))


@fault
def positions_restart_at_the_cut() -> Patch:
    """Each cp rank counts its own tokens from 0."""

    def restart(batch: MicroBatch) -> MicroBatch:
        places = torch.arange(batch.positions.shape[0]).unsqueeze(1).expand(batch.positions.shape)
        return dataclasses.replace(batch, positions=places.contiguous())

    return _cut_otherwise(restart)


@fault
def each_cut_loses_a_target() -> Patch:
    """Labels are shifted after the cut: a piece's last token has none."""

    def without_last(batch: MicroBatch) -> MicroBatch:
        labels = batch.labels[0].clone()
        labels[-1] = NO_TARGET
        return dataclasses.replace(batch, labels=(labels,))

    return _cut_otherwise(without_last)
