"""What a run recorded of its pipeline gives its costs and its timeline back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from recorded_run import write_manifest, write_timelines
from ultrascale.pipeline import command
from ultrascale.pipeline.actions import Plan, ScheduleError
from ultrascale.pipeline.costs import Costs
from ultrascale.pipeline.recording import load, measured_costs
from ultrascale.pipeline.schedules import registry
from ultrascale.pipeline.simulate import simulate
from ultrascale.pipeline.timeline import dependencies

SPLIT = Costs(F=(1.0, 2.0, 3.0, 4.0), BI=(2.0, 3.0, 1.0, 2.0), BW=(1.0, 1.0, 2.0, 3.0))


def recorded(folder: Path, name: str, costs: Costs, micro_batches: int = 8, steps: int = 3, replicas: int = 1) -> Plan:
    plan = registry.build(name, 4, micro_batches)
    write_manifest(folder, plan, replicas)
    write_timelines(folder, plan, costs, steps, replicas)
    return plan


def test_costs_come_back_although_waiting_is_in_the_recorded_times(tmp_path: Path) -> None:
    recorded(tmp_path, "zb_h1", SPLIT)
    costs = measured_costs(tmp_path)
    for name in ("F", "BI", "BW"):
        assert getattr(costs, name) == pytest.approx(getattr(SPLIT, name)), name
    assert (costs.P2P, costs.FB) == (0, None)


def test_a_whole_backward_is_halved(tmp_path: Path) -> None:
    recorded(tmp_path, "1f1b", SPLIT)
    costs = measured_costs(tmp_path)
    assert pytest.approx(SPLIT.F) == costs.F
    assert costs.BI == costs.BW == pytest.approx((1.5, 2.0, 1.5, 2.5))


def test_pairs_come_back_by_the_stage_of_their_forward(tmp_path: Path) -> None:
    given = Costs(F=1.0, BI=1.0, BW=1.0, FB=(2.0, 2.25, 2.5, 2.75))
    recorded(tmp_path, "dualpipe", given, 12)
    found = measured_costs(tmp_path)
    assert pytest.approx(given.FB) == found.FB
    assert pytest.approx((1.0,) * 4) == found.F


@pytest.mark.parametrize(("name", "micro_batches"), [("1f1b", 8), ("zb_h1", 8), ("zb_v", 6), ("dualpipe", 8)])
def test_the_recorded_plan_simulated_with_recorded_costs_is_the_recorded_timeline(
    tmp_path: Path, name: str, micro_batches: int
) -> None:
    plan = recorded(tmp_path, name, Costs(F=2.0, BI=3.0, BW=1.0), micro_batches)
    recording = load(tmp_path)
    assert recording.plan() == plan
    timeline, predicted = recording.timeline(), simulate(recording.plan(), recording.costs())
    assert timeline.unit == "s"
    assert timeline.makespan == pytest.approx(predicted.makespan)
    for measured, simulated in zip(timeline.events(), predicted.timeline().events(), strict=True):
        assert (measured.rank, measured.action) == (simulated.rank, simulated.action)
        assert measured.end - timeline.start == pytest.approx(simulated.end)
        assert measured.start - timeline.start == pytest.approx(simulated.start)


def test_the_cold_first_step_counts_only_when_it_is_alone(tmp_path: Path) -> None:
    recorded(tmp_path, "1f1b", SPLIT, steps=3)
    assert load(tmp_path).steps == (2, 3)
    recorded(tmp_path, "1f1b", SPLIT, steps=1)
    assert load(tmp_path).steps == (1,)


def test_replicas_are_pipelines_of_their_own_and_a_slow_one_is_seen(tmp_path: Path) -> None:
    recorded(tmp_path, "1f1b", SPLIT, replicas=3)
    path = tmp_path / "timeline-4.jsonl"  # pp 1, dp 1
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["start"] -= 0.5 * (record["end"] - record["start"])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    recording = load(tmp_path)
    assert recording.ranks == ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11))
    busy = recording.busy()
    assert busy[3] == busy[5] == pytest.approx(8 * (2 + 4))
    assert busy[4] > busy[3]
    assert pytest.approx(SPLIT.F) == recording.costs().F  # the median does not follow one of three


def test_a_step_that_is_not_whole_yet_is_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, "1f1b", SPLIT, steps=3)
    path = tmp_path / "timeline-2.jsonl"
    text = path.read_text()
    path.write_text(text[: text.rindex("\n", 0, -200) + 40])  # cut within a line of step 3
    assert load(tmp_path).steps == (2,)


def test_steps_from_before_a_resume_under_another_layout_are_left_out(tmp_path: Path) -> None:
    recorded(tmp_path, "1f1b", SPLIT, steps=2)
    before = {path.name: path.read_text() for path in tmp_path.glob("timeline-*")}
    plan = registry.build("1f1b", 2, 4)
    write_manifest(tmp_path, plan)
    write_timelines(tmp_path, plan, Costs(F=1.0), steps=5)
    for name, text in before.items():
        path = tmp_path / name
        later = [line for line in path.read_text().splitlines() if json.loads(line)["step"] > 2]
        path.write_text(text + "".join(line + "\n" for line in later))
    recording = load(tmp_path)
    assert recording.steps == (4, 5)  # 3 is the first of them, and cold
    assert recording.plan() == plan


def test_clocks_of_other_hosts_are_set_so_that_nothing_arrives_before_it_leaves(tmp_path: Path) -> None:
    plan = registry.build("1f1b", 4, 8)
    write_manifest(tmp_path, plan, hosts=("a", "b"))
    write_timelines(tmp_path, plan, SPLIT, clocks=(0.0, 0.0, -5e4, -5e4))
    timeline = load(tmp_path).timeline()
    for source, target in dependencies(timeline.rows):
        assert source.end <= target.end
    # Off by no more than the shorter of the two actions at the cut.
    assert timeline.makespan == pytest.approx(simulate(plan, SPLIT).makespan, abs=4)


@pytest.mark.parametrize("missing", ["manifest.json", "timeline-1.jsonl"])
def test_a_folder_without_a_recording_is_refused(tmp_path: Path, missing: str) -> None:
    recorded(tmp_path, "1f1b", SPLIT)
    (tmp_path / missing).unlink()
    words = r"manifest\.json cannot be read" if missing == "manifest.json" else "train with profile.timeline=true"
    with pytest.raises(ScheduleError, match=words):
        measured_costs(tmp_path)


def test_the_command_takes_costs_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, "zb_h1", SPLIT)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["1f1b", "--stages", "4", "--microbatches", "8", "--cost-from", str(tmp_path), "--cost", "P2P=0.5"]
    assert command.run(parser.parse_args([*words, "--json"])) == 0
    output = json.loads(capsys.readouterr().out)
    plan = registry.build("1f1b", 4, 8)
    assert output["makespan"] == pytest.approx(simulate(plan, Costs(SPLIT.F, SPLIT.BI, SPLIT.BW, 0.5)).makespan)
    words[2] = "3"
    assert command.run(parser.parse_args(words)) == 2
    assert "cost F is given for 4 stages, the plan has 3" in capsys.readouterr().err
