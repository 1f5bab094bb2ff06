# SPDX-License-Identifier: Apache-2.0
"""Each key of verl's releases is known: it is read, or has no effect for a stated reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.keys import (
    canonical_name,
    find_key,
    in_override_grammar,
    is_section,
    keys_of,
)
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

SCHEMAS: dict[str, type[RunConfig] | type[SftConfig]] = {"train": RunConfig, "sft": SftConfig}


def keys_of_verl(command: str) -> Iterator[str]:
    """Yield the keys of a command of verl, in all its releases."""
    text = (Path(__file__).parent / "verl_keys.txt").read_text().replace("\n   ", "")
    for line in text.splitlines():
        first, *words = line.split()
        if first == command:
            _releases, section, *names = words
            yield from (name if section == "-" else f"{section}.{name}" for name in names)


def is_known(schema: type[BaseModel], spelling: str) -> bool:
    name = canonical_name(schema, spelling)
    return find_key(schema, name) is not None or is_section(schema, name)


@pytest.mark.parametrize("command", SCHEMAS)
def test_each_key_of_verl_is_known(command: str) -> None:
    keys = set(keys_of_verl(command))
    assert len(keys) > {"train": 1500, "sft": 300}[command]
    unknown = {key for key in keys if not is_known(SCHEMAS[command], key)}
    assert unknown == set()


UNBUILT = [
    pytest.param(schema, key.name, id=f"{command}-{key.name}")
    for command, schema in SCHEMAS.items()
    for key in keys_of(schema).values()
    if key.unbuilt
]


@pytest.mark.parametrize(("schema", "name"), UNBUILT)
def test_a_capability_that_is_not_built_is_refused_by_its_name(
    schema: type[RunConfig] | type[SftConfig], name: str
) -> None:
    unbuilt = keys_of(schema)[name].unbuilt
    assert unbuilt is not None
    for harmless in unbuilt.harmless:
        if harmless != {}:
            loaded = load_config(schema, [f"{name}={in_override_grammar(harmless)}"])
            assert ignored_keys(loaded) == {name: f"{unbuilt.capability} is not built"}
    section = name.rpartition(".")[0]
    others = [f"{section}.lr_scheduler_type=cosine"] if unbuilt.idle_with else []
    with pytest.raises(UserError, match="is not built") as refused:
        load_config(schema, [f"{name}=something_else", *others])
    assert unbuilt.capability in str(refused.value)
    with pytest.raises(UserError, match="value is empty"):
        load_config(schema, [f"{name}="])


def test_steps_of_a_schedule_do_not_count_where_the_rate_is_constant() -> None:
    optim = "actor_rollout_ref.actor.optim"
    loaded = load_config(RunConfig, [f"{optim}.lr_decay_steps=50"])
    assert f"{optim}.lr_decay_steps" in ignored_keys(loaded)
    load_config(RunConfig, [f"{optim}.lr_decay_steps=50", f"{optim}.lr_decay_style=constant"])
    with pytest.raises(UserError, match="fallen before the run ends"):
        load_config(RunConfig, [f"{optim}.lr_decay_steps=50", f"{optim}.lr_scheduler_type=cosine"])


def test_a_value_that_comes_from_another_key_is_refused_too() -> None:
    asked = ["distillation.topk=True", "distillation.enabled='${distillation.topk}'"]
    with pytest.raises(UserError, match="distillation from a teacher is not built"):
        load_config(RunConfig, asked)


def test_the_reference_cannot_be_another_model() -> None:
    with pytest.raises(UserError, match="another model than the actor is not built"):
        load_config(RunConfig, ["actor_rollout_ref.ref.model.path=elsewhere"])


def test_another_training_engine_is_not_taken_for_a_wrong_key() -> None:
    with pytest.raises(UserError, match=r"model_engine='veomni': .*VeOmni.* is not built"):
        load_config(RunConfig, ["model_engine=veomni"])


def test_the_engine_called_megatron_chooses_its_keys() -> None:
    key = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size"
    loaded = load_config(RunConfig, ["model_engine=megatron", f"{key}=2"])
    actor = loaded.config.actor_rollout_ref.actor
    assert (actor.strategy, actor.fsdp_config.tensor_model_parallel_size) == ("megatron", 2)
    assert loaded.warnings == ("model_engine is read as actor_rollout_ref.actor.strategy",)
    with pytest.raises(UserError, match="model_engine"):
        load_config(RunConfig, ["model_engine=megatron", "actor_rollout_ref.actor.strategy=fsdp"])


@pytest.mark.parametrize(
    "name",
    [
        "data.return_raw_chat",
        "actor_rollout_ref.actor.megatron.dist_checkpointing_path",
        "actor_rollout_ref.rollout.prometheus.file",
    ],
)
def test_a_key_without_effect_may_be_empty(name: str) -> None:
    assert list(ignored_keys(load_config(RunConfig, [f"{name}="]))) == [name]


def test_the_size_of_buckets_has_verls_spelling() -> None:
    spelling = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    rollout = load_config(RunConfig, [f"{spelling}=64"]).config.actor_rollout_ref.rollout
    assert rollout.param_update_preduce_bucket_size_mb == 64


def test_no_name_of_a_reward_function_is_the_usual_name() -> None:
    loaded = load_config(RunConfig, ["custom_reward_function.name=null"])
    assert loaded.config.custom_reward_function.name == "compute_score"


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_workers_run_with_the_python_of_the_command(
    schema: type[RunConfig] | type[SftConfig],
) -> None:
    key = "ray_kwargs.ray_init.runtime_env.py_executable"
    others = ["ray_kwargs.ray_init={num_cpus:8}", "+ray_init.runtime_env.env_vars.A=1"]
    loaded = load_config(schema, [f"{key}='uv run --frozen'", *others])
    assert loaded.config.ray_kwargs.ray_init == {
        "num_cpus": 8,
        "runtime_env": {"env_vars": {"A": 1}},
    }
    assert "Python of this command" in keys_of(schema)[key].ignored
