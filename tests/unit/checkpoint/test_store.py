# SPDX-License-Identifier: Apache-2.0
"""Checkpoints appear whole or not at all."""

import json
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore, open_checkpoint
from tandem.errors import UserError


def write(store: CheckpointStore, step: int, text: str = "weights") -> None:
    with store.writing(step, {"step": step}) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "w").write_text(text)


def test_latest_is_the_last_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    write(store, 2)
    write(store, 4)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.read_state()) == (4, {"step": 4})
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, max_to_keep=2)
    for step in (1, 2, 3):
        write(store, step)
    assert sorted(p.name for p in tmp_path.glob("global_step_*")) == [
        "global_step_2",
        "global_step_3",
    ]


def test_a_failure_while_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with (
        pytest.raises(UserError, match="step 2 could not be written .No space left"),
        store.writing(2, {}) as folder,
    ):
        (folder / "half").write_text("x")
        raise OSError("No space left on device")
    latest = store.latest()
    assert latest is not None and latest.step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "global_step_1",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_step_written_again_replaces_the_first(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1, "old")
    write(store, 1, "new")
    assert (tmp_path / "global_step_1" / "actor" / "w").read_text() == "new"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["global_step_3", "elsewhere"])
def test_opening_what_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"trainer.resume_from_path=.*not a checkpoint"):
        open_checkpoint(tmp_path / name)


def test_a_damaged_state_names_the_remedy(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    (tmp_path / "global_step_1" / "pipeline.json").write_text("{")
    latest = store.latest()
    assert latest is not None
    with pytest.raises(UserError, match="resume_mode=disable"):
        latest.read_state()


def test_what_a_killed_save_left_behind_is_cleared_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    for name in (".partial_step_2", ".replaced_step_1"):
        (tmp_path / name).mkdir()
    store.repair()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "global_step_1",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_checkpoint_that_was_being_replaced_returns(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    (tmp_path / "global_step_1").rename(tmp_path / ".replaced_step_1")
    store.repair()
    latest = store.latest()
    assert latest is not None and (latest.folder / "actor" / "w").read_text() == "weights"


@pytest.mark.parametrize("failing", ["rename", "tracker"])
def test_a_checkpoint_whose_replacement_fails_is_restored(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1, "old")
    if failing == "tracker":
        (tmp_path / "latest_checkpointed_iteration.partial").mkdir()
    with monkeypatch.context() as patch:
        if failing == "rename":
            refuse_second_rename(patch)
        with pytest.raises(UserError, match="step 1 could not be written .* earlier ones are kept"):
            write(store, 1, "new")
    latest = store.latest()
    assert latest is not None and (latest.folder / "actor" / "w").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def refuse_second_rename(patch: pytest.MonkeyPatch) -> None:
    rename, names = Path.rename, list[str]()

    def refuse_second(path: Path, target: Path) -> Path:
        names.append(path.name)
        if len(names) == 2:
            raise OSError("Input/output error")
        return rename(path, target)

    patch.setattr(Path, "rename", refuse_second)


def test_a_checkpoint_keeps_the_configuration_of_its_run(tmp_path: Path) -> None:
    write(CheckpointStore(tmp_path, config=json.dumps({"seed": 3})), 1)
    write(CheckpointStore(tmp_path), 2)
    ours, theirs = (open_checkpoint(tmp_path / f"global_step_{step}") for step in (1, 2))
    assert (ours.read_config(), theirs.read_config()) == ({"seed": 3}, None)


@pytest.mark.parametrize(("after_step", "kept"), [(-1, []), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_later_checkpoints_are_set_aside_with_a_tracker_of_their_own(
    after_step: int, kept: list[int], tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 4, 6):
        write(store, step)
    aside = tmp_path / "before"
    store.set_aside(aside, after_step=after_step)
    assert {path.name for path in tmp_path.glob("global_step_*")} == {
        f"global_step_{step}" for step in kept
    }
    latest, moved = store.latest(), CheckpointStore(aside).latest()
    assert (None if latest is None else latest.step) == (kept[-1] if kept else None)
    assert (None if moved is None else moved.step) == (6 if len(kept) < 4 else None)
    assert aside.exists() == (len(kept) < 4)


@pytest.mark.parametrize("content", [b"[]", b"null", b"3", b"\xff{}", b"[" * 100_000])
def test_a_state_that_is_not_an_object_is_refused(content: bytes, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    (tmp_path / "global_step_1" / "pipeline.json").write_bytes(content)
    with pytest.raises(UserError, match="pipeline.json cannot be read"):
        open_checkpoint(tmp_path / "global_step_1").read_state()


def test_a_new_run_sets_a_tracker_of_nonsense_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe")
    store.set_aside(tmp_path / "before", after_step=-1)
    assert store.latest() is None
    assert CheckpointStore(tmp_path / "before").latest() == open_checkpoint(
        tmp_path / "before" / "global_step_2"
    )


@pytest.mark.parametrize("content", [b"", b"x", b"\xff\xfe", b"3", b"1" * 300, b"1" * 5000])
def test_a_tracker_of_nonsense_is_one_line(content: bytes, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"holds no step number|which has no checkpoint") as error:
        store.latest()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["3", "[]", "null", "{", "[" * 200_000])
def test_settings_that_are_no_object_are_none(content: str, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 2)
    (tmp_path / "global_step_2/config.json").write_text(content)
    assert open_checkpoint(tmp_path / "global_step_2").read_config() is None


def test_a_folder_in_the_place_of_the_tracker_is_refused_and_a_new_run_sets_it_aside(
    tmp_path: Path,
) -> None:
    store, tracker = CheckpointStore(tmp_path), tmp_path / "latest_checkpointed_iteration.txt"
    write(store, 2)
    tracker.unlink()
    tracker.mkdir()
    (tracker / "note").write_text("kept")
    with pytest.raises(UserError, match="holds no step number.*trainer.resume_mode=disable"):
        store.latest()
    store.set_aside(tmp_path / "before", after_step=-1)
    assert store.latest() is None
    aside = CheckpointStore(tmp_path / "before").latest()
    assert aside == open_checkpoint(tmp_path / "before" / "global_step_2")
    assert (tmp_path / "before" / f"{tracker.name}.folder" / "note").read_text() == "kept"
    write(store, 1)
    assert store.latest() == open_checkpoint(tmp_path / "global_step_1")
