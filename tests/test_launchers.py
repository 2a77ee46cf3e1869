"""The launchers, with stand-ins on PATH for the programs of a cluster that are not on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

LAUNCHERS = Path(__file__).parents[1] / "launchers"
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "job",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "96",
}
# The step: writes down what it was asked for; ends at once (finished, crashed), or saves when scancel's TERM comes.
SRUN = """
echo "$@" >> "$LOG"
status() { mkdir -p runs/job; echo "{\\"state\\": \\"$END\\", \\"step\\": 3}" > runs/job/status.json; }
trap 'sleep 0.2; status; exit 1' TERM
echo $$ > step.pid
case "$END" in
    finished) status; exit 0 ;;
    crashed) exit 1 ;;
esac
while :; do sleep 0.05; done
"""
SCONTROL = """
if [ "$1" = show ]; then printf 'node1\\nnode2\\n'; else echo "scontrol $*" >> "$LOG"; fi
"""
SCANCEL = 'echo "scancel $*" >> "$LOG"; kill -TERM "$(cat step.pid)"\n'


def stand_ins(folder: Path, **programs: str) -> dict[str, str]:
    """An environment in which these shell programs come first."""
    binaries = folder / "bin"
    binaries.mkdir()
    for name, text in programs.items():
        (binaries / name).write_text("#!/usr/bin/env bash\n" + text)
        (binaries / name).chmod(0o755)
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "LOG": str(folder / "log")}


def slurm(folder: Path, end: str, out_of_time: bool, **more: str) -> tuple[int, str]:
    """Runs slurm.sbatch; `end` is what the run says of itself at its end. Returns exit code and what was called."""
    programs = stand_ins(folder, srun=SRUN, scontrol=SCONTROL, scancel=SCANCEL)
    environment = programs | SLURM | {"SLURM_SUBMIT_DIR": str(folder), "END": end} | more
    command = ["bash", str(LAUNCHERS / "slurm.sbatch"), "--config", "configs/debug.yaml", "run.steps=9"]
    with open(folder / "output", "w") as output:
        job = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 20
        while out_of_time and not (folder / "step.pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if out_of_time:
            job.send_signal(signal.SIGUSR1)
        code = job.wait(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert (folder / "log").exists(), (folder / "output").read_text()
    return code, (folder / "log").read_text()


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS.iterdir()), ids=lambda path: path.name)
def test_launcher_is_valid_shell(launcher: Path) -> None:
    subprocess.run(["bash", "-n", launcher], check=True)


def test_slurm_starts_one_torchrun_a_node_with_everything_that_was_said(tmp_path: Path) -> None:
    code, log = slurm(tmp_path, "finished", out_of_time=False)
    assert code == 0
    assert "torchrun --nnodes 2 --nproc-per-node 8" in log
    assert "--rdzv-endpoint node1:24711" in log
    assert "-m ultrascale.train --config configs/debug.yaml run.steps=9 run.dir=runs/job" in log
    assert "requeue" not in log


def test_slurm_lets_the_ranks_save_and_queues_the_job_again(tmp_path: Path) -> None:
    code, log = slurm(tmp_path, "stopped", out_of_time=True)
    assert code == 0
    assert log.splitlines()[-2:] == ["scancel --signal=TERM 4711.0", "scontrol requeue 4711"]


@pytest.mark.parametrize(
    ("end", "out_of_time", "restarts"), [("stopped", True, 3), ("failed", True, 0), ("crashed", False, 0)]
)
def test_slurm_does_not_queue_again_what_would_stop_again(
    tmp_path: Path, end: str, out_of_time: bool, restarts: int
) -> None:
    code, log = slurm(tmp_path, end, out_of_time, SLURM_RESTART_COUNT=str(restarts), RESTARTS="3")
    assert code != 0
    assert "requeue" not in log


@pytest.mark.parametrize(("processes", "expected"), [(None, "1"), ("4", "4")])
def test_local_starts_as_many_processes_as_asked(tmp_path: Path, processes: str | None, expected: str) -> None:
    environment = stand_ins(tmp_path, torchrun='echo "$@" > "$LOG"\n', **{"nvidia-smi": "exit 9\n"})
    environment |= {} if processes is None else {"PROCESSES": processes}
    command = [str(LAUNCHERS / "local.sh"), "--config", "configs/debug.yaml", "run.steps=9"]
    subprocess.run(command, env=environment, check=True)
    called = (tmp_path / "log").read_text()
    assert f"--nproc-per-node {expected} " in called
    assert called.strip().endswith("-m ultrascale.train --config configs/debug.yaml run.steps=9")
