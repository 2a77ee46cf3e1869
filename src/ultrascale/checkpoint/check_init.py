"""What a config can get wrong about first weights, and about what goes out at the end. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import find_checkpoint, named
from ultrascale.checkpoint.hugging_face import read_config
from ultrascale.checkpoint.manifest import read_manifest
from ultrascale.checkpoint.weight_rules import problems_of
from ultrascale.config.model_section import Model
from ultrascale.config.problem import Problem
from ultrascale.config.schema import Config
from ultrascale.models.hugging_face import HuggingFaceError
from ultrascale.models.hugging_face_config import differences
from ultrascale.models.hugging_face_families import of_model

TENSORS = (
    "num_hidden_layers", "layer_types", "vocab_size", "tie_word_embeddings", "intermediate_size", "num_experts",
    "moe_intermediate_size", "n_shared_experts", "decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace",
    "router_bias_update_rate", "num_nextn_predict_layers",
)  # fmt: skip
"""Keys of the model that decide which tensors there are and how large they are, and nothing else: with rules, those say
whether a difference is meant."""


def check(config: Config) -> list[Problem]:
    """Problems of `init.*` and checkpoint.export_hf that no file decides. Takes a resolved config."""
    init, problems = config.init, []
    if init.from_hf is not None and init.from_checkpoint is not None:
        message = "init.from_hf and init.from_checkpoint are both set, and weights come from one place; leave one out"
        problems.append(Problem("init.from_checkpoint", message))
    if init.rules and init.from_hf is None and init.from_checkpoint is None:
        message = "init.rules have no effect without init.from_hf or init.from_checkpoint; leave them out, or set one"
        problems.append(Problem("init.rules", message, kind="idle"))
    problems += [Problem("init.rules", f"init.rules[{number}]: {text}") for number, text in problems_of(init.rules)]
    return problems + _export(config)


def _export(config: Config) -> list[Problem]:
    """The family has a mapping, and there will be a checkpoint."""
    name, checkpoint = config.checkpoint.export_hf, config.checkpoint
    if name is None:
        return []
    said = f"checkpoint.export_hf={name}"
    if Path(name).is_absolute() or ".." in Path(name).parts or Path(name).parts[:1] in ((), ("checkpoints",)):
        return [Problem("checkpoint.export_hf", f"{said} is no folder of its own in the run folder; use hugging_face")]
    if checkpoint.every == 0 and checkpoint.every_minutes is None:
        message = f"{said} writes the last checkpoint, and checkpoint.every=0 saves none; set checkpoint.every"
        return [Problem("checkpoint.export_hf", message)]
    try:
        of_model(config.model)
    except HuggingFaceError as error:
        return [Problem("checkpoint.export_hf", f"{said}: {error}; leave it out")]
    return []


def check_files(config: Config) -> list[Problem]:
    """Whether the source is there, and holds the model of this config; a run that goes on needs it no more."""
    init = config.init
    assert config.run.dir is not None
    goes_on = config.run.resume not in ("auto", "never") or named(Path(config.run.dir) / "checkpoints")
    if goes_on or (init.from_hf is None and init.from_checkpoint is None):
        return []
    key, path = ("from_hf", init.from_hf) if init.from_hf is not None else ("from_checkpoint", init.from_checkpoint)
    assert path is not None
    said = f"init.{key}={path}"
    try:
        if key == "from_hf":
            _, _, model = read_config(Path(path))
            fix = f"`ultrascale convert config {path}` prints the model section that fits"
            return _compared(config, f"init.{key}", said, model, fix)
        header = read_manifest(find_checkpoint(Path(path))).header
        there = Config.model_validate(header["config"], strict=False)
    except (CheckpointError, ValueError) as error:
        return [Problem(f"init.{key}", f"{said}: {error}")]
    problems = _compared(config, f"init.{key}", said, there.model, "set these as they are there")
    return problems + _tokenizer(config, said, there)


def _compared(config: Config, key: str, said: str, there: Model, fix: str) -> list[Problem]:
    """A problem when weights that are there would not be those of this model, beyond what rules and leave allow."""
    meant = {name.removeprefix("model.") for name in config.checkpoint.allow_changes}
    if config.init.rules:
        meant |= set(TENSORS)
    as_there = config.model.model_copy(update={name: getattr(there, name) for name in meant & set(Model.model_fields)})
    changed = differences(as_there, there)
    if not changed:
        return []
    if set(differences(as_there.model_copy(update={n: getattr(there, n) for n in TENSORS}), there)) == set(changed):
        way_out = "or, where it is meant, name it in checkpoint.allow_changes"
    else:
        way_out = "or, where it is meant, say with init.rules which tensors differ"
    return [Problem(key, f"{said} holds another model: {'; '.join(changed)}; {fix}, {way_out}")]


def _tokenizer(config: Config, said: str, there: Config) -> list[Problem]:
    """Rows of an embedding mean the tokens of one tokenizer."""
    ours, theirs = config.data.tokenizer, there.data.tokenizer
    if ours == theirs or config.init.rules or "data.tokenizer" in config.checkpoint.allow_changes:
        return []
    if Path(ours).is_file() and Path(theirs).is_file() and Path(ours).read_bytes() == Path(theirs).read_bytes():
        return []
    message = (
        f"{said} was trained on tokens of data.tokenizer={theirs}, this run has {ours}; use the same, or, where it is "
        "meant, name data.tokenizer in checkpoint.allow_changes"
    )
    return [Problem("init.from_checkpoint", message)]
