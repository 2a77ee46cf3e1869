"""Disks that are full, that may not be written, that fail late: the save fails, says so, and costs nothing else."""

import io
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_cases import empty_like, header, same_bits, state, whole_boxes

from ultrascale.checkpoint import folder, write
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


def test_what_the_disk_refuses_at_the_end_is_no_checkpoint(tmp_path, monkeypatch):
    save_step(tmp_path, 5)

    def refuses(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuses)
    with pytest.raises(CheckpointError, match=r"not saved.*Input/output error"):
        save_step(tmp_path, 10)
    assert_only_step_5_is_there(tmp_path)


def test_a_system_that_takes_less_than_it_is_given_is_given_the_rest(tmp_path, monkeypatch):
    class Slow(io.FileIO):
        def write(self, data):
            return super().write(bytes(data[:1000]))

    monkeypatch.setattr(write, "open", lambda path, mode, buffering: Slow(path, mode.replace("b", "")), raising=False)
    save_step(tmp_path, 5)
    assert_only_step_5_is_there(tmp_path)


def test_the_disk_is_busy_before_the_last_byte_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "PIECE_BYTES", 1000)
    monkeypatch.setattr(folder, "LEAST_FLUSHED", 1000)
    calls, advise = [], os.posix_fadvise

    def advised(descriptor, start, count, advice):
        assert os.fstat(descriptor).st_size == start + count
        calls.append((start, count))
        advise(descriptor, start, count, advice)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    tensors = {f"t{i}": torch.randn(512) for i in range(8)}  # 2 KiB each
    save(tmp_path / folder_name(1), whole_boxes(tensors), header(1), probe=calls.append)
    flushed = [call for call in calls[: calls.index("sync")] if isinstance(call, tuple)]
    assert [count for _, count in flushed] == [1000] * 16  # of 2048, little is left to the sync
    assert [start - flushed[0][0] for start, _ in flushed] == [2048 * n + part for n in range(8) for part in (0, 1000)]
    assert calls.index(flushed[0]) < max(i for i, call in enumerate(calls) if call == "write")
