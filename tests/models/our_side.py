"""What a rank of ours computes for the comparison with Hugging Face, whose import would cost every worker seconds."""

from __future__ import annotations

from typing import Any

import torch

from pool import Context
from small import assembled, boxes, step_batch_of, tokens
from ultrascale.config.schema import Config


def ours(context: Context | None, config: Config) -> dict[str, Any]:
    """What one rank has of weights, gradients, terms of the loss (each over its denominator) and logits."""
    assembly = assembled(config, context)
    inputs, labels = tokens(config)
    batch = step_batch_of(assembly, inputs, labels)
    weights = boxes(assembly, "masters")
    outputs = assembly.engine.run(batch)
    assembly.gradients.finish()
    logits = assembly.evaluation.run(step_batch_of(assembly, inputs, None))
    return {
        "weights": weights,
        "gradients": boxes(assembly, "gradients"),
        "terms": {
            name: sum(out[name].item() for out in outputs) / batch.denominators[term.denominator]
            for name, term in assembly.objective.terms.items()
        },
        "logits": torch.cat([out["logits"] for out in logits], dim=1).numpy() if logits else None,
        "last": bool(outputs),
    }
