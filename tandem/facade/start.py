# SPDX-License-Identifier: Apache-2.0
"""``tandem.train`` and ``tandem.sft``: Python objects become files and keys, and the run of the
command line follows.

They block until the run has ended, in a script, a thread, or where an event loop is running. Errors
are raised, and nothing here ends the process.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.config.parse.overrides import LoadedConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver import sft as supervised
from tandem.driver import train as reinforcement
from tandem.driver.arguments import load_runnable
from tandem.driver.execution import StopSwitch
from tandem.driver.notices import notices
from tandem.driver.restarts import Restarts, failure_of
from tandem.driver.run import Observer
from tandem.driver.streams import open_closed_streams
from tandem.errors import UserError
from tandem.facade.callback import CallbackSink, OnStep, StopTraining, require_callback
from tandem.facade.functions import Rewards, reward_keys
from tandem.facade.keys import flat_keys, joined_keys
from tandem.facade.rows import IMAGE_KEY, Data, unwritable, write_data
from tandem.facade.run import Run, absolute

logger = logging.getLogger(__name__)

_FOLDER = "trainer.default_local_dir"
_FREQUENCY = "trainer.test_freq"
_LAST_STEP = 1_000_000_000
"""More steps than any run has, of which the last one alone is validated."""
_OUTPUTS = Path("outputs")


class Interrupted(KeyboardInterrupt):
    """The end of a run by a signal, after it has saved its last step.

    Attributes:
        run: the handle of the run.
        signal_number: the signal.
    """

    def __init__(self, run: Run, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(
            f"{name}: the run was saved in {run.folder}; the same call with folder="
            f"{str(run.folder)!r} continues it"
        )
        self.run = run
        self.signal_number = signal_number


def train(
    *,
    model: str | os.PathLike[str],
    data: Data,
    validation: Data | float | None = None,
    rewards: Rewards | None = None,
    on_step: OnStep | None = None,
    keys: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Run:
    """Train a model by reinforcement, as ``tandem train`` does; docs/python.md has examples.

    Args:
        model: a Hugging Face folder, or a name on the hub.
        data: rows (mappings with prompt and ground_truth, or of verl's schema), or paths.
        validation: rows, paths, or the share of ``data`` to validate on.
        rewards: a function, a list of functions, or functions by name; each may be a pair with its
            weight. None: the built-in rule of each row's data_source.
        on_step: called after each step with ``StepMetrics``. It may raise ``StopTraining``.
        keys: keys of ``tandem train`` with their values.
        folder: the run folder; a run in it is continued. None: a new folder in ``outputs``.

    Raises:
        UserError: an argument, the data or the model cannot be used.
        RunFailure: a process of the run failed.
        Interrupted: a signal ended the run, after it was saved.
    """
    open_closed_streams()
    require_callback(on_step)
    given, model_path = flat_keys(RunConfig, keys), _model_path(model)
    run_folder = claim_folder("train", given, folder=folder)
    image_key = str(given.get("data.image_key", IMAGE_KEY))
    files, held_out = write_data(data, validation, folder=run_folder, image_key=image_key)
    own = {
        "actor_rollout_ref.model.path": model_path,
        **data_keys(files, held_out, given=given),
        **({} if rewards is None else reward_keys(rewards, folder=run_folder)),
    }
    loaded = load_runnable(RunConfig, (), values=_in_folder(given, own, folder=run_folder))
    return _run(loaded, reinforcement.run, on_step=on_step)


def sft(
    *,
    model: str | os.PathLike[str],
    data: Data,
    validation: Data | float | None = None,
    on_step: OnStep | None = None,
    keys: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Run:
    """Fine-tune a model on demonstrations, as ``tandem sft`` does.

    The arguments and errors are those of ``train``. Rows have the columns that ``data.prompt_key``
    and ``data.response_key`` name, or conversations with ``data.multiturn.enable``.
    """
    open_closed_streams()
    require_callback(on_step)
    given, model_path = flat_keys(SftConfig, keys), _model_path(model)
    run_folder = claim_folder("sft", given, folder=folder)
    image_key = str(given.get("data.image_key", IMAGE_KEY))
    files, held_out = write_data(data, validation, folder=run_folder, image_key=image_key)
    own = {"model.path": model_path, **data_keys(files, held_out, given=given)}
    loaded = load_runnable(SftConfig, (), values=_in_folder(given, own, folder=run_folder))
    return _run(loaded, supervised.run, on_step=on_step)


def _model_path(model: str | os.PathLike[str]) -> str:
    if not isinstance(model, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = "Give a Hugging Face folder, or a name on the hub."
        raise UserError("model", model, rule="is neither a path nor a name", remedy=remedy)
    return os.fspath(model)


def data_keys(files: list[str], held_out: list[str], *, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the files, and one by which rows to validate on are used at the end."""
    is_unused = held_out and _FREQUENCY not in given and not given.get("trainer.val_only")
    return {
        "data.train_files": files,
        "data.val_files": held_out,
        **({_FREQUENCY: _LAST_STEP} if is_unused else {}),
    }


def claim_folder(
    command: str, given: Mapping[str, Any], *, folder: str | os.PathLike[str] | None
) -> Path:
    """Return the absolute path of the folder of the run, as the program may change its directory.

    If neither argument nor key names one, make a new one, which no other run that starts in this
    moment gets.
    """
    named = given.get(_FOLDER) if folder is None else folder
    if named is not None:
        return absolute(named)
    stem = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(1):
        path = absolute(_OUTPUTS) / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(path, error) from error
    raise AssertionError("the numbers never end")


def _in_folder(given: Mapping[str, Any], own: Mapping[str, Any], *, folder: Path) -> dict[str, Any]:
    """Return all keys of a run in ``folder``, which the arguments and ``keys`` may both name."""
    named = given.get(_FOLDER)
    if named is not None and absolute(named) != folder:
        remedy = "Leave one of them out."
        raise UserError(_FOLDER, named, rule="folder names another one", remedy=remedy)
    return joined_keys(given, own) | {_FOLDER: str(folder)}


def _run(loaded: LoadedConfig[Any], start: Callable[..., int], *, on_step: OnStep | None) -> Run:
    for notice in notices(loaded):
        logger.warning("%s", notice)
    switch = StopSwitch()
    sink = CallbackSink(on_step, switch)
    config, restarts = loaded.config, Restarts(loaded.config)
    while config is not None:
        config = _start(config, start, observer=Observer((sink,), switch, restarts))
    run = Run(loaded.config.trainer.run_folder)
    if sink.error is not None and not isinstance(sink.error, StopTraining):
        sink.error.add_note(f"on_step raised this. The run was saved in {run.folder}.")
        raise sink.error
    if switch.signal_number is not None:
        raise Interrupted(run, switch.signal_number)
    return run


def _start(config: Any, start: Callable[..., int], *, observer: Observer) -> Any:
    """Run to the end; return None, or the configuration to start again with after a failure."""
    restarts = observer.restarts
    assert restarts is not None, "the caller gives them"
    try:
        start(config, observer=observer)
        return None
    except Exception as error:
        is_final = isinstance(error, UserError) or observer.switch.is_pressed
        failure = failure_of(error)
        following = None if is_final else restarts.after(failure)
        if following is None:
            raise
    logger.warning("the run failed: %s", failure.cause)
    restarts.write_records()
    gc.collect()  # what the failed start holds in cycles, on devices too
    return following
