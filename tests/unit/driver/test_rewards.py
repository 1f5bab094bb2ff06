# SPDX-License-Identifier: Apache-2.0
"""The reward functions that the keys name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tandem.config.check.rules import check_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.data.rendering import PromptEntry, PromptRow
from tandem.driver.rewards import check_own_rewards, check_rewards, reward_spec
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


OWN_REWARDS = {
    f"{PATH}=a.py": rf"{PATH}=\[a.py\]",
    "reward_model.enable=True": "reward_model.enable=True",
    "reward_model.reward_manager=dapo reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
    "reward_model.reward_kwargs.overlong_buffer_cfg.len=100": (
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"
    ),
}


@pytest.mark.parametrize("keys", OWN_REWARDS)
def test_keys_of_rewards_have_an_effect_beside_agents_that_give_their_own(
    keys: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(RunConfig, keys.split()).config
    game, single = (PromptRow(0, "s", "1", {}, [], agent) for agent in ("game", ""))

    def check(*rows: PromptRow, own: bool = True) -> None:
        check_own_rewards(config, train=rows, validation=(), gives_reward={"game": own})

    with pytest.raises(
        UserError, match=f"{OWN_REWARDS[keys]}: has no effect, .*\\(game\\)"
    ) as caught:
        check(game, game)
    assert "\n" not in str(caught.value)
    check(single)
    check(game, own=False)
    assert not caplog.records
    check(game, single)
    (warning,) = caplog.messages
    assert "no effect on rows of the agents game" in warning


READERS = """
import os

def looks(data_source, solution_str, ground_truth, extra_info):
    return 1 / (not {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"} & os.environ.keys())

def needs(data_source, solution_str, ground_truth, extra_info):
    return float(len(os.environ["JUDGE_KEY"]))
"""
AT_IMPORT = "import os\nKEY = os.environ['JUDGE_KEY']\ndef needs(*_, **__): return 1.0\n"


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "readers.py").write_text(READERS)
    (tmp_path / "at_import.py").write_text(AT_IMPORT)
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    return tmp_path


def check(function: Path | str, *keys: str) -> None:
    config = load_config(RunConfig, [f"{PATH}={function}", *keys]).config
    row = PromptEntry(0, "my/task", "4", {}, "2+2?", "2+2?", np.zeros(1, np.int32))
    check_rewards(config, [row])


def test_a_reward_sees_no_secrets_but_those_that_are_named(readers: Path) -> None:
    check(f"{readers}/readers.py:looks")
    check(f"{readers}/readers.py:needs", "reward.environment=JUDGE_KEY")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        check(f"{readers}/readers.py:looks", "reward.environment=[WANDB_*]")


@pytest.mark.parametrize("file", ["readers.py", "at_import.py"])
def test_a_reward_that_misses_a_variable_is_told_what_to_name(readers: Path, file: str) -> None:
    with pytest.raises(UserError) as raised:
        check(f"{readers}/{file}:needs")
    message = str(raised.value)
    assert f"KeyError: 'JUDGE_KEY' ({file}:" in message
    assert "reward.environment=[JUDGE_KEY]" in message
    assert "secret" not in message


PARTS = """
def parts(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "right": 1.0, "form": 0.5}
"""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[right,style]"],
            "algorithm.gdpo_reward_keys='style': .*it has: score, right, form",
        ),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"],
            "algorithm.filter_groups.metric='acc': the reward of the first row has no number",
        ),
    ],
)
def test_numbers_that_the_reward_lacks_are_missed_before_the_start(
    tmp_path: Path, keys: list[str], message: str
) -> None:
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    with pytest.raises(UserError, match=message):
        check(f"{file}:parts", *keys)
    check(f"{file}:parts", keys[0], "algorithm.gdpo_reward_keys=[right,score]")
