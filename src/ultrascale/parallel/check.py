"""What a config can get wrong about its axes: what tp, cp and sequences must divide. Needs no torch.

How an axis is used (parallel.sequence_parallel, context.*) is no idle setting where the axis has size 1:
sweeps change sizes alone.
"""

from __future__ import annotations

from ultrascale.config.model_section import Model
from ultrascale.config.problem import Problem, choices
from ultrascale.config.schema import Config, Context, Parallel
from ultrascale.kernels.choice import Refusal, installed
from ultrascale.parallel.context.split import Cut, sequence_multiple, tp_splits_tokens
from ultrascale.parallel.experts import choice


def check(config: Config) -> list[Problem]:
    """Problems of the keys `parallel.*` and `context.*`. Takes a resolved config."""
    return [
        *_sharding(config),
        *(_heads_and_features(config) or _context(config) or _sequence(config)),
        *_dispatch(config, "cuda"),
    ]


def check_device(config: Config, device: str) -> list[Problem]:
    """Problems of the device that the run is on. Takes a config that `check` found nothing wrong with."""
    return _dispatch(config, device)


def _dispatch(config: Config, device: str) -> list[Problem]:
    """A way to the experts that is named can be gone."""
    if config.parallel.expert_dispatch != "deep_ep" or config.model.num_experts is None:
        return []

    def problem(refusal: Refusal) -> Problem:
        run = f", and this run is on {device}" if device == "cpu" else ""
        ways = [refusal.fix] if refusal.fix else []
        ways_out = ", or ".join([*ways, "use parallel.expert_dispatch=auto"])
        return Problem("parallel.expert_dispatch", f"parallel.expert_dispatch=deep_ep {refusal.text}{run}; {ways_out}")

    return [problem(refusal) for refusal in choice.refusals(config, device, installed(choice.PACKAGE))]


def _sharding(config: Config) -> list[Problem]:
    """dp is shard × replicate, and what only a higher ZeRO stage looks at is idle."""
    parallel = config.parallel
    dp, shard, stage = parallel.dp, parallel.dp_shard, parallel.zero_stage
    assert dp is not None
    problems = []
    if shard is not None and dp % shard:
        fitting = choices([n for n in range(1, dp + 1) if dp % n == 0])
        message = f"parallel.dp_shard={shard} does not divide parallel.dp={dp}; use {fitting}"
        problems.append(Problem("parallel.dp_shard", message))
    idle = {
        "parallel.dp_shard": stage == 0 and shard is not None,
        "parallel.prefetch": stage < 3 and parallel.prefetch != Parallel().prefetch,
        "parallel.keep_gathered": stage < 3 and parallel.keep_gathered,
        "parallel.bucket_bytes": stage > 1 and parallel.bucket_bytes != Parallel().bucket_bytes,
    }
    for key in (key for key, without_effect in idle.items() if without_effect):
        needed = {"parallel.dp_shard": 1, "parallel.bucket_bytes": "0 or 1"}.get(key, 3)
        message = f"{key} has no effect under parallel.zero_stage={stage}; leave it out, or use {needed}"
        problems.append(Problem(key, message, kind="idle"))
    return problems


def _heads_and_features(config: Config) -> list[Problem]:
    """tp cuts query heads and the feed-forward block evenly; KV heads are cut, or replicated evenly."""
    tp, model = config.parallel.tp, config.model
    heads, kv_heads = model.num_attention_heads, _kv_heads(model)
    if heads % kv_heads:
        fitting = choices([n for n in range(1, heads + 1) if heads % n == 0])
        message = f"model.num_key_value_heads={kv_heads} does not divide model.num_attention_heads={heads}"
        return [Problem("model.num_key_value_heads", f"{message}; use {fitting}")]

    fitting = choices([n for n in range(1, heads + 1) if not _broken_by(n, model)])
    return [Problem("parallel.tp", f"parallel.tp={tp} {broken}; use {fitting}") for broken in _broken_by(tp, model)]


def _broken_by(tp: int, model: Model) -> list[str]:
    heads, kv_heads, ffn = model.num_attention_heads, _kv_heads(model), model.intermediate_size
    broken = []
    if heads % tp:
        broken.append(f"does not divide model.num_attention_heads={heads}")
    if kv_heads % tp and tp % kv_heads:
        broken.append(f"neither divides model.num_key_value_heads={kv_heads} nor is a multiple of it")
    if ffn % tp:
        broken.append(f"does not divide model.intermediate_size={ffn}")
    return broken


def _kv_heads(model: Model) -> int:
    return model.num_key_value_heads or model.num_attention_heads


def _context(config: Config) -> list[Problem]:
    """Ulysses gives each of its ranks whole query heads; a hybrid's size cuts cp."""
    cp, context = config.parallel.cp, config.context
    heads = config.model.num_attention_heads // config.parallel.tp
    size = context.ulysses_size
    if context.method == "ulysses" and cp > 1 and context.split != Context().split:
        message = f"context.split={context.split} has no effect under context.method=ulysses, which has no ring"
        return [Problem("context.split", f"{message}; leave it out", kind="idle")]
    if size is not None and context.method != "hybrid":
        message = f"context.ulysses_size={size} has no effect under context.method={context.method}; leave it out"
        return [Problem("context.ulysses_size", f"{message}, or use context.method=hybrid", kind="idle")]
    local = f"the {heads} query heads of a tp rank (model.num_attention_heads / parallel.tp)"
    if context.method == "ulysses" and heads % cp:
        message = f"context.method=ulysses gives each of parallel.cp={cp} ranks whole heads, and {local} do not divide"
        return [Problem("context.method", f"{message}; use hybrid, or ring")]
    if context.method == "hybrid" and size is not None and cp > 1 and (cp % size or heads % size):
        broken = f"parallel.cp={cp}" if cp % size else local
        fitting = choices([n for n in range(1, cp + 1) if cp % n == 0 and heads % n == 0])
        message = f"context.ulysses_size={size} does not divide {broken}; use {fitting}"
        return [Problem("context.ulysses_size", message)]
    return []


def _sequence(config: Config) -> list[Problem]:
    """Sequences are cut into cp pieces (2·cp for a ring's zigzag), and each rank's share again into tp."""
    parallel, length, pieces = config.parallel, config.batch.sequence_length, sequence_multiple(config)
    if config.context.pad or length % pieces == 0:
        return []
    reasons, ways_out = [], ["context.pad=true"]
    cut = Cut.of(config)
    if cut.multiple > cut.size:
        reasons.append(f"2·parallel.cp={cut.multiple}, zigzag")
        ways_out.append("context.split=contiguous")
    elif parallel.cp > 1:
        reasons.append(f"parallel.cp={parallel.cp}")
    if tp_splits_tokens(config) and parallel.tp > 1:
        experts = config.model.num_experts is not None
        reasons.append(f"parallel.tp={parallel.tp} with {'experts' if experts else 'parallel.sequence_parallel'}")
        ways_out += [] if experts else ["parallel.sequence_parallel=false"]
    below = length // pieces * pieces
    lengths = choices([size for size in (below, below + pieces) if size])
    message = (
        f"batch.sequence_length={length} is not a multiple of {pieces} ({'; '.join(reasons)}); "
        f"use {', or '.join([lengths, *ways_out])}"
    )
    return [Problem("batch.sequence_length", message)]
