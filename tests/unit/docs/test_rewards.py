# SPDX-License-Identifier: Apache-2.0
"""The reward functions of README and docs/rewards.md, with the keys that stand beside them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.rewards import reward_spec
from tandem.rewards.scoring import load_scorer, score_requests
from tandem.types import RewardRequest

ROOT = Path(__file__).parents[3]
FILE = re.compile(r"^```python\n# (?P<name>\w+\.py)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
KEYS = re.compile(r"custom_reward_function\.(?:path|weights)=\[\S+\]")
RIGHT, WRONG, FOREIGN = "3 + 4 is 7.\n#### 7", "#### 17", "the answer is 7"


def ignore(error: BaseException) -> None:
    """Take no notice of an error."""


@pytest.mark.parametrize("page", ["README.md", "docs/rewards.md"])
def test_the_example_tells_right_from_wrong_and_weighs_the_format(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / page).read_text("utf-8")
    file = next(FILE.finditer(text))
    (tmp_path / file["name"]).write_text(file["text"], "utf-8")
    monkeypatch.chdir(tmp_path)
    command = text[file.end() :].replace("\\\n", " ")
    keys = [key for word in shlex.split(command[:900], posix=False) for key in KEYS.findall(word)]
    spec = reward_spec(load_config(RunConfig, keys[:2]).config)
    chat = [{"role": "user", "content": "3 + 4?"}]
    requests = [
        RewardRequest("openai/gsm8k", response, "7", {}, 1, prompt=chat)
        for response in (RIGHT, WRONG, FOREIGN)
    ]
    outcomes = score_requests(load_scorer(spec, on_error=ignore), requests)
    assert [outcome.score for outcome in outcomes] == [1.1, 0.1, 0.0]
    assert [outcome.extra["acc"] for outcome in outcomes] == [1.0, 0.0, 0.0]
