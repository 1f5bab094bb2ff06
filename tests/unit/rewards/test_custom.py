# SPDX-License-Identifier: Apache-2.0
"""Loading reward functions by file and name."""

from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.rewards.custom import CustomReward, load_custom_reward

GOOD = """
import neighbour

def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    return neighbour.VALUE * weight

async def slow(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def narrow(solution_str, ground_truth):
    return 1.0
"""


@pytest.fixture
def good_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.path", ["/elsewhere"])
    (tmp_path / "neighbour.py").write_text("VALUE = 2\n")
    file = tmp_path / "reward.py"
    file.write_text(GOOD)
    return str(file)


def test_function_with_options_and_a_neighbour(good_file: str):
    function = load_custom_reward(CustomReward(good_file, "compute_score", {"weight": 3.0}))
    assert function("s", "x", "y", {}, weight=3.0) == 6.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("score", {}, r"custom_reward_function\.name='score'.*compute_score, slow, narrow"),
        ("narrow", {}, r"custom_reward_function\.name='narrow'.*data_source"),
        ("slow", {"weight": 1}, r"custom_reward_function\.name='slow'.*weight"),
    ],
)
def test_wrong_name_or_parameters(
    good_file: str, name: str, options: dict[str, object], message: str
):
    with pytest.raises(UserError, match=message):
        load_custom_reward(CustomReward(good_file, name, options))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = undefined_name\n", r"NameError: name 'undefined_name'.*\(reward\.py:2\)"),
        ("def broken(:\n", "SyntaxError"),
        ("import not_there\n", "ModuleNotFoundError: No module named 'not_there'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("open('/not/there')\n", "FileNotFoundError"),
    ],
)
def test_file_that_does_not_import(tmp_path: Path, source: str, message: str):
    file = tmp_path / "reward.py"
    file.write_text(source)
    with pytest.raises(
        UserError, match=rf"custom_reward_function\.path=.*does not import.*{message}"
    ) as caught:
        load_custom_reward(CustomReward(str(file), "compute_score"))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"custom_reward_function\.path=.*no such file"):
        load_custom_reward(CustomReward(str(tmp_path / "gone.py"), "compute_score"))


def test_missing_module():
    with pytest.raises(UserError, match=r"pkg://not\.there.*ModuleNotFoundError"):
        load_custom_reward(CustomReward("pkg://not.there", "compute_score"))
