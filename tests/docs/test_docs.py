"""The documentation does what it says: its commands run, its steps lead where they should, its generated parts are new.

In a page, a fenced block is

    bash                        run, in order, in one shell per block, all blocks of a page in one folder
    bash fails                  run, and must fail
    bash prove                  run by `make prove` alone: a block before it shows the same
    bash no-run                 not run: it needs hardware or time that a test has not
    python file=PATH            written to PATH
    python file=PATH in=TEXT    put behind the line of PATH that begins with TEXT

The folder is a copy of the project whose sources come first on the path, so that a page may add to them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
COPIED = ("Makefile", "configs", "docs", "launchers", "pyproject.toml", "src", "tests", "tools")
FENCE = re.compile(r"^```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(#[^)]*)?\)")
SECONDS = 180


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    words: tuple[str, ...]
    body: str

    @property
    def options(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.words if "=" in word)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            str(page.relative_to(ROOT)),
            text[: match.start()].count("\n") + 1,
            match["language"],
            tuple(match["info"].split()),
            match["body"],
        )
        for match in FENCE.finditer(text)
    ]


def runs(block: Block) -> bool:
    return block.language == "bash" and "no-run" not in block.words


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


RUNNING = [page for page in PAGES if any(map(runs, blocks(page)))]
SLOW = ("context_parallelism", "doctor", "hugging_face", "long_context", "optimizers", "parallelism", "parity", "zero")
"""Pages that start many runs of what other tests run too: `make prove` runs them, with all the others."""
BY_DEFAULT = [page for page in RUNNING if page.stem not in SLOW]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, without what builds and runs have left in it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
    for entry in COPIED:
        source = ROOT / entry
        if source.is_dir():
            shutil.copytree(source, tmp_path / entry, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / entry)
    return tmp_path


def environment(folder: Path, programs: Sequence[Path]) -> dict[str, str]:
    paths = [*map(str, programs), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def write(block: Block, folder: Path) -> None:
    """Puts a python block where it says."""
    path = folder / block.options["file"]
    if "in" not in block.options:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body)
        return
    lines = path.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.startswith(block.options["in"])]
    assert places, f"{block}: no line of {path} begins with {block.options['in']}"
    lines.insert(places[0] + 1, block.body)
    path.write_text("".join(lines))


def run_commands(page: Path, project: Path, programs: Sequence[Path] = (), everything: bool = False) -> None:
    for block in blocks(page):
        if "file" in block.options:
            write(block, project)
        if not runs(block) or ("prove" in block.words and not everything):
            continue
        answer = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.body],
            cwd=project,
            env=environment(project, programs),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        said = f"{block}\n{block.body}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
        assert (answer.returncode != 0) == ("fails" in block.words), said


@pytest.mark.parametrize("page", BY_DEFAULT, ids=name)
def test_commands_of_the_page_do_what_it_says(page: Path, project: Path, warm: Path) -> None:
    run_commands(page, project, [warm])


@pytest.mark.prove
@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_commands_of_the_page_do_what_it_says_with_the_installed_programs(page: Path, project: Path) -> None:
    run_commands(page, project, everything=True)


def test_enough_is_run() -> None:
    """So that a changed fence does not quietly take the commands out of the test."""
    ran = [block for page in BY_DEFAULT for block in blocks(page) if runs(block) and "prove" not in block.words]
    assert len(ran) >= 20
    assert {"README.md", "docs/add_a_model.md", "docs/add_a_schedule.md"} <= {block.page for block in ran}
    unknown = {word for page in PAGES for block in blocks(page) for word in block.words if "=" not in word}
    assert unknown <= {"fails", "no-run", "prove"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    targets = [match["target"] for match in LINK.finditer(text) if "://" not in match["target"]]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_reached_from_the_index() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in text] == []


def test_generated_parts_are_up_to_date() -> None:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    stale = [name for name, content in generate.GENERATED.items() if (ROOT / name).read_text() != content()]
    assert not stale, "run `make docs`"
