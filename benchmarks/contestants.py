"""The processes of one contestant of a benchmark, each waiting for its next step; contestants take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable


class Contestant:
    """`script --worker name` on `world` processes, which answers each line of input with a line of JSON."""

    def __init__(self, script: str, name: str, world: int, threads: int, port: int) -> None:
        self.name, self.world, self.threads = name, world, threads
        base = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        base |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, "--worker", name],
                env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        self.steps: list[list[dict[str, float]]] = []
        """Of each counted step, every process's answer."""

    def step(self, counted: bool) -> None:
        """One step of all processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("step\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        if counted:
            self.steps.append(answers)

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def answer(step: Callable[[], dict[str, float]]) -> None:
    """A worker's loop: a step for each line of standard input."""
    for _ in sys.stdin:
        print(json.dumps(step()), flush=True)
