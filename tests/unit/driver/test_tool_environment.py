# SPDX-License-Identifier: Apache-2.0
"""Processes of tools, and the servers that they start, see listed variables only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tandem.agents.setup import EnvironmentSetup, ServedTools, ServerSpec
from tandem.driver import agents
from tests.fakes.configured import config

SECRETS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_OWN")


@pytest.mark.parametrize("named", [(), ("MY_OWN",)])
def test_secrets_of_the_driver_reach_no_tool_unless_they_are_named(
    named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    given: list[tuple[EnvironmentSetup, Mapping[str, str]]] = []

    def keep(setup: EnvironmentSetup, *, environment: Mapping[str, str], **_: Any) -> None:
        given.append((setup, environment))

    monkeypatch.setattr(agents, "EnvironmentPool", keep)
    server = ServerSpec("program", ("true",), variables={"OF_THE_FILE": "1"})
    keys = (f"actor_rollout_ref.rollout.agent.environment=[{','.join(named)}]",)
    agents._open_pool(config(*keys), EnvironmentSetup(served=(ServedTools((server,)),)))
    ((setup, environment),) = given
    (served,) = setup.served[0].servers
    for seen in (environment, served.variables):
        assert "PATH" in seen
        assert {name for name in SECRETS if name in seen} == set(named)
    assert served.variables["OF_THE_FILE"] == "1"
