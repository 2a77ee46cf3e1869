"""What a config can get wrong about saving, resuming and first weights. Needs no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import named
from ultrascale.checkpoint.hugging_face import read_config
from ultrascale.config import rules
from ultrascale.config.meaning import SHAPES, nameable
from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config
from ultrascale.models.hugging_face import differences


def check(config: Config) -> list[Problem]:
    """Problems of the keys `checkpoint.*` and `init.*`. Takes a resolved config."""
    problems = []
    if config.checkpoint.every == 0 and config.checkpoint.asynchronous:
        message = "checkpoint.asynchronous has no effect under checkpoint.every=0, which saves nothing; leave it out"
        problems.append(Problem("checkpoint.asynchronous", message, kind="idle"))
    if config.checkpoint.every == 0 and config.checkpoint.keep is not None:
        message = "checkpoint.keep has no effect under checkpoint.every=0, which saves nothing; leave it out"
        problems.append(Problem("checkpoint.keep", message, kind="idle"))
    problems += _allowed_changes(config)
    return problems


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
    """Problems of run.resume as a path, and of init.from_hf where the run begins with it."""
    return [*_resume(config), *_from_hf(config)]


def _resume(config: Config) -> list[Problem]:
    resume = config.run.resume
    if resume in ("auto", "never") or Path(resume).is_dir():
        return []
    near = difflib.get_close_matches(resume.lower(), ("auto", "never"), n=1)
    fix = f"did you mean {near[0]}?" if near else "use auto, never, or the folder of a run or of a checkpoint"
    return [Problem("run.resume", f"run.resume={resume}: there is no such folder; {fix}")]


def _from_hf(config: Config) -> list[Problem]:
    """The folder is there, and its config.json describes the model of this config."""
    path = config.init.from_hf
    assert config.run.dir is not None
    goes_on = config.run.resume not in ("auto", "never") or named(Path(config.run.dir) / "checkpoints")
    if path is None or goes_on:
        return []
    try:
        _, _, model = read_config(Path(path))
    except CheckpointError as error:
        return [Problem("init.from_hf", f"init.from_hf={path}: {error}")]
    changed = differences(config.model, model)
    if not changed:
        return []
    fix = f"`ultrascale convert config {path}` prints the model section that fits"
    return [Problem("init.from_hf", f"init.from_hf={path} holds another model: {'; '.join(changed)}; {fix}")]
