# SPDX-License-Identifier: Apache-2.0
"""The table of keys that parser, plan and documentation share."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tandem.config.parse.aliases import ALIASES, canonical_name
from tandem.config.parse.keys import find_key, is_section, keys_of, nearest_key
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

SCHEMAS = (RunConfig, SftConfig)
MAX_EFFECTIVE_KEYS = 224


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_a_description_and_keys_that_act_stay_few(schema: type[BaseModel]) -> None:
    keys = keys_of(schema)
    assert not [name for name, key in keys.items() if not key.description.strip()]
    assert sum(not key.no_effect for key in keys.values()) <= MAX_EFFECTIVE_KEYS


def test_a_key_knows_its_default_its_choices_and_what_it_is_for() -> None:
    key = keys_of(RunConfig)["data.truncation"]
    assert (key.default, key.choices) == ("error", ("error", "left", "right", "middle"))
    assert "error names the row" in key.description
    assert key.no_effect == ""


def test_a_section_without_effect_covers_the_keys_below_it() -> None:
    keys = keys_of(RunConfig)
    reason = keys["actor_rollout_ref.actor.megatron.grad_offload"].no_effect
    assert reason.startswith("not built yet")


def test_free_form_keys_are_found_from_below() -> None:
    name = "actor_rollout_ref.actor.megatron.override_transformer_config"
    found = find_key(RunConfig, f"{name}.a.b")
    assert found is not None and found.name == name
    assert find_key(RunConfig, "trainer.nnodes.x") is None
    assert is_section(RunConfig, "algorithm.kl_ctrl")
    assert not is_section(RunConfig, "algorithm.gamma")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("data.train_batchsize", "data.train_batch_size"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.train_batch_size", "data.train_batch_size"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
    ],
)
def test_the_nearest_key_is_the_one_that_was_meant(wrong: str, right: str) -> None:
    assert nearest_key(RunConfig, wrong) == right


@pytest.mark.parametrize("alias", ALIASES)
def test_every_other_spelling_leads_to_a_key(alias: str) -> None:
    meant = {schema: canonical_name(schema, alias) for schema in SCHEMAS}
    assert any(
        name != alias and (find_key(schema, name) is not None or is_section(schema, name))
        for schema, name in meant.items()
    )
