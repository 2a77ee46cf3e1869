"""Parameter counts: closed form, what is built on the meta device, and the published figure agree."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from ultrascale.comm.group import Group
from ultrascale.comm.ledger import Ledger
from ultrascale.config.load import load
from ultrascale.config.resolve import resolve
from ultrascale.kernels.attention_reference import ReferenceAttention
from ultrascale.mesh.axes import Mesh
from ultrascale.models.family import load_family
from ultrascale.parallel.context.attention import ContextAttention
from ultrascale.parallel.module import Build, stored_tensors
from ultrascale.pipeline.partition import partition
from ultrascale.precision.policy import Policy

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
}


def built(name: str, tp: int, pp: int) -> tuple[int, list[int], int]:
    """(elements over all ranks of one replica, each once; layers over all stages; closed form)."""
    overrides = [f"parallel.tp={tp}", f"parallel.pp={pp}"]
    config = resolve(load(CONFIGS / f"{name}.yaml", overrides).config, tp * pp)
    mesh = Mesh.of(config)
    family = load_family(config.model.family)(config)
    total, layers = 0, []
    for stage, part in enumerate(partition(config.pipeline.layout, config.model.num_hidden_layers, pp)):
        layers += part.layers
        for shard in range(tp):
            rank = mesh.rank_of({"pp": stage, "tp": shard})
            group = Group(("tp",), mesh.members(rank, ["tp"]), shard, None, Ledger())
            attention = ContextAttention.of_one_rank(rank, ReferenceAttention())
            build = Build(mesh, rank, group, tp > 1, Policy.of(config), "none", attention)
            module = family.stage(build, part.layers, part.embedding, part.head)
            total += sum(
                prod(layout.box(mesh, rank)[1])
                for entry in stored_tensors(module.units())
                for layout in entry.stored.members
                if layout.is_owner(mesh, rank)
            )
    return total, layers, family.sizes().parameters


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("llama3_8b", 1, 1), ("llama3_8b", 16, 3), ("llama3_70b", 2, 4), ("qwen3_0.6b", 1, 1), ("qwen3_8b", 8, 3)],
)
def test_what_is_built_is_the_closed_form_and_the_published_count(name: str, tp: int, pp: int) -> None:
    total, layers, closed = built(name, tp, pp)
    assert total == closed == PUBLISHED[name]
    assert layers == list(range(len(layers)))


def test_405b_has_the_published_count() -> None:
    total, layers, closed = built("llama3_405b", 8, 2)
    assert total == closed == PUBLISHED["llama3_405b"]
    assert len(layers) == 126
