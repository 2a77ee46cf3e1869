"""The strict reading of YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from ultrascale.config.problem import ConfigError
from ultrascale.config.yaml_reader import MAX_BYTES, read_file, read_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e-05", 1e-5),
        ("1e6", 1e6),
        ("3.0e4", 3e4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-7", -7),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        # What PyYAML would turn into something else.
        ("yes", "yes"),
        ("on", "on"),
        ("No", "No"),
        ("True", "True"),
        ("017", "017"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'20'", "20"),
        ('"true"', "true"),
        ("builtin:stdlib", "builtin:stdlib"),
        ("E t*3 | t*5 L", "E t*3 | t*5 L"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    read = read_text(f"key: {text}", "f.yaml").tree
    assert read == {"key": value}
    assert type(read["key"]) is type(value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("run: {steps: 1, seed: 2, steps: 3}", "f.yaml:1: run.steps is given twice"),
        ("run:\n  steps: 1\nmodel: {}\nrun:\n  seed: 1", "f.yaml:4: run is given twice, first at f.yaml:1"),
        ("a: &x {b: 1}\nc: *x", "f.yaml:1: a: anchors and aliases are not read"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1: a: the tag"),
        ("a: !!int '3'", "f.yaml:1: a: the tag"),
        ("a: 1\n---\nb: 2", "f.yaml:2: a second document"),
        ("? [a, b]\n: 1", "f.yaml:1: a config: keys must be plain words"),
        ("a: [1, 2", "f.yaml:1: is not YAML"),
        ("a: 1\n\tb: 2", "f.yaml:2: is not YAML"),
        ("a: 1\nb: \x07", "f.yaml:2: is not YAML: the character U+0007"),
        ("[" * 100_000, "f.yaml:1: is nested deeper than 64 levels"),
        ("\n".join(" " * n + "a:" for n in range(100)), "f.yaml:65: is nested deeper than 64 levels"),
    ],
)
def test_what_yaml_leaves_unclear_is_refused_with_its_line(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(text, "f.yaml")
    assert str(error.value).startswith(complaint)


def test_a_file_that_is_no_config_is_refused_by_its_name(tmp_path: Path) -> None:
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=r"large\.yaml: is larger than"):
        read_file(large)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: 1\nb: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml:2: is not UTF-8"):
        read_file(binary)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path)


def test_every_key_remembers_its_line() -> None:
    document = read_text("run:\n  steps: 3\n\nmodel: {family: llama,\n  vocab_size: 9}\nlist: [1,\n 2]", "f.yaml")
    assert document.origins == {
        "": "f.yaml:1",
        "run": "f.yaml:1",
        "run.steps": "f.yaml:2",
        "model": "f.yaml:4",
        "model.family": "f.yaml:4",
        "model.vocab_size": "f.yaml:5",
        "list": "f.yaml:6",
        "list[0]": "f.yaml:6",
        "list[1]": "f.yaml:7",
    }
