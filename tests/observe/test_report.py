"""`ultrascale report`: one page that stands alone, whatever the run has written so far."""

from __future__ import annotations

import argparse
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from recorded_run import metrics, write_manifest, write_run, write_timelines
from ultrascale.observe import commands
from ultrascale.observe.chart import WIDTH, line_chart, nice_ticks, number, thinned
from ultrascale.observe.report import STRAGGLER
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.schedules import registry


class Page(HTMLParser):
    """Refuses tags that are not closed in order; counts them, and keeps the text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += attrs

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


def report(folder: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    return commands.run(parser.parse_args([str(folder), *words]))


def page_of(folder: Path) -> Page:
    assert report(folder) == 0
    content = (folder / "report.html").read_text()
    page = Page(content)
    assert not {name for name, _ in page.attributes} & {"src", "href", "onload"}
    assert "script" not in page.tags
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", content)
    return page


def with_pipeline(folder: Path, name: str = "1f1b", replicas: int = 1) -> None:
    plan = registry.build(name, 2, 4)
    write_manifest(folder, plan, replicas)
    write_timelines(folder, plan, Costs(F=0.001, BI=0.002, BW=0.001), replicas=replicas)


def test_page_shows_curves_pipeline_memory_traffic_and_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    with_pipeline(tmp_path)
    page = page_of(tmp_path)
    assert page.tags.count("svg") == 5 + 1 + 2  # curves (no MFU: it is null), memory, two timelines
    for words in ("finished, step 5", "pp 2 × dp 1 = 2 ranks on 1 host", "1,234", "1f1b, 2 stages, 4 micro-batches"):
        assert words in page.text
    assert "Measured 0.02 s, predicted 0.02 s:  1.000  of the prediction" in page.text
    for words in ("3 GiB", "3 MiB", "75.0%", "all_reduce", "<script>alert(1)</script>"):
        assert words in page.text
    assert page.text.count("as it ran") == 2  # in the head and in the title of the picture


def test_a_run_without_a_timeline_that_goes_on_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3, state="running")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(metrics(4))[:30])
    page = page_of(tmp_path)
    assert "running, step 3" in page.text
    assert "profile.timeline=true" in page.text
    assert page.tags.count("svg") == 6


def test_a_run_that_has_only_begun_is_reported(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "starting", "step": 0}')
    page = page_of(tmp_path)
    assert "starting, step 0" in page.text
    assert "No step has been logged yet." in page.text
    assert "svg" not in page.tags


def test_json_has_the_numbers_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with_pipeline(tmp_path, "zb_h1")
    assert report(tmp_path, "--json", "--out", str(tmp_path / "r.html")) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["state"] == "finished"
    assert output["last"]["loss"] == 1.0
    assert output["timeline"]["measured_over_predicted"] == pytest.approx(1)
    assert output["timeline"]["measured_makespan_s"] == pytest.approx(0.018)
    assert output["timeline"]["busy_s"] == pytest.approx({"0": 0.016, "1": 0.016})
    assert output["peak_bytes"] == [{"peak": 3 << 30}, {"peak": 7}]
    assert output["out"] == str(tmp_path / "r.html")
    assert (tmp_path / "r.html").exists()


def test_time_that_no_action_takes_is_in_the_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with_pipeline(tmp_path)
    path = tmp_path / "timeline-0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if (record["kind"], record["micro_batch"]) == ("B", 3):  # the last: a pause of 10 ms before it
            record["start"] = record["end"] + 0.007
            record["end"] += 0.010
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert report(tmp_path, "--json") == 0
    timeline = json.loads(capsys.readouterr().out)["timeline"]
    assert timeline["predicted_makespan_s"] == pytest.approx(0.020)
    assert timeline["measured_makespan_s"] == pytest.approx(0.030)
    assert timeline["measured_over_predicted"] == pytest.approx(1.5)


def test_a_rank_that_is_slower_than_its_peers_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path)
    with_pipeline(tmp_path, replicas=3)
    assert page_of(tmp_path).attributes.count(("class", "mark")) == 0
    path = tmp_path / "timeline-1.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["kind"] == "F":
            record["start"] -= 0.001 * (STRAGGLER - 0.99) * 100
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert page_of(tmp_path).attributes.count(("class", "mark")) == 1


def test_a_step_with_too_many_actions_is_not_drawn_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    with_pipeline(tmp_path)
    monkeypatch.setattr("ultrascale.observe.report.MAX_DRAWN", 15)
    page = page_of(tmp_path)
    assert page.tags.count("svg") == 6
    assert "--timeline F.html" in page.text


def test_the_recorded_timeline_is_written_as_a_page_and_as_a_trace(tmp_path: Path) -> None:
    write_run(tmp_path)
    with_pipeline(tmp_path)
    page, trace = tmp_path / "t.html", tmp_path / "t.json"
    assert report(tmp_path, "--timeline", str(page), "--trace", str(trace)) == 0
    assert "as it ran" in page.read_text()
    slices = [record for record in json.loads(trace.read_text())["traceEvents"] if record["ph"] == "X"]
    assert len(slices) == 16
    assert max(record["ts"] + record["dur"] for record in slices) == pytest.approx(20_000)  # µs


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (False, [], "is not the folder of a run: it has no status.json"),
        (True, ["--timeline", "t.html"], "has no recorded timeline; train with profile.timeline=true"),
        (True, ["--out", "no/such/folder/r.html"], "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    tmp_path: Path, make: bool, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if make:
        write_run(tmp_path)
    assert report(tmp_path, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_charts_keep_every_spike_of_long_runs() -> None:
    points = [(float(step), 1.0) for step in range(100_000)]
    points[54_321] = (54_321.0, 9.0)
    kept = thinned(points)
    assert len(kept) <= 1000
    assert kept == sorted(kept)
    assert (54_321.0, 9.0) in kept
    assert {points[0], points[-1]} & set(kept)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.0012, 0.0019), (5, 5), (0, 0), (1e9, 3e9), (-2, -2)])
def test_axes_have_round_numbers_around_everything(low: float, high: float) -> None:
    found = nice_ticks(low, high, 5)
    assert 2 <= len(found) <= 12
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    assert len({round((b - a) / (found[1] - found[0]), 6) for a, b in pairwise(found)}) == 1


def test_chart_stays_in_its_frame_and_says_its_values() -> None:
    svg = line_chart("a < b", {"x": [(1, 2.0), (2, 1e6), (3, -4.0)], "empty": []})
    places = [float(x) for x in re.findall(r"cx='([\d.]+)'", svg)]
    assert len(places) == 3
    assert min(places) > 0
    assert max(places) < WIDTH
    assert "a &lt; b" in svg
    assert "x 1e+06, step 2" in svg
    assert line_chart("nothing", {"x": []}) == ""
    assert [number(value) for value in (12_345, 3e-5, 0, 2.5e9)] == ["12.35k", "3e-05", "0", "2.5G"]
