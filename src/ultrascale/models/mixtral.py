"""Mixtral: Llama with experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from typing import ClassVar

from ultrascale.models.llama import Llama
from ultrascale.models.moe import MoEBlock
from ultrascale.models.sizes import Sizes, moe_sizes
from ultrascale.models.transformer import Block
from ultrascale.parallel.objective import Term


class Mixtral(Llama):
    """The Mixtral family."""

    block: ClassVar[type[Block]] = MoEBlock

    def sizes(self) -> Sizes:
        return moe_sizes(self.config)

    def terms(self) -> dict[str, Term]:
        """Llama's, and those that keep routers even and their logits small; each sums over all layers."""
        model, terms = self.config.model, super().terms()
        if model.router_aux_loss_coef:
            of_rows = model.router_aux_loss_scope == "sequence"
            terms["balance"] = Term("rows" if of_rows else "tokens", model.router_aux_loss_coef)
        if model.router_z_loss_coef:
            terms["router_z"] = Term("tokens", model.router_z_loss_coef)
        return terms
