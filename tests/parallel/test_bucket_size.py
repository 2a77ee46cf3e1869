"""`parallel.bucket_bytes=auto`: one number for all ranks, that follows the links and stays within its bounds."""

from __future__ import annotations

from typing import Any

import pytest

from pool import Context, pool
from small import assembled, config_of
from ultrascale.config.collect import check
from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError
from ultrascale.config.schema import Config
from ultrascale.mesh.axes import Mesh
from ultrascale.mesh.links import LINKS, best_bucket
from ultrascale.models.sizes import llama_sizes
from ultrascale.parallel.bucket_size import MOST, bucket_bytes

DEEP: dict[str, Any] = {
    "model.hidden_size": 64,
    "model.intermediate_size": 128,
    "model.num_hidden_layers": 4000,
    "parallel.dp": 4,
    "precision.compute": "bfloat16",
}
"""With layers so small that a bucket has many."""
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64


def automatic(overrides: dict[str, Any], device: str = "cpu") -> int:
    world = 1
    for key, value in {**DEEP, **overrides}.items():
        world *= value if key in ("parallel.dp", "parallel.tp", "parallel.pp") else 1
    config = config_of({**DEEP, **overrides}, world)
    return bucket_bytes(config, Mesh.of(config), parameters(config), device)


def parameters(config: Config) -> int:
    return llama_sizes(config).parameters


def test_it_is_the_best_size_for_what_a_rank_sums_in_whole_layers() -> None:
    total = 4 * parameters(config_of(DEEP, 4))
    best = best_bucket(total, 4, LINKS["gloo"])
    assert automatic({}) % (4 * (LAYER + 1)) == 0  # a four-thousandth of the last norm with it
    assert abs(automatic({}) - best) <= 4 * (LAYER + 1) / 2
    assert automatic({"parallel.zero_stage": 1}) == automatic({})
    shards = automatic({"parallel.zero_stage": 1, "parallel.dp_shard": 2})
    assert shards == pytest.approx(best_bucket(total, 2, LINKS["gloo"]), rel=0.01), "only shards are summed in buckets"
    assert automatic({"parallel.pp": 2, "parallel.tp": 2}) == pytest.approx(best / 2, rel=0.01)
    assert automatic({}, "cuda") == pytest.approx(best_bucket(total, 4, LINKS["nvlink4"]), rel=0.01)


def test_its_bytes_are_those_of_accumulation_whatever_the_dtype_of_travel() -> None:
    """Half the bytes on the wire ask for √½ of them in a bucket, which are twice as many in float32."""
    assert automatic({"precision.reduce": "bfloat16"}) == pytest.approx(automatic({}) * 2**0.5, rel=0.01)
    assert automatic({"precision.compute": "float64"}) == pytest.approx(automatic({}) * 2**0.5, rel=0.01)


def test_units_stay_whole_and_memory_is_bounded() -> None:
    assert automatic({"model.num_hidden_layers": 2, "parallel.dp": 1}) == 4 * parameters(
        config_of({**DEEP, "model.num_hidden_layers": 2, "parallel.dp": 1})
    )
    assert automatic({"model.num_hidden_layers": 1, "model.vocab_size": 100_000}) == 4 * 100_000 * 64
    wide = {"model.hidden_size": 1024, "model.intermediate_size": 4096, "model.num_hidden_layers": 100}
    assert 0.9 * MOST < automatic({**wide, "parallel.dp": 512}) <= 1.1 * MOST
    large = {"model.hidden_size": 16384, "model.intermediate_size": 53248, "model.num_hidden_layers": 2}
    assert automatic(large) > 2 * MOST, "a layer is larger"


def test_a_number_overrides_it_and_from_stage_2_on_a_unit_is_a_bucket() -> None:
    assert automatic({"parallel.bucket_bytes": 12345}) == 12345
    for stage in (2, 3):
        assert automatic({"parallel.zero_stage": stage}) == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_number_that_no_stage_looks_at_is_said(stage: int) -> None:
    given = ["parallel.bucket_bytes=1000", f"parallel.zero_stage={stage}"]
    with pytest.raises(ConfigError, match=f"bucket_bytes has no effect under parallel.zero_stage={stage}; .* use 0 or"):
        check(load("configs/debug.yaml", given), 2)
    check(load("configs/debug.yaml", given[:1]), 2)


def _made(context: Context, config: Config) -> tuple[int, list[int]]:
    store = assembled(config, context).store
    return store.bucket_bytes, [bucket.numel * bucket.gradients.element_size() for bucket in store.buckets]


@pytest.mark.parametrize("layout", [{"parallel.dp": 4}, {"parallel.dp": 2, "parallel.pp": 2}], ids=str)
def test_all_ranks_have_one_size_and_replicas_the_same_buckets(layout: dict[str, Any]) -> None:
    settings = {"model.hidden_size": 64, "model.num_hidden_layers": 24, "model.intermediate_size": 128}
    config = config_of({**settings, "precision.compute": "float32", **layout}, 4)
    found = pool(4).run(_made, config)
    assert len({limit for limit, _ in found}) == 1
    mesh = Mesh.of(config)
    for rank, (limit, made) in enumerate(found):
        assert made == found[mesh.members(rank, ["dp"])[0]][1]
        assert len(made) > 1
        assert max(made) <= limit * 1.01, "more than what aligns the starts of tensors"
