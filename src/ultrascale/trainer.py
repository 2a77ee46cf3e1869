"""The training loop, from a checked config to an exit code."""

from __future__ import annotations

import gc
import math
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from ultrascale.assembly import (
    PlanError,
    assemble,
    check_build,
    check_gradients,
    check_plan,
    planned_groups,
)
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.export import export_latest
from ultrascale.checkpoint.first_weights import has_source
from ultrascale.checkpoint.folder import folder_name
from ultrascale.checkpoint.snapshots import Snapshots
from ultrascale.comm import collectives
from ultrascale.comm.agreement import alone, together
from ultrascale.comm.ledger import Ledger
from ultrascale.comm.process_groups import create
from ultrascale.config.meaning import other_samples
from ultrascale.config.problem import ConfigError
from ultrascale.config.schema import Config
from ultrascale.data.errors import DataError
from ultrascale.data.loader import Data, differences
from ultrascale.description import checkpoint_header, config_tree, precision, run_manifest, tokens_so_far
from ultrascale.mesh.axes import Mesh
from ultrascale.models.family import FamilyError
from ultrascale.models.sizes import all_layers, mean_keys
from ultrascale.observe import mfu
from ultrascale.observe.console import Console, StartUp
from ultrascale.observe.expert_load import balance_figures, dropped_figures
from ultrascale.observe.memory import keep_freed_memory, peak_memory
from ultrascale.observe.run_folder import RunFolder, RunFolderError
from ultrascale.parallel.replicas import check_replicas
from ultrascale.pipeline.actions import ScheduleError
from ultrascale.pipeline.layer_costs import balance_text
from ultrascale.step import StepResult, evaluate, step_batch, train_step
from ultrascale.wishes import Wishes

FIRST_LOSS_TOLERANCE = 0.1
ECHO_SECONDS = 1.0
FINISHED, FAILED, REFUSED, STOPPED = 0, 1, 2, 3

AFTER_NOT_FINITE = (
    "the same settings come to the same end: look at optimizer.lr, precision.compute, model.initializer_range and "
    "the data"
)

REFUSALS = (PlanError, ScheduleError, ConfigError, RunFolderError, DataError, CheckpointError, FamilyError)


def run(config: Config, *, device: str, rank: int, world_size: int, local_rank: int) -> int:
    """Trains; returns the exit code: 0 finished, 2 refused, 3 stopped on purpose with a checkpoint saved."""
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    keep_freed_memory()
    if world_size > 1:
        timeout = timedelta(seconds=config.parallel.timeout_seconds)
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timeout)
    trainer = None
    try:
        trainer = Trainer(config, rank, place)
        code = trainer.train()
        # A rank that closes its connections while another still reads from them would abort that one.
        collectives.barrier(trainer.groups.world)
        return code
    except REFUSALS as error:
        # Before the first step all ranks come to the same error; later it may be one rank's own.
        if rank == 0 or trainer is not None:
            print(f"rank {rank}: {error}" if trainer else error, file=sys.stderr)
        if trainer is None:
            return REFUSED
        trainer.failed(error, FAILED)
        return FAILED
    except Exception as error:
        if trainer is not None:
            trainer.failed(error, FAILED)
        raise
    finally:
        if trainer is not None:
            trainer.let_go()
        if world_size > 1:
            del trainer
            gc.collect()
            dist.destroy_process_group()


class Trainer:
    """One rank's run."""

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self.config, self.rank, self.device = config, rank, device
        self.mesh = Mesh.of(config)
        self.ledger = Ledger()
        self.groups = create(self.mesh, planned_groups(config, self.mesh), self.ledger, config.parallel.timeout_seconds)
        self.console = Console(config.run.steps, rank=rank, every=config.observe.console_every)
        # One clock decides when it is time to save.
        self.wishes = Wishes(config.checkpoint.every_minutes if rank == 0 else None)
        self.tokens = 0
        self.folder = self._claim_folder()
        self.step = self.folder.last_step
        try:
            self._prepare()
        except Exception as error:
            self.failed(error, REFUSED if isinstance(error, REFUSALS) else FAILED)
            raise

    def _prepare(self) -> None:
        """Everything that may still refuse the run, after the folder is ours."""
        config, rank, device = self.config, self.rank, self.device
        # A file that only one host lacks is an error on all ranks.
        self.data = together(lambda: Data(config), self.groups.world, DataError)
        self._same_data_everywhere()
        check_plan(config, self.groups.world)
        self.assembly = assemble(config, self.mesh, rank, self.groups, device)
        if config.optimizer.offload and device.type == "cpu":
            self.console.say("notice: optimizer.offload has no effect on cpu, where moments lie in host memory anyway")
        self.folder.forget_failures()
        self.snapshots = Snapshots(
            self.assembly.optimizer,
            self.folder.checkpoints,
            header=checkpoint_header(self.assembly, self.data),
            world=self.groups.world,
            keep=config.checkpoint.keep,
            verify=config.checkpoint.verify,
            # What is saved once, at a signal, is waited for anyway.
            asynchronous=config.checkpoint.asynchronous and self._saves,
            keep_every=config.checkpoint.keep_every,
            storage=config.checkpoint.storage,
            before=self.folder.sync,
        )
        self.step = self._resume()

    def train(self) -> int:
        """The loop; every rank takes the same way through it."""
        config, first, saved = self.config, self.step + 1, self.step
        self._start()
        for step in range(first, config.run.steps + 1):
            begun = time.perf_counter()
            self.ledger.clear()
            batch = step_batch(self.assembly, self._arrays(step))
            result = train_step(self.assembly, batch, step, self._wishes)
            if not result.finite:
                return self._stop(step - 1, f"loss or gradient of step {step} is not finite", saved, AFTER_NOT_FINITE)
            self.step, seconds = step, time.perf_counter() - begun
            if step == first:
                # Every step makes the same calls; one that evaluates or saves would show others too.
                self.folder.write_ledger(self.ledger.summary())
                check_gradients(self.assembly)
                self._check_first_loss(result)
            validation = self._evaluate() if _due(step, config.evaluation.every) else None
            self._record(result, seconds, validation)
            self._say_news()
            if _due(step, config.observe.replica_check_every):
                check_replicas(self.assembly.optimizer.weights)
            if result.save or _due(step, config.checkpoint.every) or (step == config.run.steps and self._saves):
                self._save(step)
                saved = step
            if result.stop and step < config.run.steps:
                return self._stop(step, "a signal asked to stop", saved)
        return self._finish()

    # ---- start and end --------------------------------------------------------------------------------------------

    def _claim_folder(self) -> RunFolder:
        """Rank 0 claims the folder; when it may not, all ranks raise the same error."""
        config = self.config
        assert config.run.dir is not None
        claim = partial(RunFolder, config.run.dir, config=config_tree(config), resume=config.run.resume, rank=self.rank)
        return together(claim, self.groups.world, RunFolderError)

    def _same_data_everywhere(self) -> None:
        """Hosts may hold other files under one path; ranks that train on different tokens would never notice."""
        mine = self.data.fingerprint()
        for rank, other in enumerate(collectives.gather_json(mine, self.groups.world)):
            if changed := differences(other, mine):
                raise DataError(f"rank {rank} reads other data than rank {self.rank}: {'; '.join(changed)}")

    def let_go(self) -> None:
        """Gives the signals back and ends the groups.

        A signal handler would keep this object, and with it gloo's threads, alive until the interpreter is torn down;
        a thread that then wants to drop a tensor aborts a process that has finished its work.
        """
        self.wishes.let_go()
        self.snapshots.close()
        self.groups.destroy()

    def _resume(self) -> int:
        """Restores the checkpoint that run.resume means; returns the step it was taken after, 0 for none."""
        found = self.snapshots.find(self.config.run.resume)
        self._say_news()
        for reason in self.snapshots.passed_over:
            self.folder.event("checkpoint_passed_over", reason=reason)
            self.console.say(f"notice: a newer checkpoint is not whole and is passed over: {reason}")
        if found is None:
            # A finished run that saved nothing is finished all the same; one that is to go on further cannot.
            done = collectives.gather_json(self.folder.finished_step, self.groups.world)[0]
            if done >= self.config.run.steps:
                self.tokens = done * self._tokens_of_a_step()
                return done
            if self.folder.last_step:
                self.console.say(
                    f"notice: {self.folder.last_step} steps were done here and none was saved: from step 1"
                )
            self._first_weights()
            return 0
        go_back = self.config.run.resume not in ("auto", "never")
        manifest = self.snapshots.restore(found, go_back)
        step, self.tokens = manifest.step, tokens_so_far(manifest.header)
        for path in self.snapshots.set_aside:
            self.console.say(f"notice: back to step {step}, {path} is set aside; run.resume=auto goes on from here")
        self.folder.event("resume", step=step, checkpoint=str(found))
        if changed := self.snapshots.permitted:
            said = [change.text for change in changed]
            if other_samples(changed):
                first = self.data.position(step)["samples"]
                said.append(f"samples go on at number {first} of another order: text of earlier steps may come again")
            self.folder.event("allowed_changes", step=step, changes=said)
            self.console.say(f"notice: from step {step + 1} on by checkpoint.allow_changes: {'; '.join(said)}")
        return step

    def _first_weights(self) -> None:
        """Reads them where they are not drawn, and says what each rule did."""
        if not has_source(self.config.init):
            return
        done = self.snapshots.start_from(self.config.init)
        rules = [{"rule": rule.text, "tensors": list(rule.names)} for rule in done.applied]
        self.folder.event("first_weights", path=done.path, rules=rules)
        for rule in done.applied:
            names = rule.names if len(rule.names) <= 2 else (rule.names[0], "…", rule.names[-1])
            self.console.say(f"notice: first weights by {rule.text}: {len(rule.names)} tensors ({', '.join(names)})")

    def _save(self, step: int) -> None:
        self.snapshots.save(step, {**self.data.position(step), "tokens": self.tokens})
        self.wishes.saved()
        self.folder.status("running", step)
        self._say_news()

    @property
    def _saves(self) -> bool:
        """Whether checkpoints are saved without being asked for."""
        return self.config.checkpoint.every > 0 or self.config.checkpoint.every_minutes is not None

    def _wishes(self) -> tuple[bool, bool]:
        """Whether this rank wants to stop after the step, and to save after it."""
        return self.wishes.stop or self.snapshots.failed, self.wishes.save

    def _say_news(self) -> None:
        for news in self.snapshots.news():
            self.folder.event(news.event, **news.fields)
            if news.notice:
                self.console.say(f"notice: {news.notice}")

    def _start(self) -> None:
        config, assembly = self.config, self.assembly
        self.wishes.listen()
        self.parameters = check_build(assembly)
        check_replicas(assembly.optimizer.weights)
        self.folder.write_config(config_tree(config))
        self.folder.write_manifest(run_manifest(assembly, self.parameters))
        self.folder.cut_back(self.step)
        self.folder.status("running", self.step)
        self.folder.event("start", step=self.step)
        if config.profile.timeline:
            assembly.engine.timeline = []
        sizes = assembly.family.sizes()
        keys = mean(mean_keys(config, layer) for layer in all_layers(config.model))
        self._flops_per_token = mfu.flops_per_token(sizes.matmul_parameters, sizes.attention_width, keys)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self._peak = mfu.peak_flops(name, config.precision.compute)
        layers = balance_text(config, assembly.plan)
        self.console.start(
            StartUp(
                name=config.run.name,
                run_dir=str(self.folder.path),
                device=name,
                axes=self.mesh.sizes,
                parameters=self.parameters,
                rank_parameters=sum(bucket.masters.numel() for bucket in assembly.gradients.buckets),
                global_size=config.batch.global_size,
                micro_size=config.batch.micro_size,
                replicas=self.mesh.size(["dp", "ep"]),
                sequence_length=config.batch.sequence_length,
                schedule=f"{assembly.plan.name}, layers {' | '.join(str(len(s.layers)) for s in assembly.split)}",
                precision=precision(assembly.policy),
                steps=config.run.steps,
                first_step=self.step + 1,
                tokens_before=self.tokens,
                notes={"MFU": f"{mfu.FORMULA}; peak {self._peak or 'unknown'}"}
                | ({"layers": layers} if layers else {}),
            )
        )

    def failed(self, error: Exception, exit_code: int) -> None:
        """Says in the run folder how this ended, when it did not end well."""
        reason = f"rank {self.rank}: {type(error).__name__}: {error}"
        if exit_code == FAILED:
            self.folder.failure(reason)
        if isinstance(error, RuntimeError) and self.rank == 0 and self.mesh.world_size > 1:
            # Likely only the echo of another rank's failure: the connection broke. That rank is writing why.
            time.sleep(ECHO_SECONDS)
            reason = self.folder.first_failure() or reason
        self.folder.status("failed", self.step, reason, exit_code)
        self.folder.event("failure", step=self.step, reason=reason)
        self.console.close()

    def _finish(self) -> int:
        self.snapshots.wait()
        self._say_news()
        self._export()
        memory = collectives.gather_json(asdict(peak_memory(self.device)), self.groups.world)
        self.folder.event("memory", step=self.step, peak_bytes_by_rank=memory)
        self.folder.status("finished", self.step, exit_code=FINISHED)
        self.folder.event("finish", step=self.step)
        self.console.close()
        self.console.say(f"finished at step {self.step}; the run lies in {self.folder.path}")
        return FINISHED

    def _export(self) -> None:
        """Writes the last checkpoint as a Hugging Face folder; rank 0 does, and the others wait."""
        name = self.config.checkpoint.export_hf
        if name is None:
            return
        target = self.folder.path / name / folder_name(self.step)
        work, pause = partial(export_latest, self.folder.checkpoints, target), self.config.parallel.timeout_seconds / 4
        alone(work, self.groups.world, CheckpointError, pause)
        self.folder.event("export", step=self.step, path=str(target))
        self.console.say(f"exported for Hugging Face: {target}")

    def _stop(self, step: int, reason: str, saved: int, way_on: str = "run.resume=auto goes on from there") -> int:
        """Stops on purpose, with the state of `step` saved."""
        if saved != step and step > 0:
            self._save(step)
        self.snapshots.wait()
        self._say_news()
        self.folder.status("stopped", step, reason, STOPPED)
        self.folder.event("stop", step=step, reason=reason)
        self.console.close()
        self.console.say(f"stopped after step {step}: {reason}; {way_on}")
        return STOPPED

    # ---- parts of a step ------------------------------------------------------------------------------------------

    def _arrays(self, step: int) -> Any:
        axes = ["dp", "ep"]
        return self.data.batch(
            step, self.mesh.index(self.rank, axes), self.mesh.size(axes), self.config.batch.micro_size
        )

    def _check_first_loss(self, result: StepResult) -> None:
        """An untrained model knows nothing: its first loss is near ln(vocabulary) under every layout."""
        if has_source(self.config.init):
            return
        expected, found = math.log(self.config.model.vocab_size), result.report["lm_loss"]
        if self.step == 1 and abs(found - expected) > FIRST_LOSS_TOLERANCE * expected:
            self.folder.event("first_loss", step=1, loss=found, expected=expected)
            self.console.say(
                f"notice: the first loss {found:.3f} is far from ln(vocab_size) = {expected:.3f}; look at "
                "model.initializer_range, the data and the tokenizer"
            )

    def _evaluate(self) -> float:
        axes = ["dp", "ep"]
        replica, replicas = self.mesh.index(self.rank, axes), self.mesh.size(axes)
        return evaluate(
            self.assembly,
            [
                step_batch(
                    self.assembly,
                    self.data.validation_batch(number, replica, replicas, self.config.batch.micro_size),
                )
                for number in range(1, self.config.evaluation.batches + 1)
            ],
        )

    def _tokens_of_a_step(self) -> int:
        return self.config.batch.global_size * self.config.batch.sequence_length

    def _record(self, result: StepResult, seconds: float, validation: float | None) -> None:
        tokens = self._tokens_of_a_step()
        self.tokens += tokens
        rate = tokens / seconds
        record: dict[str, Any] = {
            "step": self.step,
            **result.report,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.tokens,
            "tokens_per_s": rate,
            "step_time_s": seconds,
            "mfu": mfu.mfu(rate, self._flops_per_token, self.mesh.world_size, self._peak),
            "peak_memory_bytes": result.peak_memory_bytes,
        }
        if validation is not None:
            record["validation_loss"] = validation
        self._record_experts(result, record)
        self.folder.metrics(record)
        self.console.step(record)
        if self.assembly.engine.timeline is not None:
            self.folder.timeline(self.step, self.assembly.engine.timeline)
            self.assembly.engine.timeline.clear()

    def _record_experts(self, result: StepResult, record: dict[str, Any]) -> None:
        """How tokens fell on experts, where there are any: figures into the record, all counts into their own file."""
        if result.load is None or self.assembly.load is None:
            return
        tokens = result.load.tolist()
        record |= balance_figures(tokens)
        if result.dropped is not None:
            record |= dropped_figures(tokens, result.dropped.tolist())
        if result.router_bias_range is not None:
            record["router_bias_range"] = list(result.router_bias_range)
        if _due(self.step, self.config.observe.console_every) or self.step == self.config.run.steps:
            self.folder.expert_load(self.step, self.assembly.load.layers, tokens)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
