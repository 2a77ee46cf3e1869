"""Keys that do not fit each other are refused, with what would work; keys without effect are said."""

from __future__ import annotations

import re

import pytest
from config_cases import DEBUG, checked, refusal

from ultrascale.config import collect
from ultrascale.config.load import load
from ultrascale.config.resolve import resolve, smallest_world

EXPERTS = (
    "model.family=qwen3_moe", "model.num_experts=8", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32",
)  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "world", "sentence"),
    [
        (
            ["parallel.tp=3", "model.intermediate_size=96", "model.num_key_value_heads=1"],
            3,
            "parallel.tp=3 does not divide model.num_attention_heads=8; use 1, 2, 4 or 8",
        ),
        (
            ["parallel.tp=8", "model.intermediate_size=100"],
            8,
            "parallel.tp=8 does not divide model.intermediate_size=100; use 1, 2 or 4",
        ),
        (
            ["parallel.tp=4", "model.num_attention_heads=12", "model.num_key_value_heads=6", "model.hidden_size=96"],
            4,
            "parallel.tp=4 neither divides model.num_key_value_heads=6 nor is a multiple of it; use 1, 2, 3, 6 or 12",
        ),
        (
            ["model.num_key_value_heads=3"],
            1,
            "model.num_key_value_heads=3 does not divide model.num_attention_heads=8; use 1, 2, 4 or 8",
        ),
        (
            ["model.hidden_size=65"],
            1,
            "model.num_attention_heads=8 does not divide model.hidden_size=65; use a hidden_size of 64 or 72, or set",
        ),
        (["model.head_dim=7"], 1, "model.head_dim=7 is odd, and rotary embeddings turn pairs; use 6 or 8"),
        (
            ["parallel.tp=4", "batch.sequence_length=66"],
            4,
            "batch.sequence_length=66 is not a multiple of 4 (parallel.tp=4 with parallel.sequence_parallel); "
            "use 64 or 68, or context.pad=true, or parallel.sequence_parallel=false",
        ),
        (
            ["parallel.cp=4", "parallel.tp=2", "batch.sequence_length=68"],
            8,
            "batch.sequence_length=68 is not a multiple of 8 (2·parallel.cp=8, zigzag; parallel.tp=2 with "
            "parallel.sequence_parallel); use 64 or 72, or context.pad=true, or context.split=contiguous, or parallel.",
        ),
        (
            ["parallel.cp=3", "context.split=contiguous"],
            3,
            "batch.sequence_length=64 is not a multiple of 3 (parallel.cp=3); use 63 or 66, or context.pad=true",
        ),
        (["batch.sequence_length=512"], 1, "batch.sequence_length=512 is longer than model.max_position_embeddings"),
        (
            ["parallel.dp_shard=2", "parallel.zero_stage=3"],
            3,
            "parallel.dp_shard=2 does not divide parallel.dp=3; use 1 or 3",
        ),
        (["parallel.prefetch=2", "parallel.zero_stage=2"], 1, "parallel.prefetch has no effect"),
        (["parallel.keep_gathered=true"], 1, "parallel.keep_gathered has no effect under parallel.zero_stage=0"),
        (["parallel.dp_shard=1"], 1, "parallel.dp_shard has no effect under parallel.zero_stage=0; leave it out"),
        (
            ["parallel.cp=8", "model.num_attention_heads=4", "context.method=ulysses"],
            8,
            "context.method=ulysses gives each of parallel.cp=8 ranks whole heads, and the 4 query heads of a tp rank "
            "(model.num_attention_heads / parallel.tp) do not divide; use hybrid, or ring",
        ),
        (
            ["parallel.cp=4", "context.method=hybrid", "context.ulysses_size=3"],
            4,
            "context.ulysses_size=3 does not divide parallel.cp=4; use 1, 2 or 4",
        ),
        (["context.ulysses_size=2"], 1, "context.ulysses_size=2 has no effect under context.method=ring; leave it out"),
        (["model.layer_types=[full_attention]"], 1, "model.layer_types has 1 entries, and model.num_hidden_layers="),
        (["parallel.ep=2"], 2, "parallel.ep has no effect under model.family=llama, which has no experts; leave it"),
        (
            ["model.family=mixtral", "model.num_experts=4", "model.num_experts_per_tok=2"],
            1,
            "model.moe_intermediate_size is missing: model.family=mixtral has experts; set it",
        ),
        ([*EXPERTS, "model.n_group=3"], 1, "model.n_group=3 does not divide num_experts=8; use 1, 2, 4 or 8"),
        ([*EXPERTS, "model.topk_group=2"], 1, "model.topk_group=2 is more than model.n_group=1; use at most 1"),
        (
            [*EXPERTS, "model.n_group=8", "model.topk_group=1"],
            1,
            "model.num_experts_per_tok=2 is more than the 1 experts that a token may choose from; use at most 1",
        ),
        (
            [*EXPERTS, "parallel.ep=3", "batch.global_size=12", "batch.micro_size=1"],
            3,
            "parallel.expert_axes=[ep] are 3 ranks, which do not divide model.num_experts=8; use axes of 1, 2, 4 or 8",
        ),
        ([*EXPERTS, "parallel.expert_axes=[pp]"], 1, "parallel.expert_axes=[pp]: the layers of a stage are whole"),
        (
            [*EXPERTS, "parallel.expert_axes=[ep,tp]", "parallel.expert_tensor_axes=[tp]"],
            1,
            "parallel.expert_tensor_axes names tp, over which parallel.expert_axes cuts already; leave it out",
        ),
        (
            [*EXPERTS, "parallel.ep=2", "parallel.expert_axes=[tp]"],
            2,
            "parallel.ep=2 cuts no experts when parallel.expert_axes leaves ep out; use parallel.dp",
        ),
        (
            [*EXPERTS, "model.router_aux_loss_scope=global_batch"],
            1,
            "model.router_aux_loss_scope=global_batch has no effect while model.router_aux_loss_coef is 0; set it, or",
        ),
        (
            [*EXPERTS, "model.expert_capacity_factor=4"],
            1,
            "has room for all tokens (8 experts, 2 of a token); use less than 4, or leave it out",
        ),
        (
            [*EXPERTS, "precision.combine=compute"],
            1,
            "precision.combine=compute has no effect under precision.compute=float32, which is as wide; use",
        ),
        (
            [*EXPERTS, "parallel.ep=2", "parallel.expert_dispatch=deep_ep", "precision.compute=bfloat16"],
            2,
            "parallel.expert_dispatch=deep_ep needs the package deep_ep, which is not installed; pip install",
        ),
        (
            [*EXPERTS, "parallel.ep=2", "parallel.expert_dispatch=deep_ep"],
            2,
            "deep_ep sends bfloat16 alone, and precision.compute=float32; use precision.compute=bfloat16, or use",
        ),
        (["parallel.expert_dispatch=all_gather"], 1, "parallel.expert_dispatch has no effect under model.family=llama"),
        (["precision.combine=compute"], 1, "precision.combine has no effect under model.family=llama, which has no"),
        (["model.num_experts=4"], 1, "model.num_experts has no effect under model.family=llama, which has no experts"),
        (["precision.compute=fp8"], 1, "precision.compute=fp8 is not in this version; use bfloat16"),
        (["precision.compute=float16"], 1, "precision.compute=float16 is not in this version; use bfloat16"),
        (["checkpoint.asynchronous=true", "checkpoint.every=0"], 1, "checkpoint.asynchronous has no effect under"),
        (["checkpoint.storage=memory://x", "checkpoint.every=0"], 1, "checkpoint.storage has no effect under"),
        (["checkpoint.keep_every=5", "checkpoint.keep=null"], 1, "checkpoint.keep_every has no effect under"),
        (
            ["checkpoint.storage=no-such://bucket/run"],
            1,
            "checkpoint.storage=no-such://bucket/run: fsspec knows no storage no-such://; use a URL as s3://",
        ),
        (["model.family=lama"], 1, "model.family=lama is not a family of this version; did you mean llama?"),
        (["model.family=gpt"], 1, "model.family=gpt is not a family of this version; use llama, mixtral, qwen3"),
        (["model.family=no_such_package.m:F"], 1, "Python finds no package no_such_package; install it, or add it"),
        (["schedule.name=cosine", "schedule.total_steps=null"], 1, "schedule.total_steps is missing: schedule.name="),
        (["schedule.name=linear", "schedule.warmup_steps=1000"], 1, "schedule.warmup_steps=1000 is not below schedule"),
        (["schedule.name=cosine", "schedule.min_lr=1"], 1, "schedule.min_lr=1.0 is above optimizer.lr=0.003; use at"),
        (
            ["schedule.name=wsd", "schedule.warmup_steps=600", "schedule.decay_steps=500"],
            1,
            "schedule.decay_steps=500 and schedule.warmup_steps=600 are more than schedule.total_steps=1000; use a "
            "decay of at most 400",
        ),
        (["evaluation.every=5", "data.validation=null"], 1, "evaluation.every=5 has nothing to evaluate"),
        (["parallel.tp=3"], 4, "parallel.tp=3 does not divide the world size 4; use 3 or 6 processes, or cut 4 as dp="),
        (["parallel.tp=8"], 4, "parallel.tp=8 does not divide the world size 4; use 8 processes, or cut 4 as dp="),
        (
            ["parallel.dp=2", "parallel.tp=2"],
            8,
            "parallel.dp=2 × parallel.tp=2 = 4 is not the world size 8; use 4 processes, or cut 8 as dp=4 tp=2",
        ),
        # BL-132 and BL-133: a depth that does not divide is cut unevenly or refused, and never changed.
        (["parallel.pp=16"], 16, "parallel.pp=16 makes 16 stages, more than model.num_hidden_layers=8; use 1, 2"),
        (["parallel.pp=2", "pipeline.layout=[3,4]"], 2, "model.num_hidden_layers=8"),
        (["pipeline.layout=[8]"], 1, "parallel.pp=1 has one stage only"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused_with_what_would_work(overrides: list[str], world: int, sentence: str) -> None:
    assert sentence in refusal(*overrides, world=world)


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        (["parallel.tp=8"], 8),  # KV heads replicated
        (["parallel.tp=4", "parallel.pp=2"], 16),
        (["parallel.pp=3"], 3),  # 8 layers over 3 stages
        (["model.vocab_size=301", "parallel.tp=4"], 4),
        (["parallel.tp=4", "batch.sequence_length=66", "parallel.sequence_parallel=false"], 4),
        (["model.num_hidden_layers=5", "parallel.pp=2"], 2),
        (["parallel.pp=2", "pipeline.layout=[3,5]"], 2),
        (["model.family=json.decoder:JSONDecoder"], 1),
        (["optimizer.name=sgd", "optimizer.momentum=0.9"], 1),
        (["precision.compute=bfloat16", "recompute.mode=full"], 1),
        (["parallel.sequence_parallel=false", "context.split=zigzag"], 1),  # sweeps change sizes alone
    ],
)
def test_what_only_looks_wrong_is_accepted(overrides: list[str], world: int) -> None:
    checked(*overrides, world=world)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer.name=sgd", "optimizer.betas=[0.9,0.99]"], "optimizer.betas"),
        (["optimizer.name=sgd", "optimizer.eps=1e-6"], "optimizer.eps"),
        (["optimizer.momentum=0.9"], "optimizer.momentum"),
        (["schedule.total_steps=50"], "schedule.total_steps"),
        (["schedule.min_lr=1e-5"], "schedule.min_lr"),
        (["schedule.name=cosine", "schedule.decay_steps=5"], "schedule.decay_steps"),
        (["precision.recipe=delayed"], "precision.recipe"),
        (["checkpoint.every=0", "checkpoint.keep=3"], "checkpoint.keep"),
        (["evaluation.batches=3"], "evaluation.batches"),
        (["model.options={a: 1}"], "model.options"),
        (["parallel.expert_axes=[cp]"], "parallel.expert_axes"),
    ],
)
def test_an_idle_key_is_an_error_on_the_command_line_a_notice_in_a_file_and_no_news_as_a_default(
    overrides: list[str], key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert f"command line: {key} has no effect under " in refusal(*overrides)

    *others, idle = overrides
    section, name = key.split(".")
    file = tmp_path_factory.mktemp("idle") / "a.yaml"
    file.write_text(f"extends: {DEBUG}\n\n{section}: {{{name}: {idle.partition('=')[2]}}}\n")
    _, loaded = checked(*others, path=file)
    assert any(notice.startswith(f"{file}:3: {key} has no effect under ") for notice in loaded.notices)

    if loaded.origin(key) != load(DEBUG).origin(key) == "default":
        _, loaded = checked(*others)
        assert not any(f" {key} " in notice for notice in loaded.notices)


def test_resolving_leaves_nothing_to_guess_and_changes_nothing_twice() -> None:
    config = resolve(load(DEBUG, ["model.num_key_value_heads=null", "parallel.tp=2", "schedule.name=wsd"]).config, 8)
    assert (config.parallel.dp, config.parallel.sequence_parallel) == (4, True)
    assert (config.model.num_key_value_heads, config.model.head_dim) == (8, 8)
    assert config.run.dir == "runs/debug"
    assert config.precision.reduce == "float32"
    assert config.schedule.decay_steps == 100
    assert config.parallel.expert_tensor_axes == ("tp",)
    assert resolve(config, 8) == config
    assert resolve(load(DEBUG, ["precision.compute=float64"]).config, 1).precision.reduce == "float64"


def test_every_world_that_is_suggested_runs() -> None:
    sentence = refusal("parallel.tp=4", "parallel.pp=2", "batch.micro_size=1", world=12)
    layouts = re.search(r"cut 12 as (.*)$", sentence)
    assert layouts is not None
    for layout in re.split(r", | or ", layouts[1]):
        checked("batch.micro_size=1", *(f"parallel.{size}" for size in layout.split()), world=12)
    worlds = re.search(r"use (\d+) or (\d+) processes", sentence)
    assert worlds is not None
    for world in worlds.groups():
        checked("parallel.tp=4", "parallel.pp=2", "batch.micro_size=1", world=int(world))


def test_every_value_that_is_suggested_for_tp_works() -> None:
    sentence = refusal("parallel.tp=5", world=5)
    fitting = re.search(r"num_attention_heads=8; use (.*)", sentence)
    assert fitting is not None
    for tp in re.split(r", | or ", fitting[1]):
        checked(f"parallel.tp={tp}", world=int(tp))


def test_the_smallest_world_is_what_the_axes_ask_for() -> None:
    assert smallest_world(load(DEBUG, ["parallel.tp=2", "parallel.pp=4"]).config) == 8
    assert smallest_world(load(DEBUG, ["parallel.tp=2", "parallel.dp=3"]).config) == 6


def test_every_value_says_where_it_came_from() -> None:
    config, loaded = checked("optimizer.lr=1")
    origins = collect.origins(loaded, config)
    assert origins["optimizer.lr"] == "command line"
    assert origins["run.steps"].startswith(f"{DEBUG}:")
    assert origins["parallel.dp"] == origins["model.head_dim"] == origins["run.dir"] == "derived"
    assert origins["observe.console_every"] == "default"


def test_files_are_looked_for_only_by_those_who_will_read_them() -> None:
    loaded = load(DEBUG, ["run.resume=nevr"])
    collect.check(loaded, 1)
    with pytest.raises(Exception, match=r"run\.resume=nevr: there is no such folder; did you mean never\?"):
        collect.check(loaded, 1, files=True)
