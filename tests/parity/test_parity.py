"""Every layout gives the losses, gradients, norms and weights of one process."""

from __future__ import annotations

import context
import faults
import mla
import moe
import mtp
import pytest
import schedules
import zero
from cells import Cell, ParityError, check

SP = {"parallel.sequence_parallel": True}
NO_SP = {"parallel.sequence_parallel": False}


TIED = {"model.tie_word_embeddings": True}
CELLS = [
    # micro-batch splits alone
    Cell(1),
    Cell(1, {"batch.micro_size": 4, "recompute.mode": "full"}),
    Cell(1, {"batch.micro_size": 8, "recompute.mode": "selective", **TIED}),
    # tensor and sequence parallel, replicated KV heads at tp=4
    Cell(2, {"parallel.tp": 2, **SP}),
    Cell(2, {"parallel.tp": 2, **NO_SP, **TIED}),
    Cell(4, {"parallel.tp": 4, **SP, "batch.micro_size": 4}),
    Cell(4, {"parallel.tp": 4, **NO_SP, "recompute.mode": "full", "batch.micro_size": 8}),
    Cell(2, {"parallel.tp": 2, **SP, "recompute.mode": "selective", "model.num_key_value_heads": 4}),
    Cell(2, {"parallel.tp": 2, **SP, "recompute.mode": "full", "model.vocab_size": 257, **TIED}),
    # data parallel
    Cell(2, {"parallel.dp": 2}),
    Cell(4, {"parallel.dp": 4, **TIED}),
    Cell(2, {"parallel.dp": 2, "parallel.bucket_bytes": 1, "parallel.deterministic_reduction": False}),
    # pipeline
    Cell(2, {"parallel.pp": 2, "pipeline.schedule": "1f1b", "batch.micro_size": 1, **TIED}),
    Cell(2, {"parallel.pp": 2, "pipeline.schedule": "gpipe"}),
    Cell(4, {"parallel.pp": 4, "pipeline.schedule": "1f1b", "recompute.mode": "full"}),
    Cell(4, {"parallel.pp": 4, "pipeline.schedule": "gpipe", **TIED}),
    Cell(2, {"parallel.pp": 2, "pipeline.layout": (3, 1), "batch.micro_size": 4, **TIED}),
    Cell(4, {"parallel.pp": 4, "pipeline.layout": (0, 2, 2, 0), **TIED}),
    Cell(2, {"parallel.pp": 2, "model.num_hidden_layers": 3, "batch.micro_size": 8}),
    # mixes
    Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **SP, **TIED}),
    Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **NO_SP, "batch.micro_size": 1}),
    Cell(4, {"parallel.tp": 2, "parallel.pp": 2, **SP, **TIED, "pipeline.layout": (1, 3)}),
    Cell(4, {"parallel.tp": 2, "parallel.pp": 2, **NO_SP, "pipeline.schedule": "gpipe"}),
    Cell(4, {"parallel.dp": 2, "parallel.pp": 2, **TIED}),
    Cell(4, {"parallel.dp": 2, "parallel.pp": 2, "recompute.mode": "selective", "batch.micro_size": 1}),
    Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **SP, "parallel.order": ("tp", "cp", "ep", "dp", "pp")}),
    Cell(8, {"parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 2, **SP, **TIED}),
]


QWEN3 = {"model.family": "qwen3", "model.head_dim": 12}
CELLS += [
    Cell(4, {"parallel.tp": 4, **NO_SP, **QWEN3}),  # one KV head on two ranks, and norms over heads on all
    Cell(4, {"parallel.tp": 2, "parallel.cp": 2, **SP, **QWEN3, "recompute.mode": "selective"}),
    Cell(
        4, {"parallel.pp": 2, "parallel.dp": 2, "pipeline.schedule": "zb_v", "parallel.zero_stage": 3, **QWEN3, **TIED}
    ),
]

held: set[str] = set()
"""Cells that were found equal to one process."""


def holds(cell: Cell) -> None:
    """Checks a cell once: several faults have the same control."""
    if str(cell) not in held:
        check(cell)
        held.add(str(cell))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_layout_equals_one_process(cell: Cell) -> None:
    holds(cell)


@pytest.mark.parametrize("cell", schedules.cover(), ids=str)
def test_schedule_equals_one_process(cell: Cell) -> None:
    check(cell)


EXTRA = {"model.family": "extra_terms:Extra"}


@pytest.mark.parametrize(
    "cell",
    [
        Cell(2, {"parallel.pp": 2, "pipeline.schedule": "1f1b", **EXTRA}),
        Cell(2, {"parallel.pp": 2, "pipeline.schedule": "zb_v", **EXTRA, **TIED}),
        Cell(4, {"parallel.pp": 4, "pipeline.schedule": "dualpipe", "batch.micro_size": 1, **EXTRA}),
        Cell(4, {"parallel.dp": 2, "parallel.pp": 2, "parallel.zero_stage": 3, **EXTRA}),
    ],
    ids=str,
)
def test_terms_of_any_stage_are_part_of_the_objective(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("cell", zero.cover(), ids=str)
def test_zero_stage_equals_one_process(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("cell", context.cover(), ids=str)
def test_context_parallelism_equals_one_process(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("cell", moe.cover(), ids=str)
def test_experts_equal_one_process(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("cell", mla.cover(), ids=str)
def test_latent_attention_equals_one_process(cell: Cell) -> None:
    holds(cell)


@pytest.mark.parametrize("cell", mtp.cover(), ids=str)
def test_multi_token_prediction_equals_one_process(cell: Cell) -> None:
    holds(cell)


DP2 = Cell(2, {"parallel.dp": 2})
TP2_SP = Cell(2, {"parallel.tp": 2, **SP})
TP2_ONE_KV_HEAD = Cell(2, {"parallel.tp": 2, **NO_SP, "model.num_key_value_heads": 1})  # on both ranks
PP2_TIED = Cell(2, {"parallel.pp": 2, **TIED})
ZERO1, ZERO2, ZERO3 = (zero.cell(stage, 2, {"parallel.dp": 2, "batch.micro_size": 1}) for stage in (1, 2, 3))
HYBRID = zero.cell(1, 4, {"parallel.dp": 4, "batch.micro_size": 1}, zero.HYBRID)
ZB_V = Cell(2, {"parallel.pp": 2, "pipeline.schedule": "zb_v"})
DUALPIPE = Cell(2, {"parallel.pp": 2, "pipeline.schedule": "dualpipe", **TIED})
EP2, MOE_TP2 = moe.cell(moe.QWEN3, {"ep": 2}), moe.cell(moe.QWEN3, {"tp": 2}, moe.SP)
EP2_GATHER = moe.cell(moe.QWEN3, {"ep": 2}, moe.GATHER)
RING2, RING4 = context.cell("ring", 2), context.cell("ring", 4)
MTP_PP2, MTP_CP2 = mtp.cell(mtp.pp("1f1b")), mtp.cell(mtp.cp("ring"), mtp.tp(mtp.SP), context.DOCUMENTS)
MLA_SP, MLA_NO_SP = (mla.cell(mla.tp(2, form)) for form in (mla.SP, mla.NO_SP))
FAULTS = [
    ("experts_are_summed_over_all_replicas_of_dense_layers", EP2, r"gradients of .*experts"),
    ("routers_are_taken_for_replicated_over_tp", MOE_TP2, r"gradients of .*router"),
    ("outputs_of_experts_are_not_weighted", EP2, r"gradients of \w"),
    ("balance_counts_only_tokens_of_this_rank", MOE_TP2, r"gradients of \w"),
    ("auxiliary_terms_are_scaled_by_the_number_of_ranks", MOE_TP2, r"gradients of \w"),
    ("rows_come_back_in_the_order_of_experts", EP2, r"gradients of \w"),
    (
        "tokens_are_counted_again_when_recomputed",
        moe.cell(moe.QWEN3, {"ep": 2}, moe.BIASED, moe.FULL),
        r"weights of \w",
    ),
    ("routers_are_balanced_by_local_counts", moe.cell(moe.QWEN3, {"ep": 2}, moe.BIASED), r"weights of .*router\.bias"),
    ("biases_are_held_in_bfloat16", moe.cell(moe.QWEN3, {"ep": 2}, moe.BIASED), r"weights of \w"),
    ("routers_are_balanced_by_local_counts", moe.cell(moe.QWEN3, {"ep": 2}, moe.OF_BATCH), r"weights of router\.load"),
    ("outputs_of_other_ranks_experts_are_left_out", EP2_GATHER, r"gradients of \w"),
    ("gradients_of_gathered_tokens_are_not_summed", EP2_GATHER, r"gradients of \w"),
    ("room_of_experts_is_counted_by_rank", moe.cell(moe.QWEN3, {"tp": 2}, moe.NO_SP, moe.DROPS), r"gradients of \w"),
    ("places_are_those_in_memory", moe.cell(moe.QWEN3, {"cp": 2}, moe.DROPS), r"gradients of \w"),
    ("noise_is_drawn_by_row_of_the_micro_batch", moe.cell(moe.QWEN3, {"ep": 2}, moe.NOISY), r"gradients of \w"),
    ("gradients_are_not_summed_over_cp", RING2, r"gradients of \w"),
    ("parts_of_attention_are_averaged", RING2, r"gradients of \w"),
    ("gradients_of_keys_do_not_come_home", RING2, r"gradients of .*[kv]_proj\.weight"),
    ("a_blocks_gradient_is_overwritten_on_its_way", RING4, r"gradients of .*[kv]_proj\.weight"),
    ("documents_are_ignored_by_attention", context.cell("ring", 2, context.DOCUMENTS), r"gradients of \w"),
    ("windows_are_ignored_by_attention", context.cell("ulysses", 2, context.WINDOW), r"gradients of \w"),
    ("masks_are_those_of_another_split", context.cell("allgather", 2), r"gradients of \w"),
    (
        "copies_of_a_key_head_keep_their_own_gradients",
        context.cell("ulysses", 2, {"model.num_key_value_heads": 1}),
        r"gradients of .*[kv]_proj\.weight",
    ),
    ("positions_restart_at_the_cut", RING2, r"gradients of \w"),
    ("each_cut_loses_a_target", RING2, r"gradients of \w"),
    ("tensor_sums_are_skipped", TP2_SP, r"gradients of .*norm\.weight"),
    ("tensor_sums_are_skipped", TP2_ONE_KV_HEAD, r"gradients of .*[kv]_proj\.weight"),
    ("batch_sums_are_doubled", DP2, r"gradients of \w"),
    ("batch_sums_are_averages", DP2, r"gradients of \w"),
    (
        "batches_are_summed_over_the_wrong_group",
        Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **SP}),
        r"gradients of \w",
    ),
    ("ties_are_forgotten", PP2_TIED, r"gradients of embed_tokens\.weight"),
    ("micro_batches_overwrite_a_shards_gradient", ZERO2, r"gradients of \w"),
    ("copies_of_a_shard_are_not_summed", HYBRID, r"gradients of \w"),
    ("weights_are_not_gathered_after_a_step", ZERO1, r"weights of \w"),
    ("weights_of_the_wrong_shard_are_gathered", ZERO3, r"gradients of \w"),
    ("second_copies_keep_their_own_gradients", DUALPIPE, r"gradients of layers\.\d"),
    ("deferred_weight_gradients_of_a_micro_batch_are_lost", ZB_V, r"gradients of \w"),
    ("deferred_weight_gradients_belong_to_the_stage_alone", ZB_V, r"gradients of .*_proj\.weight"),
    ("second_use_of_a_tied_parameter_overwrites_the_first", Cell(1, TIED), r"gradients of embed_tokens\.weight"),
    ("last_micro_batch_is_dropped", DP2, r"gradients of \w"),
    ("denominators_are_local", DP2, r"gradients of \w"),
    ("labels_are_shifted_after_the_cut", DP2, r"gradients of \w"),
    ("layers_are_numbered_within_the_stage", PP2_TIED, r"gradients of \w"),
    ("input_gradients_are_not_summed_over_tp", Cell(2, {"parallel.tp": 2, **NO_SP}), r"gradients of \w"),
    ("gradients_between_stages_are_doubled", PP2_TIED, r"gradients of \w"),
    ("replicated_parameters_count_twice_in_the_norm", TP2_SP, r"norm of step 1"),
    ("weights_are_updated_by_local_gradients_on_one_rank", DP2, r"weights of \w"),
    ("gradients_of_the_shared_key_are_not_summed", MLA_SP, r"gradients of .*kv_a_proj_with_mqa\.weight"),
    ("gradients_of_the_shared_key_are_not_summed", MLA_NO_SP, r"gradients of .*kv_a_proj_with_mqa\.weight"),
    ("gradients_of_latents_are_not_summed", MLA_NO_SP, r"gradients of .*_a_(proj|layernorm)"),
    ("weights_that_make_latents_keep_their_own_tokens_gradients", MLA_SP, r"gradients of .*_a_proj"),
    ("ties_are_forgotten", MTP_PP2, r"gradients of embed_tokens\.weight"),
    ("second_use_of_a_tied_parameter_overwrites_the_first", mtp.cell(mtp.FULL), r"gradients of embed_tokens\.weight"),
    ("depths_are_numbered_backwards_under_a_pipeline", MTP_PP2, r"gradients of \w"),
    ("tokens_ahead_are_read_from_this_ranks_own", MTP_CP2, r"gradients of \w"),
    ("losses_of_further_tokens_are_divided_by_local_counts", MTP_CP2, r"gradients of \w"),
    ("projections_are_taken_for_used_alike_over_tp", MTP_CP2, r"gradients of mtp\.\d\.eh_proj\.weight"),
    (
        "pieces_of_matrices_are_made_orthogonal",
        Cell(2, {"parallel.tp": 2, **SP, "optimizer.name": "muon"}),
        r"weights of \w",
    ),
]


@pytest.mark.parametrize(("fault", "cell", "named"), FAULTS, ids=str)
def test_seeded_fault_is_seen(fault: str, cell: Cell, named: str) -> None:
    holds(cell)  # the control: green without the fault
    with pytest.raises(ParityError, match=named):
        check(cell, fault)


def test_every_seeded_fault_is_tried() -> None:
    assert {fault for fault, _, _ in FAULTS} == set(faults.FAULTS)
