"""Which experts a token goes to, and how much each of them counts.

Scores are max(float32, dtype). Every rank sees tokens of its own, so the weight's gradient comes in parts over all axes
that divide tokens, tp included. Terms that keep the load even are sums over this rank's tokens, with counts that are
known over the whole row: dividing them is the objective's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ultrascale.comm import collectives
from ultrascale.comm.group import Group
from ultrascale.config.model_section import Model
from ultrascale.parallel.experts.dispatch import counts_of
from ultrascale.parallel.layout import Layout
from ultrascale.parallel.module import Build, Module
from ultrascale.parallel.passes import Pass
from ultrascale.precision.policy import wide

NONE = -1
"""A choice of no expert."""


@dataclass(frozen=True, slots=True)
class _RouterGradient:
    """dW = dlogitsᵀ·x of one micro-batch."""

    weight: torch.Tensor
    dlogits: torch.Tensor
    x: torch.Tensor
    current: Pass

    def issue(self) -> None:
        pass

    def run(self) -> None:
        current = self.current
        assert current.sink is not None
        x = self.x.to(self.dlogits.dtype)
        current.sink.accumulate_product(self.weight, self.dlogits, x, current.stage, current.micro_batch)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, current: Pass) -> torch.Tensor:
        ctx.weight, ctx.current = weight, current
        ctx.save_for_backward(x)
        dtype = wide(x.dtype)
        return F.linear(x.to(dtype), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, dlogits: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        current: Pass = ctx.current
        assert current.sink is not None
        work = _RouterGradient(ctx.weight, dlogits, x, current)
        current.sink.defer(work, current.stage, current.micro_batch)
        return dlogits.matmul(ctx.weight.to(dlogits.dtype)).to(x.dtype), None, None


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router says about tokens [tokens]."""

    logits: torch.Tensor
    """Wide [tokens, experts]."""
    shares: torch.Tensor
    """Wide [tokens, experts]: scores that add up to 1."""
    chosen: torch.Tensor
    """int64 [tokens, k]"""
    weights: torch.Tensor
    """Wide [tokens, k]: what the chosen experts' outputs are multiplied with."""


class Router(Module):
    """Top-k of softmax or sigmoid scores, over all experts or the best groups of them.

    Softmax: Shazeer et al. 2017; sigmoid, groups and scaling: DeepSeek-V3 2024, §2.1.2.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    """Wide [experts], where there is one: added to scores for the choice alone (`balance`)."""
    load: torch.Tensor
    """Wide [experts], where the auxiliary loss looks at the global batch: each expert's share of the choices of the
    step before, 1/experts before the first."""

    def __init__(self, build: Build, layout: Layout, bias: Layout | None, load: Layout | None, model: Model) -> None:
        super().__init__(build)
        self.declare("weight", layout)
        if bias is not None:
            self.keep("bias", bias)
        if load is not None:
            self.keep("load", load)
        self.model = model

    def balance(self, counts: torch.Tensor) -> None:
        """After a step: experts with fewer tokens than the mean become likelier, by a fixed amount; and the reverse.

        counts   int64 [experts], of the global batch: equal on all ranks, and so stay biases and shares
        Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1.
        """
        rate, total = self.model.router_bias_update_rate, counts.sum()
        if rate:
            missing = total - counts * counts.numel()  # integers: no rounding decides a sign
            self.bias.add_(missing.sign().to(self.bias.dtype), alpha=rate)
        if "load" in self.kept:
            shares = counts.to(torch.float64) / total.clamp(min=1)
            self.load.copy_(torch.where(total > 0, shares, self.load.to(torch.float64)))

    def forward(self, x: torch.Tensor, current: Pass) -> Routing:
        """x [tokens, hidden]"""
        model, k = self.model, self.model.num_experts_per_tok
        assert k is not None
        logits = _Logits.apply(x, self.weight, current)
        scores = logits.softmax(-1) if model.scoring_func == "softmax" else logits.sigmoid()
        worth = scores.detach() + self.bias if "bias" in self.kept else scores.detach()
        chosen = self._allowed(worth).topk(k, dim=-1, sorted=True).indices
        weights = scores.gather(-1, chosen)
        if model.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        shares = scores if model.scoring_func == "softmax" else scores / scores.sum(-1, keepdim=True)
        return Routing(logits, shares, chosen, weights * model.routed_scaling_factor)

    def _allowed(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores with −∞ outside of each token's best groups: those whose two best experts add up to most."""
        model = self.model
        if model.n_group == 1:
            return scores
        grouped = scores.unflatten(-1, (model.n_group, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(model.topk_group, dim=-1).indices
        allowed = torch.zeros(*scores.shape[:-1], model.n_group, dtype=torch.bool, device=scores.device)
        allowed.scatter_(-1, best, True)
        return grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)


def without_padding(routing: Routing, real: torch.Tensor) -> Routing:
    """The same where tokens that are no text (real [tokens] false) choose nothing and count for nothing."""
    kept = real.unsqueeze(1)
    return Routing(
        logits=routing.logits,
        shares=routing.shares * kept,
        chosen=routing.chosen.masked_fill(~kept, NONE),
        weights=routing.weights,
    )


def balance_sum(routing: Routing, rows: int, per_row: torch.Tensor | int, row_group: Group) -> torch.Tensor:
    """Σ over rows of experts / (k · T²) · Σ_i count_i · Σ_t share_i(t), this rank's tokens' part of it, a scalar.

    1 for each row whose tokens go to all experts alike; more the less even (Switch, Fedus et al. 2021, eq. 4, per
    sequence as DeepSeek-V3 2024, eq. 17). Counts are those of the whole row, so the sum over ranks hangs on no layout.

    rows        sequences in the micro-batch; tokens lie as [places, rows]
    per_row     T, tokens of a whole row; int64 [rows] where rows differ
    row_group   the ranks that hold the other tokens of these rows
    """
    experts, k = routing.shares.shape[1], routing.chosen.shape[1]
    with torch.no_grad():
        row = torch.arange(routing.chosen.shape[0], device=routing.chosen.device) % rows
        places = (row.unsqueeze(1) * experts + routing.chosen).masked_fill(routing.chosen == NONE, NONE)
        counts = counts_of(places, rows * experts)[1:]
        with row_group.ledger.during("router"):
            counts = collectives.all_reduce(counts, row_group).wait().view(rows, experts)
    shares = routing.shares.unflatten(0, (-1, rows)).sum(0)
    # A row that is all padding has no tokens, no counts and no shares: its part is 0, not 0/0.
    per_row = per_row.clamp(min=1) if isinstance(per_row, torch.Tensor) else per_row
    return ((shares * counts).sum(1) * experts / (k * per_row**2)).sum()


def global_balance_sum(routing: Routing, load: torch.Tensor) -> torch.Tensor:
    """Σ over this rank's tokens of experts · Σ_i load_i · share_i, a scalar: 1 for each token under an even load (over
    the global batch: Qiu et al. 2025, "Demons in the detail").

    The load is that of the whole global batch of the step before: a pipeline's first micro-batches go backward before
    the last ones are routed, so no schedule could wait for that of this step. A constant, as counts are (equal for all
    micro-batches, ranks and recomputations), so the sum over ranks hangs on no layout.

    load   wide [experts], adds up to 1
    """
    return (routing.shares * load).sum() * load.numel()


def z_sum(routing: Routing) -> torch.Tensor:
    """Σ over this rank's tokens of logsumexp(logits)², a scalar: keeps logits small (Zoph et al. 2022, eq. 5)."""
    squares = routing.logits.logsumexp(-1).square()
    return squares.masked_fill(routing.chosen[:, 0] == NONE, 0.0).sum()
