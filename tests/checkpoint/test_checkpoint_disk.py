"""Disks that are full, that may not be written, that fail late: the save fails, says so, and costs nothing else."""

import os
import resource
import signal
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from checkpoint_cases import empty_like, header, same_bits, state, whole_boxes

from ultrascale.checkpoint import write
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import folder_name, latest
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.write import save


def save_step(root: Path, step: int) -> None:
    save(root / folder_name(step), whole_boxes(state(seed=step)), header(step))


def assert_only_step_5_is_there(root: Path) -> None:
    assert [path.name for path in root.iterdir()] == [folder_name(5)]
    loaded = empty_like(state())
    assert load(latest(root), whole_boxes(loaded)).step == 5
    assert all(same_bits(loaded[n], t) for n, t in state(seed=5).items())


def in_a_child(work) -> str:
    """What the CheckpointError says that the work raises in a process of its own, whose limits end with it."""
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            work()
        except CheckpointError as error:
            said = str(error)
        except BaseException as error:
            said = f"not a CheckpointError: {error!r}"
        finally:
            os.write(write_end, said.encode()[:4000])
            os._exit(0)
    os.close(write_end)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("room", [0, 100, 1000])
def test_where_no_more_can_be_written_the_save_fails_by_name_and_leaves_nothing(tmp_path, room):
    save_step(tmp_path, 5)

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does: the write fails, the process lives
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        save_step(tmp_path, 10)

    said = in_a_child(work)
    assert said.startswith("the checkpoint was not saved: ")
    assert "File too large" in said
    assert_only_step_5_is_there(tmp_path)


def test_a_folder_that_may_not_be_written_is_refused_by_name():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save_step(root, 5)
        os.chmod(root, 0o555)

        def work():
            if os.getuid() == 0:
                os.setuid(65534)  # root may write everywhere
            save_step(root, 10)

        said = in_a_child(work)
        os.chmod(root, 0o755)
        assert "the checkpoint was not saved: PermissionError" in said
        assert name in said
        assert_only_step_5_is_there(root)


def test_what_the_disk_refuses_while_more_is_written_is_not_lost(tmp_path, monkeypatch):
    """The system tells of a failure once: to the thread that syncs on the way, and not to the sync at the end."""
    save_step(tmp_path, 5)
    monkeypatch.setattr(write, "FLUSHED_BYTES", 1)

    def refuses(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", refuses)
    with pytest.raises(CheckpointError, match=r"not saved.*Input/output error"):
        save_step(tmp_path, 10)
    assert_only_step_5_is_there(tmp_path)


def test_no_file_is_closed_while_it_is_synced_beside(tmp_path, monkeypatch):
    """A sync that is still under way when a write fails would be of whatever file has the number next."""
    save_step(tmp_path, 5)
    monkeypatch.setattr(write, "FLUSHED_BYTES", 1)
    failed, states, fdatasync = threading.Event(), [], os.fdatasync

    def slow(descriptor):
        failed.wait(5)
        states.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    def probe(at):
        if at == "sync":
            failed.set()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", slow)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / folder_name(10), whole_boxes(state()), header(10), probe=probe)
    assert states
    assert_only_step_5_is_there(tmp_path)


def test_the_disk_is_busy_before_the_last_byte_is_written(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(write, "FLUSHED_BYTES", 1 << 10)
    fdatasync, fsync = os.fdatasync, os.fsync
    monkeypatch.setattr(os, "fdatasync", lambda d: (calls.append("on the way"), fdatasync(d))[1])
    monkeypatch.setattr(os, "fsync", lambda d: (calls.append("at the end"), fsync(d))[1])
    submit = write.ThreadPoolExecutor.submit

    def at_once(self, work, *args):
        done: Future = submit(self, work, *args)
        done.exception()  # waits
        return done

    monkeypatch.setattr(write.ThreadPoolExecutor, "submit", at_once)
    tensors = {f"t{i}": torch.randn(512) for i in range(8)}  # 2 KiB each
    save(tmp_path / folder_name(1), whole_boxes(tensors), header(1))
    assert calls[: calls.index("at the end")] == ["on the way"] * 8
