"""The ledger's rows and sums, without ranks."""

from __future__ import annotations

import json

import pytest

from ultrascale.comm.ledger import Ledger, ring_bytes


def test_rows_carry_the_phase_in_which_they_were_written() -> None:
    ledger = Ledger()
    with ledger.during("forward"):
        ledger.record(("tp",), "all_reduce", (4,), "float32", 16)
        with ledger.during("loss"):
            ledger.record(("tp",), "all_reduce", (1,), "float32", 4)
        ledger.record(("tp",), "all_gather", (4,), "float32", 8)
    ledger.record(("dp",), "all_reduce", (4,), "float32", 16)
    assert [row.phase for row in ledger.rows] == ["forward", "loss", "forward", ""]


def test_the_phase_ends_when_its_body_fails() -> None:
    ledger = Ledger()
    with pytest.raises(RuntimeError), ledger.during("backward"):
        raise RuntimeError
    assert ledger.phase == ""


def test_sequence_numbers_go_on_after_clearing() -> None:
    ledger = Ledger()
    ledger.record(("tp",), "all_reduce", (4,), "float32", 16)
    ledger.mark("step")
    ledger.clear()
    assert ledger.rows == []
    assert ledger.record(("tp",), "all_reduce", (4,), "float32", 16).sequence == 2


def test_the_summary_counts_calls_and_bytes_and_leaves_marks_out() -> None:
    ledger = Ledger()
    with ledger.during("backward"):
        ledger.record(("dp",), "all_reduce", (4,), "float32", 16)
        ledger.mark("end of backward")
        ledger.record(("dp",), "all_reduce", (8,), "float32", 32)
    ledger.record(("dp",), "all_reduce", (4,), "float32", 16)
    assert json.loads(json.dumps(ledger.summary())) == [
        {"axes": ["dp"], "op": "all_reduce", "phase": "backward", "calls": 2, "bytes": 48},
        {"axes": ["dp"], "op": "all_reduce", "phase": "", "calls": 1, "bytes": 16},
    ]
    assert ledger.rows[1].note == "end of backward"


def test_bytes_are_those_of_the_ring() -> None:
    assert ring_bytes("all_reduce", 1200, 4) == 1800
    assert ring_bytes("all_gather", 1200, 4) == ring_bytes("reduce_scatter", 1200, 4) == 900
    assert ring_bytes("all_to_all", 1200, 4) == 900
    assert ring_bytes("broadcast", 1200, 4) == 1200
    assert ring_bytes("all_reduce", 4, 3) == 6  # 5.33 rounded up
    assert ring_bytes("all_reduce", 1200, 4) == sum(ring_bytes(op, 1200, 4) for op in ("all_to_all", "all_gather"))
