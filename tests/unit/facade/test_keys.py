# SPDX-License-Identifier: Apache-2.0
"""Keys in sections and by their full names, beside other arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.facade.keys import flat_keys


def test_sections_are_taken_apart_wholly() -> None:
    kwargs = {"weight": 1}
    keys = {
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout.n": 4},
        "+data": {"train_batch_size": 8},
        "custom_reward_function": {"reward_kwargs": kwargs},
        "+mine.own": {"a": 1},
    }
    assert flat_keys(RunConfig, keys) == {
        "actor_rollout_ref.model.path": "m",
        "actor_rollout_ref.rollout.n": 4,
        "data.train_batch_size": 8,
        "custom_reward_function.reward_kwargs": kwargs,
        "+mine.own": {"a": 1},
    }
    assert flat_keys(RunConfig, None) == {}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {"train_batch_size": 4}, "data.train_batch_size": 8}, "=4: keys has the value 8"),
        ({"data.train_batch_size": 8, "+data.train_batch_size": 4}, "=8: keys has the value 4"),
        ("x=1", "keys='x=1': is not a mapping. Give a dict"),
        ({"data": {1: 2}}, "keys=1: is not a name"),
    ],
)
def test_what_is_not_keys_or_contradicts_itself_is_named(keys: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        flat_keys(RunConfig, keys)


def test_a_key_twice_with_one_value_is_one_key() -> None:
    keys = {"data": {"train_batch_size": 4}, "data.train_batch_size": 4}
    assert flat_keys(RunConfig, keys) == {"data.train_batch_size": 4}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {"train_files": "x"}}, "data.train_files='x': another argument sets this key"),
        ({"actor_rollout_ref": {"model": {"path": "x"}}}, "path='x': another argument sets this"),
        ({"+actor_rollout_ref.model.path": "x"}, "path='x': another argument sets this key too"),
        ({"trainer": {"default_local_dir": "x"}}, "dir='x': folder names another one"),
    ],
)
def test_a_key_may_not_be_an_argument_too(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        tandem.train(model="none", data="rows.jsonl", keys=keys, folder=tmp_path)


def test_the_folder_may_be_named_in_a_section(tmp_path: Path) -> None:
    keys = {"trainer": {"default_local_dir": str(tmp_path)}}
    with pytest.raises(UserError, match="path='none'"):
        tandem.train(model="none", data="rows.jsonl", rewards=len, keys=keys)
    assert (tmp_path / "inputs").is_dir()
