"""The text form of actions, and what their fields may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.pipeline.actions import (
    COMPUTE,
    MESSAGES,
    WHOLE_STEP,
    Action,
    Kind,
    Message,
    ScheduleError,
    forward,
    pair,
    parse_action,
)

NUMBERS = st.integers(0, 10_000)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(Kind))
    stage, micro_batch = draw(NUMBERS), draw(NUMBERS)
    if kind is Kind.FB:
        second = Action(draw(st.sampled_from([Kind.B, Kind.BI])), draw(NUMBERS), draw(NUMBERS))
        return pair(forward(stage, micro_batch), second)
    if kind in MESSAGES:
        return Action(kind, stage, micro_batch, peer=draw(NUMBERS))
    if kind not in COMPUTE:
        return Action(kind, stage, draw(st.sampled_from([WHOLE_STEP, micro_batch])))
    return Action(kind, stage, micro_batch)


@settings(max_examples=200, deadline=None)
@given(actions())
def test_text_of_every_action_reads_back_as_the_same_action(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F0", "F0.", "F0.3xyz", "F0.3 ", "F-1.3", "F0.-3", "F٣.3", "X0.3", "REDUCE"),
        *("B0.3>1", "SEND_F0.3", "SEND_F0.3<1", "RECV_F0.3>1"),
        *("FB(F0.3)", "FB(B0.3,F0.3)", "FB(F0.3,BW0.3)", "FB(FB(F0.0,B0.0),B0.1)"),
    ],
)
def test_text_that_is_not_quite_an_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_action(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": Kind.SEND_F, "stage": 0, "micro_batch": 0},
        {"kind": Kind.F, "stage": 0, "micro_batch": 0, "peer": 1},
        {"kind": Kind.F, "stage": 0},
        {"kind": Kind.FB, "stage": 0, "micro_batch": 0},
        {"kind": Kind.F, "stage": 0, "micro_batch": 0, "parts": (forward(0, 0),)},
        {"kind": Kind.FB, "stage": 1, "micro_batch": 0, "parts": (forward(0, 0), parse_action("B0.1"))},
    ],
)
def test_fields_that_do_not_fit_the_kind_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ScheduleError):
        Action(**fields)  # type: ignore[arg-type]


def test_both_ends_of_a_message_name_the_same_one() -> None:
    assert parse_action("SEND_F2.7>3").message == parse_action("RECV_F3.7<2").message
    assert parse_action("SEND_B3.7>2").message == parse_action("RECV_B2.7<3").message
    assert parse_action("SEND_F2.7>3").message != parse_action("RECV_B2.7<3").message


def test_tags_of_a_step_are_all_different() -> None:
    messages = [
        Message(payload, boundary, micro_batch)
        for payload in ("activation", "gradient")
        for boundary in range(5)
        for micro_batch in range(7)
    ]
    assert len({message.tag(7) for message in messages}) == len(messages)
