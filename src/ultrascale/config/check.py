"""What a config can get wrong about keys that belong to no package above this one."""

from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config


def check(config: Config) -> list[Problem]:
    """Problems of the keys `evaluation.*`."""
    evaluation = config.evaluation
    if evaluation.every == 0:
        message = "evaluation.batches has no effect under evaluation.every=0, which never evaluates; leave it out"
        return [Problem("evaluation.batches", message, kind="idle")]
    if config.data.validation is None:
        message = f"evaluation.every={evaluation.every} has nothing to evaluate; set data.validation, or use 0"
        return [Problem("evaluation.every", message)]
    return []
