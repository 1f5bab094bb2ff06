# SPDX-License-Identifier: Apache-2.0
"""A key of TRL is answered by the key that means the same, and a key of the other command by it."""

from __future__ import annotations

import pytest

from tandem.config.parse.keys import keys_of
from tandem.config.parse.names import TRL_NAMES
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError


def test_every_answer_is_a_key_that_is_read() -> None:
    keys = {**keys_of(SftConfig), **keys_of(RunConfig)}
    for names in TRL_NAMES.values():
        assert all(not keys[name].ignored for name in names), names


@pytest.mark.parametrize(
    ("schema", "name", "meant"),
    [
        (RunConfig, "num_generations", "actor_rollout_ref.rollout.n"),
        (RunConfig, "learning_rate", "actor_rollout_ref.actor.optim.lr"),
        (SftConfig, "learning_rate", "optim.lr"),
        (SftConfig, "max_length", "data.max_length"),
    ],
)
def test_names_of_trl_are_answered(
    schema: type[RunConfig] | type[SftConfig], name: str, meant: str
) -> None:
    with pytest.raises(UserError, match=f"{name}=8: no such key. Did you mean {meant}?"):
        load_config(schema, [f"{name}=8"])


def test_a_key_of_the_other_command_names_it() -> None:
    with pytest.raises(UserError, match=r"one of tandem sft\. Use tandem sft \(tandem plan sft\)"):
        load_config(RunConfig, ["model.partial_pretrain=m"])
    with pytest.raises(UserError, match=r"one of tandem train\. Use tandem train \(tandem plan\)"):
        load_config(SftConfig, ["actor_rollout_ref.rollout.n=8"])
