"""Runs of a flat bucket hold what was chosen, whole, and nothing that was not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ultrascale.parallel.buckets import ALIGNMENT, Span, runs
from ultrascale.parallel.layout import Constant, Kind, Layout, Use


def layout(name: str) -> Layout:
    one, plain = (1,), Constant(0.0)
    return Layout(name, one, {}, Use.WHOLE, None, plain, decay=True, lr_scale=1.0, pad_to={}, kind=Kind.NORM)


# Tensors of one or several members, many of them smaller than the alignment.
tensors = st.lists(st.lists(st.integers(1, 2 * ALIGNMENT), min_size=1, max_size=3), min_size=1, max_size=8)


@given(tensors, st.integers(0, 2**24 - 1))
def test_a_run_never_holds_an_element_of_a_span_that_was_not_chosen(sizes: list[list[int]], choice: int) -> None:
    spans: list[Span] = []
    start = 0
    for members in sizes:
        for size in members:
            spans.append(Span(layout(str(len(spans))), start, start + size, (size,)))
            start += size
        start = -(-start // ALIGNMENT) * ALIGNMENT
    chosen = {span.layout.name for number, span in enumerate(spans) if choice >> number & 1}
    owner = {i: span.layout.name for span in spans for i in range(span.start, span.stop)}
    found: list[str] = []
    for begin, end in runs(spans, lambda span: span.layout.name in chosen):
        found += [owner[i] for i in range(begin, end) if i in owner]
    wanted = [span for span in spans if span.layout.name in chosen]
    assert found == [span.layout.name for span in wanted for _ in range(span.stop - span.start)]
