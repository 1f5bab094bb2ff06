# SPDX-License-Identifier: Apache-2.0
"""The environment of child processes: what passes, what is withheld, and the hints of errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.children.environment import ALLOWED, child_environment, hint_at_withheld
from tandem.errors import UserError

KEY = "reward.environment"
PARENT = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONPATH": "/src",
    "MKL_NUM_THREADS": "2",
    "SOME_VISIBLE_DEVICES": "0",
    "https_proxy": "http://proxy:3128",
    "HTTP_PROXY": "http://name:password@proxy:3128",
    "WANDB_API_KEY": "w",
    "AWS_SECRET_ACCESS_KEY": "a",
    "AWS_REGION": "r",
    "HF_TOKEN": "h",
    "KEY": "k",
}


def test_secrets_do_not_pass_and_what_programs_need_does():
    given = child_environment(PARENT, key=KEY)
    assert set(given.variables) == {
        *("PATH", "LC_ALL", "PYTHONPATH", "MKL_NUM_THREADS", "SOME_VISIBLE_DEVICES"),
        "https_proxy",
    }
    assert given.withheld == PARENT.keys() - given.variables.keys()
    assert not {"w", "a", "h", "k"} & set(repr(given.withheld).split("'")) - PARENT.keys()


@pytest.mark.parametrize(
    ("named", "more"),
    [
        (("KEY",), {"KEY"}),
        (("AWS_*",), {"AWS_SECRET_ACCESS_KEY", "AWS_REGION"}),
        (("HTTP_PROXY",), {"HTTP_PROXY"}),
        (("*",), PARENT.keys()),
    ],
)
def test_named_variables_pass(named: tuple[str, ...], more: set[str]):
    given = child_environment(PARENT, named, key=KEY)
    assert set(given.variables) - set(child_environment(PARENT, key=KEY).variables) <= set(more)
    assert set(more) <= set(given.variables)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("OPENAI_API_KEY", r"^reward.environment='OPENAI_API_KEY': is not set in the environment"),
        ("GCP_*", r"'GCP_\*': is not set"),
        ("KEY=secret", r"'KEY=...': must be names without values\. Export KEY"),
    ],
)
def test_names_that_cannot_pass(named: str, message: str):
    with pytest.raises(UserError, match=message) as raised:
        child_environment(PARENT, [named], key=KEY)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (KeyError("KEY"), "KEY"),
        (RuntimeError("set WANDB_API_KEY or log in"), "WANDB_API_KEY"),
        (KeyError("no such thing"), None),
        (KeyError(3), None),
        (KeyError(), None),
        (ValueError("a KEY of the wrong kind"), None),
        (RuntimeError("set OPENAI_API_KEY"), None),
    ],
)
def test_errors_about_withheld_variables_say_what_to_name(error: Exception, name: str | None):
    hint = hint_at_withheld(error, child_environment(PARENT, key=KEY).withheld, key=KEY)
    assert (f"add it to reward.environment=[{name}]" in hint) is (name is not None)
    assert bool(hint) is (name is not None)


def test_the_manual_lists_what_passes():
    manual = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
    assert [pattern for pattern in ALLOWED if f"`{pattern}`" not in manual] == []
