"""From files and overrides to a config: merging, origins, and sentences for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_cases import DEBUG
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ultrascale.config.load import load
from ultrascale.config.problem import ConfigError
from ultrascale.config.render import to_yaml
from ultrascale.config.resolve import resolve
from ultrascale.config.schema import flatten


def error_of(*overrides: str, path: Path = DEBUG) -> str:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    return str(error.value)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_extending_file_wins_key_by_key_and_each_value_knows_its_file(tmp_path: Path) -> None:
    middle = write(tmp_path, "middle.yaml", f"extends: {DEBUG}\nrun: {{name: middle}}\noptimizer: {{lr: 1}}\n")
    (tmp_path / "deep").mkdir()
    top = write(tmp_path / "deep", "top.yaml", "extends: ../middle.yaml\n\nrun: {steps: 7}\n")
    loaded = load(top, ["run.seed=9"])
    assert (loaded.config.run.name, loaded.config.run.steps, loaded.config.run.seed) == ("middle", 7, 9)
    assert loaded.config.optimizer.lr == 1.0
    assert loaded.config.optimizer.weight_decay == 0.1
    assert loaded.origin("run.name") == f"{middle}:2"
    assert loaded.origin("run.steps") == f"{top}:3"
    assert loaded.origin("run.seed") == "command line"
    assert loaded.origin("optimizer.weight_decay").startswith(f"{DEBUG}:")
    assert loaded.origin("optimizer.eps") == "default"


def test_a_list_is_replaced_whole_with_its_origins(tmp_path: Path) -> None:
    base = write(tmp_path, "base.yaml", f"extends: {DEBUG}\ndata: {{train: [{{path: a, weight: 1}}]}}\n")
    top = write(tmp_path, "top.yaml", f"extends: {base.name}\ndata: {{train: b}}\n")
    loaded = load(top)
    assert loaded.config.data.train == "b"
    assert not [key for key in loaded.origins if key.startswith("data.train[")]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("extends: other.yaml", "extends: other.yaml: there is no such file"),
        ("extends: self.yml", "extends: self.yml: there is no such file; did you mean"),
        ("extends: self.yaml", "extends goes in a circle"),
        ("extends: [a, b]", "extends must be the path of one config file"),
        ("- a", "a config is a mapping of sections"),
    ],
)
def test_a_wrong_extends_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, "self.yaml", text)
    assert error_of(path=path).startswith(f"{path}:1: {complaint}")


def test_a_circle_of_two_files_is_refused_and_shown(tmp_path: Path) -> None:
    write(tmp_path, "b.yaml", "extends: a.yaml")
    path = write(tmp_path, "a.yaml", "extends: b.yaml")
    assert f"{tmp_path}/a.yaml → {tmp_path}/b.yaml → {tmp_path}/a.yaml" in error_of(path=path)


def test_a_mistyped_file_name_is_answered_with_the_nearest() -> None:
    assert error_of(path=DEBUG.with_name("debgu.yaml")).endswith(f"did you mean {DEBUG}?")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.stepz=3", "run.stepz is not a key of a config; did you mean run.steps?"),
        ("batch.micro-size=2", "batch.micro-size is not a key of a config; did you mean batch.micro_size?"),
        ("optimizer.tp=2", "optimizer.tp is not a key of a config; did you mean parallel.tp?"),
        ("tp=2", "tp is not a key of a config; did you mean parallel.tp?"),
        ("paralel.tp=2", "paralel is not a key of a config; did you mean parallel?"),
        ("model.name=x", "model.name is not a key of a config; did you mean run.name, optimizer.name or"),
        ("run.zzz=1", "run.zzz is not a key of a config; run has the keys dir, name, seed, steps, resume"),
        ("run.steps=true", "run.steps=true must be a whole number of at least 1"),
        ('run.steps="20"', 'run.steps="20" must be a whole number of at least 1; write 20, without quotes'),
        ("run.steps=2.5", "run.steps=2.5 must be a whole number of at least 1; use 2 or 3"),
        ("run.steps=0", "run.steps=0 must be a whole number of at least 1; the nearest is 1"),
        ("run.steps=1_000", 'run.steps="1_000" must be a whole number of at least 1; write 1000'),
        ("run.steps=017", 'run.steps="017" must be a whole number of at least 1; write 17'),
        ("run.steps=", "run.steps=null must be a whole number of at least 1"),
        ("run.steps={a: 1}", 'run.steps={"a": 1} must be a whole number of at least 1'),
        ("run.name=3", 'run.name=3 must be text; write "3", in quotes'),
        ("run=null", "run=null must be a section with the keys dir, name, seed, steps, resume; leave it out"),
        ("parallel.zero_stage=4", "parallel.zero_stage=4 must be a whole number from 0 to 3; the nearest is 3"),
        ("parallel.sequence_parallel=yes", "must be true, false or auto; write true"),
        ("parallel.order=[pp,dp,ep,cp,tq]", 'parallel.order[4]="tq" must be pp, dp, ep, cp or tp'),
        ("precision.compute=bf16", "must be float64, float32, bfloat16, float16 or fp8; did you mean bfloat16?"),
        ("optimizer.lr='3e-4'", 'optimizer.lr="3e-4" must be a number of at least 0; write 3e-4, without'),
        ("optimizer.lr=1e999", "optimizer.lr=Infinity must be a number of at least 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be a list of 2 values, each a number of at least 0"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas[1]=1 must be a number of at least 0 and below 1"),
        ("data.train=[{path: a}]", "data.train[0].weight is missing; it must be a number above 0"),
        (
            "data.train=[{path: a, weight: 1, w: 2}]",
            "data.train[0].w is not a key of a config; data.train[0] has the keys path, weight",
        ),
        ("data.train=[]", "data.train=[] must be text or a list of {path, weight}"),
        ("checkpoint.keep=0", "checkpoint.keep=0 must be a whole number of at least 1 or null; the nearest is 1"),
        ("run.steps=[1", "run.steps: is not YAML"),
        ("run.steps", "'run.steps' is not an override; write section.key=value"),
        ("extends=a.yaml", "extends is for files"),
    ],
)
def test_an_error_names_key_value_rule_and_nearest_fix(override: str, sentence: str) -> None:
    error = error_of(override)
    assert error.startswith("command line: ")
    assert sentence in error


def test_a_dotted_key_in_a_file_is_answered_with_its_nested_form(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", f"extends: {DEBUG}\nparallel.tp: 2\n")
    assert error_of(path=path) == f"{path}:2: parallel.tp is not a key of a config; write parallel: {{tp: ...}}"


def test_all_problems_are_shown_at_once_each_where_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", f"extends: {DEBUG}\nrun:\n  steps: x\nmodel:\n  hiden_size: 3\n")
    first, second, third = error_of("optimizer.lr=-1", path=path).splitlines()
    assert first.startswith(f"{path}:3: run.steps=")
    assert second.startswith(f"{path}:5: model.hiden_size")
    assert third.startswith("command line: optimizer.lr=-1 ")


def test_a_missing_key_is_named_with_its_rule(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "run: {name: x}")
    error = error_of(path=path)
    assert f"{path}:1: run.steps is missing; it must be a whole number of at least 1" in error
    assert f"{path}: batch.global_size is missing" in error


def test_counts_may_be_written_as_floats_and_the_last_override_wins_with_a_notice() -> None:
    loaded = load(DEBUG, ["run.steps=5", "run.steps=1e6"])
    assert loaded.config.run.steps == 10**6
    assert type(loaded.config.run.steps) is int
    assert loaded.notices == ["run.steps=5 is overruled by run.steps=1e6, which comes after it on the command line"]


# A changed value for every key of the schema (BL-195: no key may be dead).
OTHER = {
    "run.dir": "/tmp/x", "run.name": "other", "run.seed": "7", "run.steps": "3", "run.resume": "never",
    "model.family": "package.module:Family", "model.hidden_size": "128", "model.num_hidden_layers": "4",
    "model.num_attention_heads": "4", "model.num_key_value_heads": "2", "model.head_dim": "16",
    "model.intermediate_size": "96", "model.vocab_size": "300", "model.tie_word_embeddings": "false",
    "model.max_position_embeddings": "512", "model.rope_theta": "5e5", "model.rms_norm_eps": "1e-6",
    "model.rope_scaling": "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, "
    "original_max_position_embeddings: 64}",
    "model.initializer_range": "0.01", "model.depth_scaled_init": "true", "model.label_smoothing": "0.1",
    "model.num_nextn_predict_layers": "1", "model.mtp_loss_coefficient": "0.1",
    "model.z_loss_coefficient": "1e-4", "model.options": "{a: 1}",
    "parallel.dp": "2", "parallel.tp": "2", "parallel.cp": "2", "parallel.pp": "2", "parallel.ep": "2",
    "parallel.order": "[dp,pp,ep,cp,tp]", "parallel.zero_stage": "1", "parallel.sequence_parallel": "true",
    "parallel.expert_axes": "[cp,tp]", "parallel.expert_tensor_axes": "[]", "parallel.bucket_bytes": "1024",
    "parallel.dp_shard": "2", "parallel.prefetch": "2", "parallel.keep_gathered": "true", "parallel.overlap": "false",
    "parallel.deterministic_reduction": "true", "parallel.timeout_seconds": "5",
    "pipeline.schedule": "gpipe", "pipeline.virtual_stages": "2", "pipeline.layout": "[3,5]",
    "pipeline.group_size": "4", "pipeline.activation_limit": "6", "pipeline.costs": "F=2",
    "context.method": "ulysses", "context.split": "contiguous", "context.ulysses_size": "2", "context.pad": "true",
    "kernels.attention": "reference", "model.sliding_window": "8",
    "model.layer_types": "[sliding_attention, sliding_attention]",
    "model.q_lora_rank": "8", "model.kv_lora_rank": "8", "model.qk_nope_head_dim": "8",
    "model.qk_rope_head_dim": "4", "model.v_head_dim": "8",
    "model.num_experts": "4", "model.num_experts_per_tok": "2", "model.moe_intermediate_size": "16",
    "model.n_shared_experts": "1", "model.norm_topk_prob": "false", "model.scoring_func": "sigmoid",
    "model.routed_scaling_factor": "2.5", "model.n_group": "2", "model.topk_group": "2",
    "model.decoder_sparse_step": "2", "model.mlp_only_layers": "[0]", "model.first_k_dense_replace": "1",
    "model.router_bias_update_rate": "0.01", "model.router_aux_loss_coef": "0.01", "model.router_z_loss_coef": "0.01",
    "model.router_aux_loss_scope": "global_batch", "model.router_jitter_noise": "0.01",
    "model.expert_capacity_factor": "1.5", "parallel.expert_dispatch": "all_gather", "precision.combine": "compute",
    "batch.global_size": "32", "batch.micro_size": "4", "batch.sequence_length": "128",
    "data.train": "[{path: a, weight: 2}]", "data.validation": "null", "data.tokenizer": "t.json",
    "data.document_mask": "true", "data.reset_positions": "true", "data.packing": "best_fit",
    "data.cut_documents": "true",
    "optimizer.name": "sgd", "optimizer.lr": "1", "optimizer.weight_decay": "0", "optimizer.betas": "[0.8,0.9]",
    "optimizer.eps": "1e-6", "optimizer.momentum": "0.9", "optimizer.max_norm": "null",
    "optimizer.groups": "[{kind: norm, lr_scale: 0.5}]", "optimizer.newton_schulz_dtype": "bfloat16",
    "optimizer.state_dtype": "bfloat16", "optimizer.offload": "true",
    "schedule.name": "wsd", "schedule.total_steps": "50", "schedule.warmup_steps": "5",
    "schedule.decay_steps": "5", "schedule.min_lr": "1e-4",
    "precision.compute": "float64", "precision.recipe": "x", "precision.reduce": "bfloat16",
    "recompute.mode": "full", "evaluation.every": "5", "evaluation.batches": "2",
    "checkpoint.every": "1", "checkpoint.keep": "null", "checkpoint.asynchronous": "false",
    "checkpoint.every_minutes": "5", "checkpoint.keep_every": "10", "checkpoint.storage": "memory://x",
    "checkpoint.verify": "sampled", "checkpoint.allow_changes": "[model.rope_theta]",
    "checkpoint.export_hf": "x", "init.from_hf": "x", "init.from_checkpoint": "y",
    "init.rules": "[{match: lm_head.weight, action: fresh}]", "observe.console_every": "2",
    "observe.replica_check_every": "5", "profile.timeline": "true",
}  # fmt: skip


@pytest.mark.parametrize("key", flatten(load(DEBUG).config))
def test_every_key_reaches_the_config_and_no_other_does(key: str) -> None:
    before, after = load(DEBUG).config, load(DEBUG, [f"{key}={OTHER[key]}"]).config
    values = flatten(before)
    changed = {name for name, value in flatten(after).items() if value != values.get(name)}
    assert changed
    assert all(name == key or name.startswith(f"{key}.") for name in changed)


def test_every_key_is_read_outside_the_config_package() -> None:
    source = DEBUG.parents[1] / "src" / "ultrascale"
    code = "\n".join(file.read_text() for file in source.rglob("*.py") if file.parent.name != "config")
    # context.method matters for cp > 1, which is refused in this version.
    spared = {"context.method"}
    dead = [key for key in OTHER if key not in spared and key.rsplit(".", 1)[-1] not in code]
    assert dead == []


text = st.text(min_size=1, max_size=12)
value = text | st.integers() | st.booleans() | st.none() | st.lists(text)


@given(
    name=text,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    options=st.dictionaries(text, value),
)
@example(name="null", lr=1e-5, betas=(0.0, 0.5), options={"true": "false", "3": "1e6", "~": '\u2028\x85😀\\"'})
@settings(max_examples=100, deadline=None)
def test_a_written_config_reads_back_to_itself(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    lr: float,
    betas: tuple[float, float],
    options: dict[str, object],
) -> None:
    base = resolve(load(DEBUG).config, 1)
    config = base.model_copy(
        update={
            "run": base.run.model_copy(update={"name": name}),
            "model": base.model.model_copy(update={"options": options}),
            "optimizer": base.optimizer.model_copy(update={"lr": lr, "betas": betas}),
        }
    )
    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert load(file).config == config
