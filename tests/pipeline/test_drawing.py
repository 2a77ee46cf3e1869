"""Pictures and files: every event once, where it belongs; well formed; readable; read back as what they were."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ultrascale.pipeline.actions import Kind, Plan, parse_action
from ultrascale.pipeline.colours import HUES, ink, shade
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.draw import legend, text
from ultrascale.pipeline.draw_html import html
from ultrascale.pipeline.draw_svg import describe, stacked, svg, ticks
from ultrascale.pipeline.export import chrome_trace, csv_text
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import Simulation, simulate
from ultrascale.pipeline.timeline import Timeline, dependencies

SVG = "{http://www.w3.org/2000/svg}"
CASES = [("1f1b", 4, 8), ("interleaved_1f1b", 4, 8), ("zb_v", 4, 8), ("dualpipe", 4, 10), ("1f1b", 20, 40)]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def result(request: pytest.FixtureRequest) -> Simulation:
    name, ranks, micro_batches = request.param
    return simulate(registry.build(name, ranks, micro_batches), Costs(1, 1, 1, 0.25))


def parts(timeline: Timeline) -> int:
    return sum(len(event.action.computes) for event in timeline.events())


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def test_svg_draws_every_event_once_where_it_belongs(result: Simulation) -> None:
    timeline = result.timeline()
    root = ElementTree.fromstring(svg(timeline))
    groups = [group for group in root.iter(f"{SVG}g") if group.get("class") == "event"]
    titles = Counter(group.findtext(f"{SVG}title") for group in groups)
    assert titles == Counter(describe(timeline, event) for event in timeline.events())
    assert set(titles.values()) == {1}
    # One scale for all, rank by rank downwards, and inside the picture.
    boxes = [(group, box) for group in groups for box in group.iter(f"{SVG}rect")]
    assert len(boxes) == parts(timeline)
    for event, group in zip(timeline.events(), groups, strict=True):
        first = next(group.iter(f"{SVG}rect"))
        scale = (number(root, "width") - 64 - 24) / timeline.makespan
        assert number(first, "x") == pytest.approx(64 + float(event.start) * scale, abs=1)
        assert number(first, "width") == pytest.approx(float(event.end - event.start) * scale, abs=1)
    tops = {event.rank: number(next(group.iter(f"{SVG}rect")), "y") for event, group in zip(timeline.events(), groups)}
    assert list(tops.values()) == sorted(set(tops.values()))
    for _, box in boxes:
        assert number(box, "x") + number(box, "width") <= number(root, "width")
        assert number(box, "y") + number(box, "height") <= number(root, "height")


def test_svg_text_stays_inside_the_picture_and_its_box(result: Simulation) -> None:
    root = ElementTree.fromstring(svg(result.timeline()))
    for element in root.iter(f"{SVG}text"):
        words, size = element.text or "", number(element, "font-size")
        assert size >= 9
        width = 0.62 * size * len(words)
        anchor = element.get("text-anchor", "start")
        left = number(element, "x") - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0
        assert left + width <= number(root, "width") + 8 or element.get("font-weight") == "bold"
        assert number(element, "y") < number(root, "height")
    for group in root.iter(f"{SVG}g"):
        for box, label in zip(group.findall(f"{SVG}rect"), group.findall(f"{SVG}text"), strict=False):
            if len(group.findall(f"{SVG}text")) == len(group.findall(f"{SVG}rect")):
                assert len(label.text or "") * 0.55 * number(label, "font-size") <= number(box, "width")


def test_pictures_below_each_other_have_one_scale() -> None:
    short, long = (simulate(registry.build("1f1b", 2, m)).timeline() for m in (4, 12))
    root = ElementTree.fromstring(stacked([short, long], "two <of> them"))
    widths = {
        round(number(box, "width"))
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "event"
        for box in group.iter(f"{SVG}rect")
        if group.findtext(f"{SVG}title", "").startswith("F")
    }
    assert len(widths) == 1
    assert root.findtext(f"{SVG}title") == "two <of> them"


class Page(HTMLParser):
    """Refuses tags that are not closed in order; keeps what stands in scripts, and whatever would be loaded."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)
            if tag == "script":
                self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def test_html_page_is_whole_and_holds_every_event_once(result: Simulation) -> None:
    timeline = result.timeline()
    content = html(timeline, result.critical_path)
    page = Page(content)
    assert page.loaded == []
    assert not re.search(r"@import|url\(|fetch\(|https?://", content)
    data = json.loads(page.scripts[0])
    names = Counter(
        (rank, start, end, tuple(f"{kind}{stage}.{number}" for kind, stage, number, _ in found))
        for rank, start, end, found in data["events"]
    )
    assert names == Counter(
        (event.rank, event.start, event.end, tuple(map(str, event.action.computes))) for event in timeline.events()
    )
    events = list(timeline.events())
    pairs = Counter((str(events[a].action), str(events[b].action)) for a, b in data["needs"])
    assert pairs == Counter((str(a.action), str(b.action)) for a, b in dependencies(timeline.rows))
    assert [events[index] for index in data["critical"]] == list(result.critical_path)


def test_dependencies_are_those_of_the_model() -> None:
    result = simulate(registry.build("zb_h1", 2, 1))
    pairs = {(str(a.action), str(b.action)) for a, b in dependencies(result.events)}
    assert pairs == {
        *(("F0.0", "F1.0"), ("F1.0", "BI1.0"), ("BI1.0", "BI0.0"), ("F0.0", "BI0.0")),
        *(("BI0.0", "BW0.0"), ("BI1.0", "BW1.0")),
    }


def test_csv_is_the_plan_again(result: Simulation) -> None:
    rows = csv.reader(io.StringIO(csv_text(result.plan)))
    assert tuple(tuple(map(parse_action, row)) for row in rows) == result.plan.actions


def test_trace_has_a_slice_per_event_and_an_arrow_per_message(result: Simulation) -> None:
    timeline = result.timeline()
    records = json.loads(chrome_trace(timeline))["traceEvents"]
    slices = [record for record in records if record["ph"] == "X"]
    assert Counter((r["tid"], r["name"], round(r["ts"]), round(r["dur"])) for r in slices) == Counter(
        (e.rank, str(e.action), round(1000 * e.start), round(1000 * (e.end - e.start))) for e in timeline.events()
    )
    starts = {record["id"]: record for record in records if record["ph"] == "s"}
    ends = {record["id"]: record for record in records if record["ph"] == "f"}
    apart = [pair for pair in dependencies(timeline.rows) if pair[0].rank != pair[1].rank]
    assert starts.keys() == ends.keys()
    assert len(starts) == len(apart)
    for identity, leaves in starts.items():
        arrives = ends[identity]
        assert leaves["tid"] != arrives["tid"]
        assert leaves["ts"] < arrives["ts"]
        assert any(s["tid"] == leaves["tid"] and s["ts"] < leaves["ts"] < s["ts"] + s["dur"] for s in slices)
        assert any(s["tid"] == arrives["tid"] and s["ts"] == arrives["ts"] for s in slices)
    assert {r["args"]["name"] for r in records if r["name"] == "thread_name"} == {
        f"rank {rank}" for rank in range(timeline.ranks)
    }


def test_directions_and_virtual_stages_are_told_apart() -> None:
    timeline = simulate(registry.build("dualpipe", 4, 8)).timeline()
    assert timeline.two_directions
    for event in timeline.events():
        for part in event.action.computes:
            assert timeline.variant(event.rank, part) == (part.micro_batch >= 4)
    lines = text(timeline, 200).splitlines()
    assert lines[0].startswith("rank 0 |F0-F1-F2-f4-")
    assert lines[3].startswith("rank 3 |f4-f5-f6-F0-")
    assert "small letters second direction" in legend(timeline)

    loop = simulate(registry.build("interleaved_1f1b", 2, 4)).timeline()
    assert {loop.variant(e.rank, e.action) == e.action.stage // 2 for e in loop.events()} == {True}
    assert "small letters" not in legend(simulate(registry.build("1f1b", 2, 4)).timeline())


@pytest.mark.parametrize("variants", [1, 2, 3, 8])
def test_numbers_are_read_on_every_shade(variants: int) -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for kind in HUES:
        shades = [shade(kind, variant, variants) for variant in range(variants)]
        assert len(set(shades)) == variants
        for colour in shades:
            darker, lighter = sorted((luminance(colour), luminance(ink(colour))))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (kind, colour)  # WCAG 2, level AA


def test_axis_has_round_numbers_and_ends_inside() -> None:
    assert ticks(33, 5) == [0, 10, 20, 30]
    assert ticks(0.0172, 6) == pytest.approx([0, 0.005, 0.01, 0.015])
    for length in (1e-6, 0.3, 7, 1e6):
        assert 2 <= len(ticks(length, 6)) <= 7
        assert ticks(length, 6)[-1] <= length * (1 + 1e-6)


def test_a_plan_without_time_or_actions_is_drawn_without_failing() -> None:
    nothing = simulate(registry.build("1f1b", 2, 2), Costs(0, 0, 0))
    ElementTree.fromstring(svg(nothing.timeline()))
    Page(html(nothing.timeline(), nothing.critical_path))
    idle = Plan("half idle", ((0,),), 1, ((parse_action("F0.0"), parse_action("B0.0")), ()))
    timeline = simulate(idle).timeline()
    assert timeline.kinds() == (Kind.F, Kind.B)
    for drawn in (svg(timeline), html(timeline), chrome_trace(timeline), text(timeline)):
        assert "rank 1" in drawn or '"ranks":2' in drawn


def test_the_page_cannot_be_broken_out_of(tmp_path: Path) -> None:
    plan = Plan("</script><b>&'\"", ((0,),), 1, ((parse_action("F0.0"), parse_action("B0.0")),))
    timeline = simulate(plan).timeline()
    assert len(Page(html(timeline)).scripts) == 2
    assert ElementTree.fromstring(svg(timeline)).findtext(f"{SVG}title") == timeline.title
