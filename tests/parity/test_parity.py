"""Every layout gives the losses, gradients, norms and weights of one process."""

from __future__ import annotations

import pytest
from cells import Cell, ParityError, check

SP = {"parallel.sequence_parallel": True}
NO_SP = {"parallel.sequence_parallel": False}


TIED = {"model.tie_word_embeddings": True}
CELLS = [
    # micro-batch splits alone
    Cell(1, {"batch.micro_size": 2}),
    Cell(1, {"batch.micro_size": 4, "recompute.mode": "full"}),
    Cell(1, {"batch.micro_size": 8, "recompute.mode": "selective", **TIED}),
    # tensor and sequence parallel, replicated KV heads at tp=4
    Cell(2, {"parallel.tp": 2, **SP}),
    Cell(2, {"parallel.tp": 2, **NO_SP, **TIED}),
    Cell(4, {"parallel.tp": 4, **SP, "batch.micro_size": 2}),
    Cell(4, {"parallel.tp": 4, **NO_SP, "recompute.mode": "full"}),
    Cell(2, {"parallel.tp": 2, **SP, "recompute.mode": "selective", "model.num_key_value_heads": 4}),
    Cell(2, {"parallel.tp": 2, **SP, "recompute.mode": "full", "model.vocab_size": 257, **TIED}),
    # data parallel
    Cell(2, {"parallel.dp": 2}),
    Cell(4, {"parallel.dp": 4, "batch.micro_size": 2, **TIED}),
    Cell(2, {"parallel.dp": 2, "parallel.bucket_bytes": 1, "parallel.deterministic_reduction": False}),
    # pipeline
    Cell(2, {"parallel.pp": 2, "pipeline.schedule": "1f1b", **TIED}),
    Cell(2, {"parallel.pp": 2, "pipeline.schedule": "gpipe", "batch.micro_size": 2}),
    Cell(4, {"parallel.pp": 4, "pipeline.schedule": "1f1b", "recompute.mode": "full"}),
    Cell(4, {"parallel.pp": 4, "pipeline.schedule": "gpipe", **TIED}),
    Cell(2, {"parallel.pp": 2, "pipeline.layout": (3, 1), "batch.micro_size": 4, **TIED}),
    Cell(4, {"parallel.pp": 4, "pipeline.layout": (0, 2, 2, 0), **TIED}),
    Cell(2, {"parallel.pp": 2, "model.num_hidden_layers": 3, "batch.micro_size": 8}),
    # mixes
    Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **SP, **TIED}),
    Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **NO_SP, "batch.micro_size": 2}),
    Cell(4, {"parallel.tp": 2, "parallel.pp": 2, **SP, **TIED, "pipeline.layout": (1, 3)}),
    Cell(4, {"parallel.tp": 2, "parallel.pp": 2, **NO_SP, "pipeline.schedule": "gpipe"}),
    Cell(4, {"parallel.dp": 2, "parallel.pp": 2, **TIED}),
    Cell(4, {"parallel.dp": 2, "parallel.pp": 2, "recompute.mode": "selective", "batch.micro_size": 2}),
    Cell(4, {"parallel.tp": 2, "parallel.dp": 2, **SP, "parallel.order": ("tp", "cp", "ep", "dp", "pp")}),
    Cell(8, {"parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 2, **SP, **TIED}),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_layout_equals_one_process(cell: Cell) -> None:
    check(cell)


FAULTS = [
    ("tensor_sums_are_skipped", Cell(2, {"parallel.tp": 2, **SP})),
    ("tensor_sums_are_skipped", Cell(4, {"parallel.tp": 4, **NO_SP})),
    ("batch_sums_are_doubled", Cell(2, {"parallel.dp": 2})),
    ("batch_sums_are_averages", Cell(2, {"parallel.dp": 2})),
    ("ties_are_forgotten", Cell(2, {"parallel.pp": 2, **TIED})),
]


@pytest.mark.parametrize(("fault", "cell"), FAULTS, ids=str)
def test_seeded_fault_is_seen(fault: str, cell: Cell) -> None:
    check(cell)  # the control: green without the fault
    with pytest.raises(ParityError, match=r"gradients of \w"):
        check(cell, fault)
