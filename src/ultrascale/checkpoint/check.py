"""What a config can get wrong about saving, resuming and first weights. Needs no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from ultrascale.checkpoint import check_init
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.storage import open_storage
from ultrascale.config import rules
from ultrascale.config.meaning import SHAPES, nameable
from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config


def check(config: Config) -> list[Problem]:
    """Problems of the keys `checkpoint.*` and `init.*`. Takes a resolved config."""
    problems = []
    checkpoint = config.checkpoint
    if checkpoint.every == 0 and checkpoint.every_minutes is None:
        for name, value in (
            ("asynchronous", True),
            ("keep", checkpoint.keep),
            ("keep_every", checkpoint.keep_every),
            ("storage", checkpoint.storage),
        ):
            if value is not None:
                message = f"checkpoint.{name} has no effect under checkpoint.every=0, which saves nothing; leave it out"
                problems.append(Problem(f"checkpoint.{name}", message, kind="idle"))
    elif checkpoint.keep_every is not None and checkpoint.keep is None:
        message = "checkpoint.keep_every has no effect under checkpoint.keep=null, which keeps all; leave it out"
        problems.append(Problem("checkpoint.keep_every", message, kind="idle"))
    problems += _storage(config)
    problems += check_init.check(config)
    problems += _allowed_changes(config)
    return problems


def _storage(config: Config) -> list[Problem]:
    """fsspec knows the URL's protocol, and the package behind it is there; nothing is asked over a network."""
    url = config.checkpoint.storage
    if url is None:
        return []
    try:
        open_storage(url)
    except CheckpointError as error:
        return [Problem("checkpoint.storage", f"checkpoint.storage={error}")]
    return []


def _allowed_changes(config: Config) -> list[Problem]:
    """Each name must be one that a permission is needed for, and that a permission can help."""
    problems = []
    names, keys = nameable(), rules.keys(rules.root())
    for name in config.checkpoint.allow_changes:
        inside = [outer for outer in names if name.startswith(f"{outer}.")]
        said = f"checkpoint.allow_changes: {name}"
        if name in names:
            continue
        if name in SHAPES:
            message = f"{said} decides which tensors there are, and those of the checkpoint must fit; leave it out"
            problems.append(Problem("checkpoint.allow_changes", message))
        elif inside:
            message = f"{said} is a part of {inside[0]}; write {inside[0]}"
            problems.append(Problem("checkpoint.allow_changes", message))
        elif name in keys:
            message = f"{said} may change without leave; leave it out"
            problems.append(Problem("checkpoint.allow_changes", message, kind="idle"))
        else:
            near = difflib.get_close_matches(name, names, n=1) or [n for n in names if n.endswith(f".{name}")]
            known = f"did you mean {near[0]}?" if near else "write section and key, as model.rope_scaling"
            problems.append(Problem("checkpoint.allow_changes", f"{said} is not a key of a config; {known}"))
    return problems


def check_files(config: Config) -> list[Problem]:
    """Problems of run.resume as a path, and of what the first weights come from where the run begins with it."""
    return [*_resume(config), *check_init.check_files(config)]


def _resume(config: Config) -> list[Problem]:
    resume = config.run.resume
    if resume in ("auto", "never") or Path(resume).is_dir():
        return []
    near = difflib.get_close_matches(resume.lower(), ("auto", "never"), n=1)
    fix = f"did you mean {near[0]}?" if near else "use auto, never, or the folder of a run or of a checkpoint"
    return [Problem("run.resume", f"run.resume={resume}: there is no such folder; {fix}")]
