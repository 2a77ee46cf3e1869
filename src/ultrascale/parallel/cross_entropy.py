"""Head and cross entropy in one, over a vocabulary that is cut over tp, a chunk of tokens at a time.

The logits of all tokens never exist at once when they would be large. Every rank reduces its own vocabulary to a
log-sum-exp and, where it owns it, the target's logit; two small collectives over tp then make the loss of all tokens:
a maximum and a sum. Padded vocabulary rows are outside the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.parallel.passes import Pass
from ultrascale.parallel.whole_tokens import WholeTokens
from ultrascale.precision.policy import wide

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Logits made at a time, by device type. Below 16 MiB the weight gradient's GEMM is too flat to run at full speed."""
KEEP_BYTES = 128 << 20
"""Up to this size the logits of a micro-batch are kept for backward; above it they are computed again."""

NO_TARGET = -100
"""Label of a position without a target."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's rows of the vocabulary: ids [start, start + valid); further rows of the weight are padding."""

    start: int
    valid: int
    total: int
    """Size of the whole vocabulary, without padding."""


def _chunk_rows(weight: torch.Tensor) -> int:
    return max(16, CHUNK_BYTES[weight.device.type] // (weight.shape[0] * wide(weight.dtype).itemsize))


def _logits(x: torch.Tensor, weight: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Logits of some tokens in wide precision, [tokens, valid]: padding is cut off, not masked."""
    return x.matmul(weight[: shard.valid].t()).to(wide(x.dtype))


class _HeadLoss(torch.autograd.Function):
    """Sums over tokens with a target of: −log p (smoothed), and lse²."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        shard: VocabularyShard,
        smoothing: float,
        group: Group,
        sequence_parallel: bool,
        current: Pass,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = collectives.all_gather(x, group).wait() if sequence_parallel else x
        tokens = whole.reshape(-1, whole.shape[-1])
        target = labels.reshape(-1)
        count = tokens.shape[0]
        dtype = wide(x.dtype)
        has_target = target != NO_TARGET
        local = target - shard.start
        owned = has_target & (local >= 0) & (local < shard.valid)
        local = local.masked_fill(~owned, 0)

        local_max = torch.full((count,), -torch.inf, dtype=dtype, device=x.device)
        parts = torch.zeros((3, count), dtype=dtype, device=x.device)  # exp-sum, target's logit, sum of logits
        rows = _chunk_rows(weight)
        # By the rows in memory, which are as many on every tp rank: all of them keep, or none does.
        keep = current.sink is not None and count * weight.shape[0] * dtype.itemsize <= KEEP_BYTES
        kept: list[torch.Tensor] = []
        if shard.valid:
            for start in range(0, count, rows):
                part = slice(start, start + rows)
                logits = _logits(tokens[part], weight, shard)
                local_max[part] = logits.amax(dim=-1)
                parts[1, part] = logits.gather(1, local[part].unsqueeze(1)).squeeze(1) * owned[part]
                if smoothing:
                    parts[2, part] = logits.sum(dim=-1)
                exponentials = logits.sub_(local_max[part].unsqueeze(1)).exp_()
                parts[0, part] = exponentials.sum(dim=-1)
                if keep:
                    kept.append(exponentials)
        highest = local_max
        if group.size > 1:
            highest = collectives.all_reduce(local_max.clone(), group, op="max").wait()
            parts[0] *= torch.exp(local_max - highest)
            collectives.all_reduce(parts if smoothing else parts[:2], group).wait()
        lse = highest + torch.log(parts[0])
        losses = lse - (1.0 - smoothing) * parts[1]
        if smoothing:
            losses -= (smoothing / shard.total) * parts[2]
        zero = torch.zeros((), dtype=dtype, device=x.device)
        loss_sum = torch.where(has_target, losses, zero).sum()
        z_sum = torch.where(has_target, lse.square(), zero).sum()

        ctx.weight, ctx.shard, ctx.smoothing = weight, shard, smoothing
        ctx.group, ctx.sequence_parallel, ctx.current = group, sequence_parallel, current
        ctx.keep, ctx.kept = keep, kept
        ctx.save_for_backward(x, lse, local_max, local, owned, has_target)
        return loss_sum, z_sum

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, d_z: torch.Tensor) -> Any:
        x, lse, local_max, local, owned, has_target = ctx.saved_tensors
        weight, shard = ctx.weight, ctx.shard
        current: Pass = ctx.current
        assert current.sink is not None
        whole = WholeTokens(x, ctx.group, ctx.sequence_parallel)
        # Where logits are kept they become the deferred gradient's own; a chunk that is made again is used at once.
        work = _HeadGradient(weight, whole, current, [])
        deferred = ctx.keep and current.splits_backward
        if not deferred:
            whole.issue()  # also by a rank whose vocabulary is all padding
        count = local.shape[0]
        dx = x.new_zeros(count, x.shape[-1])
        valid_weight = weight[: shard.valid]
        # d loss / d logit = p·(dL + 2·lse·dz) − dL·((1 − s)·onehot + s/V), and 0 where there is no target
        on_target = (has_target * d_loss).unsqueeze(1)
        on_p = on_target + (has_target * lse * (2.0 * d_z)).unsqueeze(1)
        # p = exp(logit − lse) = exp(logit − local max) · exp(local max − lse): what forward kept needs no second exp.
        on_exponential = on_p * torch.exp(local_max - lse).unsqueeze(1)
        rows = _chunk_rows(weight)
        for number, start in enumerate(range(0, count, rows) if shard.valid else ()):
            part = slice(start, start + rows)
            if ctx.kept:
                exponentials = ctx.kept[number]
            else:
                tokens = whole.wait().view(dx.shape)[part]
                exponentials = _logits(tokens, weight, shard).sub_(local_max[part].unsqueeze(1)).exp_()
            dlogits = exponentials.mul_(on_exponential[part])
            if ctx.smoothing:
                dlogits -= on_target[part] * (ctx.smoothing / shard.total)
            hit = (owned[part] * d_loss * (ctx.smoothing - 1.0)).unsqueeze(1)
            dlogits.scatter_add_(1, local[part].unsqueeze(1), hit)
            dlogits = dlogits.to(x.dtype)
            torch.matmul(dlogits, valid_weight, out=dx[part])
            work.chunks.append((part, dlogits))
            if not deferred:
                work.run()
        ctx.kept = []
        if deferred:
            current.sink.defer(work, current.stage, current.micro_batch)
        dx = dx.view(-1, *x.shape[1:])
        reduce = collectives.reduce_scatter if ctx.sequence_parallel else collectives.all_reduce
        return reduce(dx, ctx.group).wait(), *[None] * 7


@dataclass(frozen=True, slots=True)
class _HeadGradient:
    """The head's weight gradient of one micro-batch, a chunk of tokens at a time: (which, dlogits [tokens, valid])."""

    weight: torch.Tensor
    x: WholeTokens
    current: Pass
    chunks: list[tuple[slice, torch.Tensor]]

    def issue(self) -> None:
        self.x.issue()

    def run(self) -> None:
        current = self.current
        assert current.sink is not None
        tokens = self.x.wait().flatten(0, 1)
        while self.chunks:
            part, dlogits = self.chunks.pop(0)
            current.sink.accumulate_product(self.weight, dlogits, tokens[part], current.stage, current.micro_batch)


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabularyShard,
    smoothing: float,
    group: Group,
    sequence_parallel: bool,
    current: Pass,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Σ of −log p(target), label smoothing included; Σ of lse², for the z-loss) over positions with a target.

    x        [seq (/ tp), batch, hidden]
    weight   [vocabulary / tp, hidden], this rank's rows
    labels   int64 [seq, batch], whole on every tp rank; −100 = no target
    returns  two scalars in wide precision, bitwise equal on all tp ranks
    Smoothing s: (1 − s)·(−log p_y) + s·mean over the whole vocabulary of −log p (Szegedy et al. 2016).
    """
    return _HeadLoss.apply(x, weight, labels, shard, smoothing, group, sequence_parallel, current)
