"""Every key of the shipped debug.yaml, damaged in every way that people damage keys (BL-134, F1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_cases import DEBUG

from ultrascale import train
from ultrascale.config.yaml_reader import read_file

Tree = dict[str, dict[str, Any]]
TREE: Tree = read_file(DEBUG).tree  # type: ignore[assignment]
KEYS = [(section, name) for section, keys in TREE.items() for name in keys]


@pytest.fixture(autouse=True)
def _nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged config that is accepted fails its test at once."""

    def accepted(asked: str | None) -> str:
        raise AssertionError("accepted")

    monkeypatch.setattr(train, "_device", accepted)


def written(tree: Tree) -> list[str]:
    """The lines of a config file. JSON values, which say whether 20 is quoted."""
    return [
        line
        for section, keys in tree.items()
        for line in (f"{section}:", *(f"  {name}: {json.dumps(value)}" for name, value in keys.items()))
    ]


def typo(section: str, name: str) -> Iterator[tuple[str, str, Any]]:
    yield section, name[:-1] + "q" if len(name) > 2 else name + "q", TREE[section][name]
    yield section + "s", name, TREE[section][name]


def hyphen(section: str, name: str) -> Iterator[tuple[str, str, Any]]:
    if "_" in name:
        yield section, name.replace("_", "-"), TREE[section][name]


def wrong_section(section: str, name: str) -> Iterator[tuple[str, str, Any]]:
    other = "context" if section != "context" else "run"
    yield other, name, TREE[section][name]


def wrong_type(section: str, name: str) -> Iterator[tuple[str, str, Any]]:
    yield section, name, {"a": 1}
    yield section, name, True if not isinstance(TREE[section][name], bool) else 1


def quoted_number(section: str, name: str) -> Iterator[tuple[str, str, Any]]:
    value = TREE[section][name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield section, name, str(value)


@pytest.mark.parametrize("mutation", [typo, hyphen, wrong_section, wrong_type, quoted_number])
@pytest.mark.parametrize(("section", "name"), KEYS)
def test_a_damaged_key_costs_exit_2_and_is_answered_with_its_line_and_a_way_out(
    mutation: Any, section: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for new_section, new_name, value in mutation(section, name):
        tree = {title: dict(keys) for title, keys in TREE.items()}
        del tree[section][name]
        tree.setdefault(new_section, {})[new_name] = value
        path = tmp_path / "damaged.yaml"
        path.write_text("\n".join(written(tree)))

        assert train.main(["--config", str(path)], environment={}) == 2
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if f"{new_section}.{new_name}" in line or new_section not in TREE]
        assert lines, error
        assert lines[0].startswith(f"{path}:")
        assert any(way in lines[0] for way in ("did you mean", " must be ", "; write ", "has the keys")), error
        if mutation in (hyphen, wrong_section):
            assert f"{section}.{name}" in lines[0]
        if mutation is typo and new_section == section:
            assert f"{section}.{name}" in lines[0]
        if mutation is quoted_number:
            assert f"write {value}, without quotes" in lines[0]


@pytest.mark.parametrize(("section", "name"), KEYS)
def test_a_key_given_twice_costs_exit_2(
    section: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = written(TREE)
    at = lines.index(f"{section}:") + 1 + list(TREE[section]).index(name)
    path = tmp_path / "twice.yaml"
    path.write_text("\n".join([*lines[: at + 1], lines[at], *lines[at + 1 :]]))
    assert train.main(["--config", str(path)], environment={}) == 2
    assert capsys.readouterr().err == (
        f"{path}:{at + 2}: {section}.{name} is given twice, first at {path}:{at + 1}; keep one of them\n"
    )
