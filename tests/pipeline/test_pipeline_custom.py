"""`custom:PATH`: every plan that we print or PyTorch writes can be read; what is wrong is said with row and column."""

from __future__ import annotations

import argparse
import csv
import io
import json
from pathlib import Path

import pytest
from reference_plans import FIXED

from ultrascale.pipeline import command
from ultrascale.pipeline.actions import Action, Kind, Plan, ScheduleError
from ultrascale.pipeline.program import program
from ultrascale.pipeline.schedules import registry

TORCH = {Kind.F: "F", Kind.B: "B", Kind.BI: "I", Kind.BW: "W"}
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def torch_text(action: Action) -> str:
    if action.parts:
        return f"({torch_text(action.parts[0])};{torch_text(action.parts[1])})OVERLAP_F_B"
    return f"{action.stage}{TORCH[action.kind]}{action.micro_batch}"


def as_csv(plan: Plan, text: type[str] | object = str) -> str:
    """A row per rank, with an empty cell before each action but the first."""
    out = io.StringIO()
    for row in plan.actions:
        cells = [cell for action in row for cell in ("", text(action))]  # type: ignore[operator]
        csv.writer(out).writerow(cells[1:])
    return out.getvalue()


def custom(tmp_path: Path, text: str, name: str = "plan.csv") -> str:
    path = tmp_path / name
    path.write_text(text)
    return f"custom:{path}"


def refused(name: str, ranks: int = 2, micro_batches: int = 2, **options: int) -> str:
    with pytest.raises(ScheduleError) as caught:
        program(name, ranks, micro_batches, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert name.removeprefix("custom:") in str(caught.value)
    return str(caught.value).replace(name.removeprefix("custom:"), "FILE")


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("text", [str, torch_text])
def test_csv_of_every_schedule_in_our_text_and_pytorchs_reads_as_the_same_plan(
    name: str, text: object, tmp_path: Path
) -> None:
    plan = registry.build(name, 4, 8)
    read = registry.build(custom(tmp_path, as_csv(plan, text)), 4, 8)
    assert (read.actions, read.placement, read.micro_batches) == (plan.actions, plan.placement, plan.micro_batches)
    entry = registry.find(custom(tmp_path, as_csv(plan, text)))
    assert entry.virtual_stages == registry.find(name).virtual_stages
    assert program(entry.name, 4, 8).actions == program(name, 4, 8).actions


@pytest.mark.parametrize("name", FIXED)
def test_printed_json_of_every_schedule_reads_as_the_same_plan(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([name, "--stages", "2", "--microbatches", "4", "--json"])) == 0
    read = registry.build(custom(tmp_path, capsys.readouterr().out, "plan.json"), 2, 4)
    plan = registry.build(name, 2, 4)
    assert (read.actions, read.placement, read.micro_batches) == (plan.actions, plan.placement, plan.micro_batches)


def test_json_without_placement_and_numbers_is_enough(tmp_path: Path) -> None:
    text = json.dumps({"actions": [["F0.0", "F2.0", "B2.0", "B0.0"], ["F1.0", "F3.0", "B3.0", "B1.0"]]})
    plan = program(custom(tmp_path, text, "any.txt"), 2, 1)
    assert plan.placement == ((0,), (1,), (0,), (1,))


def test_empty_lines_blanks_and_a_byte_order_mark_do_not_matter(tmp_path: Path) -> None:
    text = "\ufeff" + GOOD.replace(",", " , ,") + "\n,,\n"
    assert program(custom(tmp_path, text), 2, 2).actions == program(custom(tmp_path, GOOD, "b.csv"), 2, 2).actions


def test_a_plan_keeps_to_the_limit_that_was_asked_for(tmp_path: Path) -> None:
    name = custom(tmp_path, GOOD)
    program(name, 2, 2, activation_limit=2)
    with pytest.raises(ScheduleError, match=r"rank 0, action \d+ \(F0.1\): holds 2 activations, the bound is 1"):
        program(name, 2, 2, activation_limit=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0F1,0Fx,0B1\n1F0,1B0,1F1,1B1\n", "FILE, row 1, column 3: '0Fx' is not an action; write F0.3"),
        ("0F0,0F1,0B0,0B1\n1F0,,2F0xyz,1B1\n", "FILE, row 2, column 3: '2F0xyz' is not an action"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,,1F1,1B1\n",
            "FILE, row 2, column 5: rank 1, action 3 (F1.1): F1.1 is done twice",
        ),
        (
            "0F0,0F1,0B0,0B1\n1F1,1B0,1F2,1B1\n",
            "FILE, row 2, column 3: rank 1, action 2 (F1.2): micro-batch 2 does not",
        ),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", "FILE, row 1: rank 0 (B0.1): B0.1 is missing; rank 0 must run it"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "FILE, row 1, column 2: rank 0, action 1 (B0.0): a circle of waiting"),
        ("0F0,0F1,0B0,0B1\n1F0,0F1,1B0,1B1\n", "FILE, row 2, column 2: rank 1, action 1 (F0.1): F0.1 is done twice"),
        ("0F0,0F1,0B0,0B1\n1F0,1RECV_F1,1B1\n", "FILE, row 2, column 2: '1RECV_F1' computes nothing; messages and"),
        ("0F0,REDUCE0\n1F0,1F1\n", "FILE, row 1, column 2: 'REDUCE0' computes nothing"),
        ("FB(F0.0,B0.1)\n", "FILE, row 1, column 1: 'FB(F0.0' is half an action; in CSV write it in quotes"),
        ("(0F0;0F1)OVERLAP_F_B\n", "FILE, row 1, column 1: FB is one F and one B or BI"),
        ("0F0,0F1,0B0,0B1\n2F0,2B0,2F1,2B1\n", "FILE has actions of stage 2 and none of stage 1"),
        ("0F0,0B0,1F0,1B0\n2F0,2B0\n", "FILE has 3 stages on 2 ranks; give a multiple of 2"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1\n", "FILE is a plan for ranks=3, not for 2; ask for 3"),
        ("0F0,0B0\n1F0,1B0\n", "FILE is a plan for micro_batches=1, not for 2; ask for 1"),
        ('"0F0\n', "FILE is not CSV"),
        ("", "FILE has no rows"),
        (",,\n\n", "FILE has no rows"),
        ("{]", "FILE, row 1, column 2: not JSON"),
        ('{"actions": 3}', "FILE is not a plan; write"),
        ('{"actions": []}', "FILE has no rows"),
        ('{"actions": [[], []]}', "FILE has no action"),
        ('{"actions": [["F0.0", 3]]}', "FILE, row 1, column 2: 3 is not the text of an action"),
        ('{"actions": [["F0.0", "B0.0"]], "placement": 3}', "FILE: placement is not a list of ranks"),
        ('{"actions": [["F0.0", "B0.0"]], "placement": [["0"]]}', "FILE: placement is not a list of ranks"),
        ('{"actions": [["F0.0", "B0.0"]], "microbatches": "2"}', "FILE: microbatches='2' is no number"),
    ],
)
def test_what_is_wrong_is_one_sentence_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    assert refused(custom(tmp_path, text)).startswith(words)


def test_placement_that_contradicts_the_actions_is_refused(tmp_path: Path) -> None:
    rows = [["F0.0", "B0.0"], ["F1.0", "B1.0"]]
    for placement, words in (([[1], [0]], "row 1, column 1"), ([[0], [7]], "stage 1 is placed on (7,)")):
        text = json.dumps({"actions": rows, "placement": placement})
        assert words in refused(custom(tmp_path, text), 2, 1)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    assert "FILE does not exist" in refused(f"custom:{tmp_path}/none.csv")
    assert "FILE cannot be read: Is a directory" in refused(f"custom:{tmp_path}")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    assert "FILE cannot be read: it is not UTF-8 text" in refused(f"custom:{tmp_path}/binary.csv")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "FILE" in refused(f"custom:{tmp_path}/deep.json")


def test_numbers_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    name = custom(tmp_path, GOOD)
    assert "2 virtual stages do not fit" in refused(name, virtual_stages=2)
    assert "group_size=4 does not fit" in refused(name, group_size=4)
