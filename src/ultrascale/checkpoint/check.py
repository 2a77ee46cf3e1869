"""What a config can get wrong about saving, resuming and first weights. Needs no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config


def check(config: Config) -> list[Problem]:
    """Problems of the keys `checkpoint.*` and `init.*`. Takes a resolved config."""
    problems = []
    if config.checkpoint.asynchronous:
        message = "checkpoint.asynchronous=true: saving while training goes on is not in this version; use false"
        problems.append(Problem("checkpoint.asynchronous", message))
    if config.checkpoint.every == 0 and config.checkpoint.keep is not None:
        message = "checkpoint.keep has no effect under checkpoint.every=0, which saves nothing; leave it out"
        problems.append(Problem("checkpoint.keep", message, kind="idle"))
    if config.init.from_hf is not None:
        message = (
            f"init.from_hf={config.init.from_hf}: Hugging Face weights are not read in this version; "
            "use null, which draws the first weights from run.seed"
        )
        problems.append(Problem("init.from_hf", message))
    return problems


def check_files(config: Config) -> list[Problem]:
    """Problems of run.resume as a path."""
    resume = config.run.resume
    if resume in ("auto", "never") or Path(resume).is_dir():
        return []
    near = difflib.get_close_matches(resume.lower(), ("auto", "never"), n=1)
    fix = f"did you mean {near[0]}?" if near else "use auto, never, or the folder of a run or of a checkpoint"
    return [Problem("run.resume", f"run.resume={resume}: there is no such folder; {fix}")]
