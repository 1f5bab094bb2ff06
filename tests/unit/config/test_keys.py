# SPDX-License-Identifier: Apache-2.0
"""The table of keys that parser, plan and documentation share."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tandem.config.parse.keys import canonical_name, find_key, is_section, keys_of, nearest_key
from tandem.config.parse.names import ALIASES
from tandem.config.parse.overrides import load_config
from tandem.config.schema.ignored import ignored_table
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

SCHEMAS = (RunConfig, SftConfig)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_a_description_or_is_ignored_for_a_reason(schema: type[BaseModel]) -> None:
    for key in keys_of(schema).values():
        assert bool(key.description.strip()) != bool(key.ignored.strip()), key.name


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_default_of_an_ignored_key_is_that_of_its_field(schema: type[BaseModel]) -> None:
    """Some ignored keys are fields of a class that other sections share; {} stands for no key."""
    values = schema().model_dump()
    rows = {name: row for name, row in ignored_table(schema).items() if row[0] != {}}
    for name, (default, _) in rows.items():
        node = values
        for part in name.split("."):
            node = node.get(part, {}) if isinstance(node, dict) else {}
        assert node in ({}, default), name


def test_a_key_knows_its_default_its_choices_and_what_it_is_for() -> None:
    key = keys_of(RunConfig)["data.truncation"]
    assert (key.default, key.choices) == ("error", ("error", "left", "right", "middle"))
    assert "an error that names the row" in key.description
    assert key.ignored == ""


def test_ignored_keys_never_reach_the_configuration() -> None:
    keys = keys_of(RunConfig)
    name = "actor_rollout_ref.actor.megatron.grad_offload"
    assert keys[name].ignored.startswith("gradients are freed")
    loaded = load_config(
        RunConfig, [f"{name}=5", "data.sampler.class_path=null", "critic.megatron={}"]
    )
    assert loaded.config == RunConfig()
    assert set(loaded.set_keys) == {name, "data.sampler.class_path"}


def test_interpolations_may_refer_to_ignored_keys() -> None:
    length = "data.max_response_length='${actor_rollout_ref.rollout.response_length}'"
    loaded = load_config(RunConfig, ["actor_rollout_ref.rollout.response_length=9", length])
    assert loaded.config.data.max_response_length == 9
    seed = "data.seed='${actor_rollout_ref.actor.megatron.seed}'"
    assert load_config(RunConfig, [seed]).config.data.seed == 42


def test_free_form_keys_are_found_from_below() -> None:
    name = "actor_rollout_ref.actor.megatron.override_ddp_config"
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
