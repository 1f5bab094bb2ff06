# SPDX-License-Identifier: Apache-2.0
"""Loading reward functions by file and name, and their signatures."""

import pickle
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.rewards.custom import RewardFunction, Signature, load_function
from tandem.types import RewardRequest

GOOD = """
import neighbour

def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    return neighbour.VALUE * weight

async def slow(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def narrow(solution_str, ground_truth):
    return 1.0

def batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(solution) for solution in solution_strs]

def columns(prompts, completions, answer):
    return [completion[0]["content"] == right for completion, right in zip(completions, answer)]

class Judge:
    async def __call__(self, completions, **columns):
        return [sorted(columns)]

judge = Judge()
"""


@pytest.fixture
def good_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.path", ["/elsewhere"])
    (tmp_path / "neighbour.py").write_text("VALUE = 2\n")
    file = tmp_path / "reward.py"
    file.write_text(GOOD)
    return str(file)


def request(solution: str = "12") -> RewardRequest:
    chat = [{"role": "user", "content": "6 + 6?"}]
    return RewardRequest("my/task", solution, "12", {"answer": "12"}, 1, prompt=chat)


def test_function_with_options_and_a_neighbour(good_file: str):
    spec = RewardFunction(good_file, "compute_score", reward_kwargs={"weight": 3.0})
    function = load_function(spec)
    assert function.call(**function.arguments([request()])) == 6.0


def test_a_batch_function_gets_a_list_of_each_argument(good_file: str):
    function = load_function(RewardFunction(good_file, "batch"), needs_batch=True)
    assert function.signature is Signature.BATCH
    assert function.call(**function.arguments([request("a"), request("bcd")])) == [1, 3]


def test_a_function_of_trl_gets_messages_and_the_columns_that_it_takes(good_file: str):
    function = load_function(RewardFunction(good_file, "columns"))
    arguments = function.arguments([request("12"), request("13")])
    assert arguments["prompts"] == [[{"role": "user", "content": "6 + 6?"}]] * 2
    assert function.call(**arguments) == [True, False]
    assert not function.is_async


def test_an_object_that_is_called_may_be_asynchronous_and_take_every_column(good_file: str):
    function = load_function(RewardFunction(good_file, "judge"))
    assert function.is_async and function.signature is Signature.COLUMNS
    assert function.file == good_file
    known = {"answer", "completions", "data_source", "extra_info", "ground_truth", "prompts"}
    assert set(function.arguments([request()])) == known


def test_a_function_gets_what_it_names_if_one_is_the_response(tmp_path: Path):
    file = tmp_path / "named.py"
    file.write_text("def brief(response, bonus, **_): ...\ndef same(response, ground_truth): ...\n")
    brief = load_function(RewardFunction(str(file), "brief", reward_kwargs={"bonus": 1}))
    assert brief.signature is Signature.NAMED and not brief.takes_groups
    names = {"response", "prompt", "ground_truth", "extra_info", "data_source", "bonus"}
    assert set(brief.arguments([request()])) == names
    same = load_function(RewardFunction(str(file), "same"))
    assert set(same.arguments([request()])) == {"response", "ground_truth"}


def test_a_pickled_function_needs_no_name(tmp_path: Path):
    file = tmp_path / "length.pickle"
    file.write_bytes(pickle.dumps(request))
    with pytest.raises(UserError, match="'length': cannot be called with data_source"):
        load_function(RewardFunction(str(file), "length"))
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match="holds no function that can be loaded here"):
        load_function(RewardFunction(str(file), "length"))
    file.write_bytes(b"c__main__\nof_the_script\n.")
    with pytest.raises(UserError, match="Define in a module what the script itself defines"):
        load_function(RewardFunction(str(file), "length"))


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
        load_function(RewardFunction(good_file, name, reward_kwargs=options))


def test_a_function_of_one_response_is_no_batch_function(good_file: str):
    with pytest.raises(UserError, match=r"'slow': scores one response, .*solution_strs"):
        load_function(RewardFunction(good_file, "slow"), needs_batch=True)


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
        load_function(RewardFunction(str(file), "compute_score"))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"custom_reward_function\.path=.*no such file"):
        load_function(RewardFunction(str(tmp_path / "gone.py"), "compute_score"))


def test_missing_module():
    with pytest.raises(UserError, match=r"pkg://not\.there.*ModuleNotFoundError"):
        load_function(RewardFunction("pkg://not.there", "compute_score"))
