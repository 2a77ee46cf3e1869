"""Copies of a parameter stay bitwise equal; one that strays by a bit ends the whole job and is named (P1, P2, F3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trainer_cases import BASE, Job, codes, status, train, yaml_file

from pool import Context, pool
from small import assembled, box_of, config_of
from ultrascale import trainer
from ultrascale.assembly import Assembly
from ultrascale.parallel.buckets import Bucket, Span
from ultrascale.parallel.replicas import ReplicaError, check_replicas

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel.tp": 2}),
    (2, {"parallel.tp": 2, "parallel.sequence_parallel": False, "model.num_key_value_heads": 1}),
    (4, {"parallel.tp": 4}),  # two KV heads, each on two ranks
    (4, {"parallel.dp": 2, "parallel.tp": 2}),
    (4, {"parallel.dp": 2, "parallel.pp": 2}),
    (4, {"parallel.tp": 2, "parallel.pp": 2}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_copies_are_bitwise_equal_after_every_step(world: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """Compared here, byte by byte, and by the run itself after each step."""
    outcomes = train(world, tmp_path / "run", {**layout, "run.steps": 3, "precision.compute": "bfloat16"})
    assert codes(outcomes) == {0}
    held: dict[tuple[str, Any], bytes] = {}
    shared = 0
    for outcome in outcomes:
        for name, (offset, data) in outcome.state.items():
            shared += (name, offset) in held
            assert held.setdefault((name, offset), data) == data, name
    assert shared > 0


def spans_of(assembly: Assembly) -> list[tuple[Bucket, Span]]:
    """Every logical parameter that this rank holds something of."""
    found = [(bucket, span) for bucket in assembly.gradients.buckets for span in bucket.spans]
    return [(bucket, span) for bucket, span in found if box_of(assembly.store, bucket, span, bucket.masters).numel()]


def last_value(assembly: Assembly, number: int) -> torch.Tensor:
    """[], of the number-th logical parameter of this rank."""
    bucket, span = spans_of(assembly)[number]
    return box_of(assembly.store, bucket, span, bucket.masters).view(-1)[-1]


def stray(value: torch.Tensor) -> None:
    """It moves by one unit in the last place."""
    value.copy_(torch.nextafter(value, value + 1))


MOST = 2 * 9 + 2
"""Logical parameters of the whole model: all ranks check as often, though the last may hold fewer."""


def every_parameter(context: Context, layout: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(parameter, what the check said, whether another rank holds a copy), one parameter of the last rank at a time."""
    config = config_of({**BASE, **layout}, context.world_size)
    last = context.rank == context.world_size - 1
    assembly = assembled(config, context)
    mesh, spans = assembly.mesh, spans_of(assembly)
    check_replicas(assembly.optimizer.weights)  # equal at start
    found = []
    for number in range(MOST):
        strays = last and number < len(spans)
        value = last_value(assembly, number) if strays else torch.empty(())
        before = value.clone()
        if strays:
            stray(value)
        said = ""
        try:
            check_replicas(assembly.optimizer.weights)
        except ReplicaError as error:
            said = str(error)
        value.copy_(before)
        if strays:
            bucket, span = spans[number]
            tied = assembly.store.copies_of(bucket).size > 1
            found.append((span.layout.name, said, tied or mesh.size(span.layout.replica_axes(mesh)) > 1))
    check_replicas(assembly.optimizer.weights)  # each was put back
    return found


@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=str)
def test_any_copy_that_strays_by_one_bit_is_named(world: int, layout: dict[str, Any]) -> None:
    found = pool(world).run(every_parameter, layout)[-1]
    assert sum(copied for *_, copied in found) >= 3
    for name, said, copied in found:
        if copied:
            assert name in said, f"{name}: {said or 'nothing was said'}"
        else:
            assert not said, name


LAST = 3  # of four ranks


def the_last_rank_strays_in_step_3(rank: int) -> None:
    original = trainer.train_step

    def step(assembly: Assembly, batch: Any, number: int, *rest: Any) -> Any:
        result = original(assembly, batch, number, *rest)
        if rank == LAST and number == 3:
            stray(last_value(assembly, 0))
        return result

    patch.object(trainer, "train_step", step).start()


@pytest.mark.parametrize(
    "layout",
    [["parallel.dp=2", "parallel.tp=2"], ["parallel.dp=2", "parallel.pp=2"]],
    ids=" ".join,
)
def test_a_copy_that_strays_ends_every_rank_and_the_parameter_is_named_to_the_user(
    layout: list[str], tmp_path: Path
) -> None:
    config = yaml_file(tmp_path / "run.yaml", {"run.steps": 100_000})
    arguments = ["--config", str(config), f"run.dir={tmp_path / 'run'}", *layout]
    with Job(arguments, 4, tmp_path / "logs", (__name__, "the_last_rank_strays_in_step_3")) as job:
        ends = job.wait(30)
        said = "".join(job.said(rank) for rank in range(4))
    assert None not in ends
    assert 0 not in ends
    assert "copies of parameters are not equal" in said
    assert "layers.1.mlp.down_proj.weight differs over dp" in said
    found = status(tmp_path / "run")
    assert found["state"] == "failed"
    assert "layers.1.mlp.down_proj.weight" in found["reason"]
