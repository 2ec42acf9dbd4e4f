"""Checkpoints that were tampered with, cannot be read or written, or are not made of files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import equal

import replicax as rx
from replicax.checkpoint import _manifest


def tampered(path: Path, change) -> None:
    """Change what the manifest says, and its checksum with it."""
    file = path / "manifest" / "metadata"
    written = json.loads(file.read_text())
    written["content"] = change(written["content"]) or written["content"]
    written["checksum"] = _manifest._checksum(written["content"])
    file.write_text(json.dumps(written))


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with everything in it, and what it can be restored into."""
    checkpoint = rx.Checkpoint(
        weight=rx.Variable(np.ones((2, 3), np.float32)),
        empty=np.zeros((0, 3), np.float32),
        key=jax.random.key(1),
        later=None,
        epoch=3,
        data=Counter(),
    )
    path = Path(checkpoint.save(tmp_path / "model"))
    checkpoint.weight.assign(np.zeros((2, 3)))
    return checkpoint, path


class Counter:
    """Something with a position."""

    def __init__(self) -> None:
        self.state = {"at": 1}

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


HOSTILE = {
    "content is a list": lambda c: [1],
    "content is a number": lambda c: 7,
    "no arrays": lambda c: c.pop("arrays") and None,
    "arrays are a list": lambda c: c.update(arrays=[1]),
    "an unknown field": lambda c: c.update(more=1),
    "saves is a word": lambda c: c.update(saves="many"),
    "saves is a truth value": lambda c: c.update(saves=True),
    "saves is infinite": lambda c: c.update(saves=float("inf")),
    "saves is negative": lambda c: c.update(saves=-1),
    "saves is huge": lambda c: c.update(saves=10**400),
    "no workers": lambda c: c.update(workers=0),
    "run_calls is a list": lambda c: c.update(run_calls=[]),
    "a value is a list": lambda c: c["values"].update(later=[1, 2]),
    "a value is a dict": lambda c: c["values"].update(later={"a": 1}),
    "values are None": lambda c: c.update(values=None),
    "no states": lambda c: c["positions"]["data"].update(states=[]),
    "states of others": lambda c: c["positions"]["data"].update(states=[1, 2]),
    "states are a word": lambda c: c["positions"]["data"].update(states="x"),
    "shared is a number": lambda c: c["positions"]["data"].update(shared=1),
    "a position is None": lambda c: c["positions"].update(data=None),
    "a shape is a word": lambda c: c["arrays"]["weight"].update(shape="23"),
    "a shape of floats": lambda c: c["arrays"]["weight"].update(shape=[2.0, 3.0]),
    "a shape of a huge number": lambda c: c["arrays"]["weight"].update(shape=[10**30]),
    "a negative shape": lambda c: c["arrays"]["weight"].update(shape=[-2, -3]),
    "no shape": lambda c: c["arrays"]["weight"].pop("shape") and None,
    "a dtype is a number": lambda c: c["arrays"]["weight"].update(dtype=4),
    "a checksum is a word": lambda c: c["arrays"]["weight"].update(checksum="x"),
    "no checksum": lambda c: c["arrays"]["weight"].update(checksum=None),
    "optional is a word": lambda c: c["arrays"]["weight"].update(optional="no"),
    "keys are a number": lambda c: c["arrays"]["key"].update(keys=3),
    "keys of an unknown kind": lambda c: c["arrays"]["key"].update(keys="x"),
    "keys of another kind": lambda c: c["arrays"]["key"].update(keys="rbg"),
    "an array is None": lambda c: c["arrays"].update(weight=None),
    "another array without elements": lambda c: c["arrays"]["empty"].update(keys="x"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_manifest_that_was_tampered_with_is_refused(saved, how):
    checkpoint, path = saved
    tampered(path, HOSTILE[how])
    with pytest.raises(rx.errors.InvalidCheckpoint, match="cannot be restored"):
        checkpoint.restore(path)
    equal(checkpoint.weight, np.zeros((2, 3)))
    assert checkpoint.save_counter == 1


def test_a_file_of_orbax_that_is_missing_is_damage(saved):
    checkpoint, path = saved
    (Path(path) / "manifest" / "metadata").unlink()
    with pytest.raises(rx.errors.InvalidCheckpoint, match="cannot be restored"):
        checkpoint.restore(path)
    equal(checkpoint.weight, np.zeros((2, 3)))


def test_an_array_is_what_the_manifest_says(tmp_path):
    """The numbers, and so their checksum, are the same."""
    path = Path(rx.Checkpoint(a=np.ones((2, 3), np.float32)).save(tmp_path / "model"))
    tampered(path, lambda c: c["arrays"]["a"].update(shape=[3, 2]))
    checkpoint = rx.Checkpoint(a=np.zeros((3, 2), np.float32))
    with pytest.raises(
        rx.errors.InvalidCheckpoint,
        match=r"'a' is float32\[2, 3\], and float32\[3, 2\] by the manifest",
    ):
        checkpoint.restore(path)
    equal(checkpoint.a, np.zeros((3, 2)))


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000], ids=["deep", "5,000 digits"])
def test_a_manifest_that_python_cannot_read(saved, text):
    checkpoint, path = saved
    (path / "manifest" / "metadata").write_text(text)
    with pytest.raises(rx.errors.InvalidCheckpoint, match="its manifest cannot be read"):
        checkpoint.restore(path)


def test_a_number_of_thousands_of_digits_is_refused_before_it_is_saved(tmp_path):
    with pytest.raises(rx.errors.InvalidArgument, match="'n', a number of 16610 bits"):
        rx.Checkpoint(n=10**5000)
    rx.Checkpoint(n=10**3000).save(tmp_path / "model")


@pytest.mark.parametrize("file", ["manifest/metadata", "arrays/manifest.ocdbt", "arrays/more"])
def test_a_fifo_in_the_place_of_a_file_is_refused(saved, file):
    checkpoint, path = saved
    (path / file).unlink(missing_ok=True)
    os.mkfifo(path / file)
    with pytest.raises(rx.errors.InvalidCheckpoint, match=f"{file} in it is no file"):
        checkpoint.restore(path)


def test_links_in_a_checkpoint_are_followed(saved, tmp_path):
    checkpoint, path = saved
    moved = (path / "arrays").rename(tmp_path / "elsewhere")
    (path / "arrays").symlink_to(moved)
    (moved / "around").symlink_to(path)
    (moved / "nowhere").symlink_to("missing")
    checkpoint.restore(path)
    equal(checkpoint.weight, np.ones((2, 3)))


@pytest.mark.parametrize("name", ["ckpt.kept.json", "ckpt.kept.json.new"])
def test_a_fifo_in_the_place_of_the_record_of_what_is_kept(tmp_path, name):
    os.mkfifo(tmp_path / name)
    manager = rx.CheckpointManager(
        rx.Checkpoint(n=1), tmp_path, keep_checkpoint_every_n_hours=1, max_to_keep=1
    )
    with pytest.raises(rx.errors.CheckpointError, match=f"{name}"):
        manager.save()


@pytest.mark.parametrize(
    "text",
    [
        '{"kept": [Infinity], "since": 0}',
        '{"kept": "12", "since": 0}',
        '{"kept": [true], "since": 0}',
        '{"kept": [], "since": 1' + "0" * 400 + "}",
        '{"kept": [], "since": "x"}',
        "[" * 100_000,
    ],
    ids=["infinite", "word", "truth value", "huge", "no number", "deep"],
)
def test_a_record_of_what_is_kept_that_was_tampered_with(tmp_path, text):
    (tmp_path / "ckpt.kept.json").write_text(text)
    manager = rx.CheckpointManager(rx.Checkpoint(n=1), tmp_path, keep_checkpoint_every_n_hours=1)
    with pytest.raises(rx.errors.CheckpointError, match=r"ckpt\.kept\.json cannot be read"):
        _ = manager.checkpoints


def test_a_directory_in_the_place_of_that_record(tmp_path):
    (tmp_path / "ckpt.kept.json").mkdir()
    with pytest.raises(rx.errors.CheckpointError, match=r"ckpt\.kept\.json cannot be read"):
        _ = rx.CheckpointManager(rx.Checkpoint(n=1), tmp_path).checkpoints


@pytest.mark.parametrize("name", ["a.writing-b", "a.writing-", "a.deleted"])
def test_names_that_have_a_meaning_of_their_own_are_refused(tmp_path, name):
    checkpoint = rx.Checkpoint(n=1)
    for call in (
        lambda: checkpoint.save(tmp_path / name),
        lambda: checkpoint.write(tmp_path / name),
        lambda: rx.CheckpointManager(checkpoint, tmp_path, checkpoint_name=name),
    ):
        with pytest.raises(rx.errors.InvalidArgument, match=f"cannot be called '{name}'"):
            call()
    assert [path for path in tmp_path.iterdir() if ".writing-" not in path.name] == []
    # Writes of other arrays may have been under way still; the next save removes what they left.
    saved = rx.Checkpoint(weight=np.ones(2)).save(tmp_path / "model")
    assert [str(path) for path in tmp_path.iterdir()] == [saved]


def test_a_nul_in_a_path_is_refused(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    for call in (checkpoint.save, checkpoint.write, checkpoint.restore, rx.latest_checkpoint):
        with pytest.raises(rx.errors.InvalidArgument, match="cannot have a NUL"):
            call(f"{tmp_path}/a\0b")
    with pytest.raises(rx.errors.InvalidArgument, match="is a name"):
        rx.CheckpointManager(checkpoint, tmp_path, checkpoint_name="a\0b")


@pytest.fixture
def forbidden(monkeypatch):
    """Has the system refuse to say anything of a path; root may look at everything otherwise."""

    def forbid(path: Path) -> None:
        real = os.stat

        def stat(where, *args, **kwargs):
            if isinstance(where, (str, os.PathLike)) and Path(where).is_relative_to(path):
                raise PermissionError(13, "Permission denied", os.fspath(where))
            return real(where, *args, **kwargs)

        monkeypatch.setattr(os, "stat", stat)

    return forbid


def test_what_this_process_may_not_look_at_is_not_taken_for_nothing(tmp_path, forbidden):
    checkpoint = rx.Checkpoint(n=1)
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    path = Path(manager.save())
    forbidden(path)
    for call in (
        lambda: checkpoint.restore(path),
        lambda: checkpoint.write(path),
        lambda: rx.latest_checkpoint(tmp_path),
        lambda: manager.checkpoints,
        manager.restore_or_initialize,
    ):
        with pytest.raises(rx.errors.CheckpointError, match=r"PermissionError.*the right to read"):
            call()


@pytest.mark.parametrize("part", ["manifest", "arrays"])
def test_a_file_that_this_process_may_not_read_is_no_damage(saved, monkeypatch, part):
    from orbax.checkpoint import JsonCheckpointHandler, PyTreeCheckpointHandler

    def fail(*args, **kwargs):
        raise ValueError("Failed to open: Permission denied [os_error_code='13']")

    checkpoint, path = saved
    handler = JsonCheckpointHandler if part == "manifest" else PyTreeCheckpointHandler
    monkeypatch.setattr(handler, "restore", fail)
    with pytest.raises(rx.errors.CheckpointError, match=r"PermissionError: \[Errno 13\]") as raised:
        checkpoint.restore(path)
    assert not isinstance(raised.value, rx.errors.InvalidCheckpoint)
    assert isinstance(raised.value.__cause__, PermissionError)


def test_a_replacement_that_another_user_was_writing(tmp_path, monkeypatch):
    (tmp_path / "model.writing-0a1b" / "replaced").mkdir(parents=True)
    real = os.open

    def refuse(path, *args, **kwargs):
        if "model.writing-0a1b" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(rx.errors.CheckpointError, match=r"PermissionError.*the right to read"):
        rx.Checkpoint(n=1).read(tmp_path / "model")


def test_hooks_are_as_before_after_a_save(tmp_path):
    before = sys.unraisablehook
    rx.Checkpoint(n=1).save(tmp_path / "model")
    assert sys.unraisablehook is before


def test_leftovers_of_another_user_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "model-1.writing-0a1b").mkdir()
    (tmp_path / "model-2.writing-0a1b").write_text("no directory")
    real = os.open

    def refuse(path, *args, **kwargs):
        if "model-1.writing-0a1b" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    rx.Checkpoint(n=1).save(tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {
        "model-1",
        "model-1.writing-0a1b",
        "model-2.writing-0a1b",
    }


@pytest.mark.parametrize("size", [100, 20_000], ids=["metadata", "arrays"])
def test_a_failed_save_is_one_message(tmp_path, run_python, size):
    """A limit on the size of files fails writes like a disk that is full."""
    code = f"""
        import resource, signal, traceback
        import numpy as np, replicax as rx
        arrays = {{f"a{{i}}": np.random.default_rng(i).random(20_000) for i in range(8)}}
        checkpoint = rx.Checkpoint(**arrays)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
        try:
            checkpoint.save({str(tmp_path / "model")!r})
        except rx.errors.SaveFailed:
            traceback.print_exc()
    """
    told = run_python(code).stderr
    assert len(told.splitlines()) < 25, told
    assert "orbax" not in told
    last = told.splitlines()[-1]
    assert last.startswith("replicax.errors.SaveFailed: this process could not write")
    assert "model-1: OSError: [Errno 27] File too large. Earlier checkpoints" in last
    assert [path for path in tmp_path.iterdir() if ".writing-" not in path.name] == []
    # Writes of other arrays may have been under way still; the next save removes what they left.
    saved = rx.Checkpoint(weight=np.ones(2)).save(tmp_path / "model")
    assert [str(path) for path in tmp_path.iterdir()] == [saved]


def test_another_failure_of_a_save_keeps_its_traceback(tmp_path, monkeypatch):
    def fail(*args):
        raise TypeError("a mistake\nwith details")

    monkeypatch.setattr("replicax.checkpoint._files.write", fail)
    with pytest.raises(rx.errors.SaveFailed, match=r"TypeError: a mistake\. Earlier") as raised:
        rx.Checkpoint(n=1).save(tmp_path / "model")
    assert raised.value.__cause__ is not None
    assert raised.value.__cause__.__traceback__ is not None
