"""`python`, `torchrun` and `pytest` for the pages' commands, without the seconds that importing torch costs each time.

The programs stand first on PATH and hand their arguments, folder, environment and open files to a server that has
imported torch, which forks a process for each. It does there what the real ones do; the project's own modules are
imported afresh, from where PYTHONPATH says.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from pool import forking

PROGRAMS = {"python": [], "torchrun": ["-m", "torch.distributed.run"], "pytest": ["-m", "pytest"]}
CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([{first!r} + sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "little")], [0, 1, 2])
server.sendall(asked)
sys.exit(int.from_bytes(server.recv(1), "little"))
"""


@contextlib.contextmanager
def programs() -> Iterator[Path]:
    """A folder for PATH; its programs work until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="ultrascale-docs-"))  # pytest's own are too long for a socket's address
    address = str(folder / "socket")
    for name, first in PROGRAMS.items():
        (folder / name).write_text(CLIENT.format(python=sys.executable, address=address, first=first))
        (folder / name).chmod(0o755)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(16)
    server = forking().Process(target=_serve, args=(listening,))
    server.start()
    listening.close()
    try:
        yield folder
    finally:
        server.kill()
        server.join()
        shutil.rmtree(folder)


def _serve(listening: socket.socket) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the test run
    import torch.distributed.run  # noqa: F401 - the launcher's own imports

    gc.freeze()
    for name in [name for name in sys.modules if name.split(".")[0] == "ultrascale"]:
        del sys.modules[name]
    while True:
        client, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _attend(client)
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _attend(client: socket.socket) -> None:
    """Runs what a client asks for in a process of its own, which ends when the client does."""
    size, files, _, _ = socket.recv_fds(client, 8, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "little"):
        asked += client.recv(1 << 16)
    words, folder, environment = json.loads(asked)
    process = os.fork()
    if process == 0:
        client.close()
        _become(words, folder, environment, files)
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([ended, client], [], [])
    if ended not in ready:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        client.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _become(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """`python WORDS` as the client would have run it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = shutil.which("python") or sys.executable  # torchrun starts its workers with it
    code = 1
    try:
        _execute([word for word in words if word != "-u"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _execute(words: list[str]) -> None:
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    tests = str(Path(__file__).parent)
    installed = [entry for entry in sys.path if entry and not entry.startswith(tests)]
    sys.path[:] = [os.getcwd(), *own, *installed]
    importlib.invalidate_caches()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] in ("-c", "-"):
        text = words[1] if words[0] == "-c" else sys.stdin.read()
        sys.argv = [words[0], *words[1 + (words[0] == "-c") :]]
        exec(compile(text, "<page>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
