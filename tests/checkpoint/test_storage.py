"""Checkpoints on storage: whole or not there, the same bits back, and what fails is tried again and then said."""

import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import fsspec
import pytest
from checkpoint_cases import empty_like, header, same_bits, state, whole_boxes
from fsspec.implementations.memory import MemoryFileSystem

from ultrascale.checkpoint import storage as storages
from ultrascale.checkpoint import upload
from ultrascale.checkpoint.boxes import CheckpointError
from ultrascale.checkpoint.folder import folder_name
from ultrascale.checkpoint.read import load
from ultrascale.checkpoint.storage import Storage, Unreachable
from ultrascale.checkpoint.upload import Uploads
from ultrascale.checkpoint.write import save


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A place on a storage in memory, and on one that is a folder."""
    found = f"memory://{uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path / 'remote' / 'run'}"
    yield found
    files, path = fsspec.core.url_to_fs(found)
    if files.exists(path):
        files.rm(path, recursive=True)


@pytest.fixture
def local(tmp_path):
    """Two checkpoints."""
    for step in (5, 10):
        save(tmp_path / "local" / folder_name(step), whole_boxes(state(seed=step)), header(step))
    return tmp_path / "local"


def holds(folder: Path, step: int) -> bool:
    loaded = empty_like(state())
    assert load(folder, whole_boxes(loaded)).step == step
    return all(same_bits(loaded[n], t) for n, t in state(seed=step).items())


def at_once(url: str) -> Storage:
    return Storage(url, pause=lambda seconds: None)


def test_what_is_put_there_comes_back_bit_for_bit_under_its_name(url, local, tmp_path):
    storage = at_once(url)
    assert storage.names() == []
    assert storage.put(local / folder_name(5))
    assert storage.put(local / folder_name(10))
    assert not storage.put(local / folder_name(10)), "it is there already"
    assert list(storage.whole_ones()) == storage.names() == [folder_name(10), folder_name(5)]
    back = storage.fetch(folder_name(5), tmp_path / "back")
    assert back == tmp_path / "back" / folder_name(5)
    assert holds(back, 5)
    assert {p.name: p.read_bytes() for p in back.iterdir()} == {
        p.name: p.read_bytes() for p in (local / folder_name(5)).iterdir()
    }


def calls_that_write(monkeypatch, stop: int = 99) -> list[str]:
    """The names of files in the order in which storage in memory is told to write or remove them; a call beyond `stop`
    fails, as if the process had died there."""
    seen: list[str] = []
    for name in ("put_file", "pipe_file", "rm", "rm_file"):
        original = getattr(MemoryFileSystem, name)

        def call(self, *args, _name=name, _original=original, **kwargs):
            path = args[1] if _name == "put_file" else args[0]
            if len(seen) >= stop:
                raise KeyboardInterrupt
            seen.append(f"{_name} {path.rsplit('/', 1)[-1]}")
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, name, call)
    return seen


def test_the_manifest_is_put_last_and_taken_first(local, monkeypatch):
    storage = at_once(f"memory://{uuid4().hex}")
    seen = calls_that_write(monkeypatch)
    storage.put(local / folder_name(5))
    assert seen == ["put_file rank-00000.safetensors", "pipe_file manifest.json"]
    storage.put(local / folder_name(10))
    seen.clear()
    assert storage.retain(1, None) == [folder_name(5)]
    assert seen[0] == "rm_file manifest.json"


@pytest.mark.parametrize("calls", [0, 1])
def test_a_copy_that_dies_on_the_way_is_no_checkpoint_and_the_next_one_mends_it(local, monkeypatch, calls, tmp_path):
    storage = at_once(f"memory://{uuid4().hex}")
    storage.put(local / folder_name(5))
    with monkeypatch.context() as patched:
        calls_that_write(patched, calls)
        with pytest.raises(KeyboardInterrupt):
            storage.put(local / folder_name(10))
    assert storage.names() == [folder_name(5)]
    storage.put(local / folder_name(10))
    assert storage.names()[0] == folder_name(10)
    assert holds(storage.fetch(folder_name(10), tmp_path / "back"), 10)


@pytest.mark.parametrize("harm", ["flipped bit", "cut", "missing", "swapped", "edited manifest"])
def test_what_is_damaged_there_is_refused_by_name_and_leaves_nothing_here(local, tmp_path, harm):
    url = f"memory://{uuid4().hex}"
    storage, name, file = at_once(url), folder_name(10), "rank-00000.safetensors"
    storage.put(local / folder_name(5))
    storage.put(local / name)
    files, root = fsspec.core.url_to_fs(url)
    data = files.cat_file(f"{root}/{name}/{file}")
    if harm == "flipped bit":
        files.pipe_file(f"{root}/{name}/{file}", data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    elif harm == "cut":
        files.pipe_file(f"{root}/{name}/{file}", data[:-1])
    elif harm == "missing":
        files.rm_file(f"{root}/{name}/{file}")
    elif harm == "swapped":
        files.pipe_file(f"{root}/{name}/{file}", files.cat_file(f"{root}/{folder_name(5)}/{file}"))
    else:
        text = files.cat_file(f"{root}/{name}/manifest.json")
        files.pipe_file(f"{root}/{name}/manifest.json", text.replace(b'"step": 10', b'"step": 11'))
    with pytest.raises(CheckpointError, match=f"{name}.*(safetensors|manifest)"):
        storage.fetch(name, tmp_path / "back")
    assert list((tmp_path / "back").glob("*")) == []
    assert holds(storage.fetch(folder_name(5), tmp_path / "back"), 5)


def test_retention_there_follows_the_same_rule_and_counts_only_whole_ones(local, url):
    storage = at_once(url)
    for step in (15, 20, 25):
        save(local / folder_name(step), whole_boxes(state(seed=step)), header(step))
    for step in (5, 10, 15, 20, 25):
        storage.put(local / folder_name(step))
    files, root = fsspec.core.url_to_fs(url)
    files.rm_file(f"{root}/{folder_name(25)}/rank-00000.safetensors")
    assert storage.retain(1, 10) == [folder_name(5), folder_name(15)]
    assert storage.names() == [folder_name(25), folder_name(20), folder_name(10)]
    assert storage.retain(None, None) == []


def test_after_a_run_went_back_its_old_future_is_no_checkpoint_and_the_new_one_takes_its_place(local, url, tmp_path):
    storage = at_once(url)
    for step in (5, 10):
        storage.put(local / folder_name(step))
    assert storage.set_aside_after(5) == [folder_name(10)]
    assert storage.names() == [folder_name(5)]
    shutil.rmtree(local / folder_name(10))
    save(local / folder_name(10), whole_boxes(state(seed=77)), header(10))
    assert storage.put(local / folder_name(10))
    back = storage.fetch(folder_name(10), tmp_path / "back")
    loaded = empty_like(state())
    load(back, whole_boxes(loaded))
    assert all(same_bits(loaded[n], t) for n, t in state(seed=77).items())


def test_another_checkpoint_of_the_same_step_replaces_what_is_there(local, url, tmp_path):
    storage = at_once(url)
    storage.put(local / folder_name(10))
    other = tmp_path / "other" / folder_name(10)
    save(other, whole_boxes(state(seed=3)), header(10))
    assert storage.put(other)
    loaded = empty_like(state())
    load(storage.fetch(folder_name(10), tmp_path / "back"), whole_boxes(loaded))
    assert all(same_bits(loaded[n], t) for n, t in state(seed=3).items())


@pytest.mark.parametrize("failures", [1, len(storages.PAUSES)])
def test_storage_that_is_away_for_a_while_is_tried_again(local, monkeypatch, failures):
    pauses, left = [], [failures]
    original = MemoryFileSystem.put_file

    def put_file(self, *args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError("connection reset")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    storage = Storage(f"memory://{uuid4().hex}", pause=pauses.append)
    assert storage.put(local / folder_name(5))
    assert pauses == list(storages.PAUSES[:failures])
    assert storage.names() == [folder_name(5)]


def test_storage_that_stays_away_is_said(local, monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: (_ for _ in ()).throw(OSError("no route")))
    with pytest.raises(Unreachable, match=r"memory://.*cannot write step-00000005/rank.*no route"):
        at_once(f"memory://{uuid4().hex}").put(local / folder_name(5))


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("no-such://x", r"knows no storage no-such://; use a URL as s3://"),
        ("s3://bucket/run", r"a package is missing .*; run: pip install 'fsspec\[s3\]'"),
        ("dbfs://x", r"a package is missing .*; run: pip install requests"),
    ],
)
def test_a_kind_of_storage_that_is_not_here_is_named_with_the_way_to_it(url, named, monkeypatch):
    for module in ("s3fs", "requests"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.dbfs", raising=False)
    with pytest.raises(CheckpointError, match=named):
        storages.open_storage(url)


# ---- beside training -------------------------------------------------------------------------------------------------


def held(monkeypatch) -> SimpleNamespace:
    """Storage whose first copy waits until it is let go."""
    gate = SimpleNamespace(begun=threading.Event(), go=threading.Event())
    original = Storage.put

    def put(self, folder):
        gate.begun.set()
        assert gate.go.wait(30)
        return original(self, folder)

    monkeypatch.setattr(Storage, "put", put)
    return gate


def test_where_storage_is_slower_than_saves_the_newest_and_the_milestones_get_there(local, monkeypatch):
    news: list[upload.News] = []
    gate = held(monkeypatch)
    for step in (15, 20, 25):
        save(local / folder_name(step), whole_boxes(state(seed=step)), header(step))
    uploads = Uploads(f"memory://{uuid4().hex}", None, 10, news.append)
    uploads.add(local / folder_name(5))
    assert gate.begun.wait(30)
    for step in (10, 15, 20, 25):
        uploads.add(local / folder_name(step))
    assert uploads.pending() == [folder_name(step) for step in (5, 10, 20, 25)], "none of these may be removed"
    gate.go.set()
    uploads.wait()
    assert uploads.pending() == []
    assert [(n.event, n.fields["step"]) for n in news] == [
        ("upload_skipped", 15), *(("upload", step) for step in (5, 10, 20, 25))
    ]  # fmt: skip
    uploads.close()


def test_a_copy_that_fails_is_news_and_the_next_one_is_tried(local, monkeypatch):
    monkeypatch.setattr(storages, "PAUSES", ())
    news: list[upload.News] = []
    uploads = Uploads(f"memory://{uuid4().hex}", 1, None, news.append)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("denied")))
        uploads.add(local / folder_name(5))
        uploads.wait()
    uploads.add(local / folder_name(10))
    uploads.wait()
    uploads.close()
    assert [(n.event, n.fields["step"]) for n in news] == [("upload_failed", 5), ("upload", 10)]
    assert "denied" in news[0].fields["reason"]
    assert "step 5 is not on storage" in news[0].notice


def test_what_waits_for_another_attempt_is_broken_off_at_the_end(local, monkeypatch):
    begun = threading.Event()

    def put_file(self, *_, **__):
        begun.set()
        raise OSError("no route")

    monkeypatch.setattr(storages, "PAUSES", (3600.0,))
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    uploads = Uploads(f"memory://{uuid4().hex}", None, None, lambda news: None)
    uploads.add(local / folder_name(5))
    assert begun.wait(30)
    uploads.close()
    uploads._thread.join(30)
    assert not uploads._thread.is_alive()
