# SPDX-License-Identifier: Apache-2.0
"""The reward functions that the keys name."""

from __future__ import annotations

import pytest

from tandem.config.check.rules import check_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.rewards import reward_spec
from tandem.errors import UserError

PATH = "custom_reward_function.path"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("reward.py", ("reward.py", "compute_score")),
        ("a/reward.py:correct", ("a/reward.py", "correct")),
        ("pkg://my.rewards:correct", ("pkg://my.rewards", "correct")),
        ("pkg://my.rewards", ("pkg://my.rewards", "compute_score")),
        ("my.rewards:correct", ("my.rewards:correct", "correct")),
    ],
)
def test_a_path_may_name_its_function(path: str, expected: tuple[str, str]) -> None:
    (function,) = reward_spec(load_config(RunConfig, [f"{PATH}='{path}'"]).config).functions
    assert (function.path, function.name) == expected


def test_weights_go_with_the_functions() -> None:
    keys = [f"{PATH}=[a.py:f,b.py:g]", "custom_reward_function.weights=[1,0.25]"]
    functions = reward_spec(load_config(RunConfig, keys).config).functions
    assert [(one.path, one.name, one.weight) for one in functions] == [
        ("a.py", "f", 1.0),
        ("b.py", "g", 0.25),
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            [f"{PATH}=[a.py,b.py]", "custom_reward_function.weights=[1]"],
            r"=\[1\.0\]: must have one",
        ),
        (["reward.reward_manager.name=batch"], "reward_manager='batch': needs a function"),
    ],
)
def test_keys_that_contradict_each_other(keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_run(load_config(RunConfig, keys).config)
