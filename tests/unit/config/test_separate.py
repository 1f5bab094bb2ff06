# SPDX-License-Identifier: Apache-2.0
"""verl's keys of trainers with devices for generation, and what they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.check.rules import check_run
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import LoadedConfig, load_config
from tandem.config.parse.separate import with_separate_devices
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

FULLY = "--config-name=fully_async_ppo_trainer"
ONE_STEP = "--config-name=one_step_off_ppo_trainer"
MODEL = ("data.train_files=some", "actor_rollout_ref.model.path=model", "trainer.device=cuda")
BATCH = ("actor_rollout_ref.actor.ppo_mini_batch_size=32", "async_training.require_batches=4")
BYPASS = "algorithm.rollout_correction.bypass_mode"
PROMPTS = "rollout.total_rollout_steps=51200"


def load(*arguments: str) -> LoadedConfig[RunConfig]:
    return load_config(RunConfig, [*arguments, *MODEL, "algorithm.adv_estimator=grpo"])


def test_the_mini_batches_between_two_transfers_are_one_batch() -> None:
    loaded = load(FULLY, *BATCH, PROMPTS)
    config = loaded.config
    assert config.data.train_batch_size == 4 * 4 * 32
    assert config.optimizer_steps_per_step == 16
    assert config.trainer.total_training_steps == 100
    assert config.algorithm.rollout_correction.bypass_mode
    assert config.algorithm.rollout_correction.rollout_is is None
    (warning,) = [line for line in loaded.warnings if line.startswith("async_training.*")]
    assert "data.train_batch_size=512" in warning
    check_run(config)


def test_a_threshold_of_staleness_bounds_the_prompts_that_are_begun() -> None:
    config = load(FULLY, *BATCH, PROMPTS, "async_training.staleness_threshold=0.5").config
    assert config.trainer.batches_ahead == 0.5
    assert (config.trainer.max_lag, config.most_prompts_begun) == (1, 512 + 256)
    config = load(FULLY, *BATCH, PROMPTS, "async_training.staleness_threshold=0").config
    assert (config.trainer.max_lag, config.most_prompts_begun) == (0, 512)
    assert config.trainer.lockstep


@pytest.mark.parametrize(
    ("trains", "generates", "nodes", "pools"),
    [
        ((1, 4), (1, 4), (1, 8), (4, 4)),
        ((1, 6), (1, 2), (1, 8), (6, 2)),
        ((1, 8), (1, 8), (2, 8), (8, 8)),
        ((2, 4), (2, 4), (2, 8), (8, 8)),
        ((4, 8), (12, 8), (16, 8), (32, 96)),
        ((1, 8), (2, 4), (2, 8), (8, 8)),
        ((1, 1), (1, 1), (1, 2), (1, 1)),
    ],
)
def test_the_devices_of_training_and_generation_are_counted_together(
    trains: tuple[int, int],
    generates: tuple[int, int],
    nodes: tuple[int, int],
    pools: tuple[int, int],
) -> None:
    keys = (f"trainer.nnodes={trains[0]}", f"trainer.n_gpus_per_node={trains[1]}")
    keys += (f"rollout.nnodes={generates[0]}", f"rollout.n_gpus_per_node={generates[1]}")
    config = load(ONE_STEP, *keys, "data.train_batch_size=512").config
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == nodes
    assert not config.actor_rollout_ref.hybrid_engine
    assert tuple(pool.num_devices for pool in place_run(config).pools) == pools
    check_run(config)


def test_without_devices_of_their_own_samples_are_generated_in_turns() -> None:
    config = load(FULLY, *BATCH, PROMPTS, "rollout.nnodes=0").config
    assert config.trainer.separated_node_ratios == (1.0,)
    assert config.trainer.separated_node_tasks == (("actor-train", "logp", "ref_logp", "generate"),)
    check_run(config)


def test_devices_that_generate_are_given_by_both_keys() -> None:
    keys = ("rollout.nnodes=null", "rollout.n_gpus_per_node=null", PROMPTS)
    groups = ("trainer.separated_node_tasks=[[actor-train,logp],[generate]]",)
    ratios = ("trainer.separated_node_ratios=[0.25,0.75]",)
    trainer = load(FULLY, *BATCH, *keys, *groups, *ratios).config.trainer
    assert trainer.separated_node_ratios == (0.25, 0.75)
    with pytest.raises(UserError, match=r"^rollout\.n_gpus_per_node=2: rollout\.nnodes is not set"):
        load("rollout.n_gpus_per_node=2")
    loaded = load("rollout.nnodes=0")
    assert loaded.config.trainer.separated_node_ratios == (1.0,)
    assert "actor_rollout_ref.hybrid_engine=False" in loaded.warnings[-1]


def test_one_step_off_draws_each_batch_with_the_weights_before() -> None:
    trainer = load(ONE_STEP).config.trainer
    assert (trainer.async_pipeline, trainer.max_lag) == (True, 1)
    assert load(ONE_STEP).config.actor_rollout_ref.rollout.partial_rollout is False


def test_what_verls_files_set_without_a_meaning_here_is_accepted() -> None:
    of_roles = (
        "actor_rollout_ref.actor.use_rollout_log_probs=True",
        "actor_rollout_ref.rollout.standalone_gpu_memory_utilization=null",
    )
    loaded = load(FULLY, *BATCH, PROMPTS, *of_roles, "async_training.reward_queue_size=null")
    assert "actor_rollout_ref.actor.use_rollout_log_probs" in loaded.unread
    with pytest.raises(UserError, match="Set gpu_memory_utilization in the same section"):
        load(FULLY, *BATCH, PROMPTS, of_roles[1].replace("null", "0.7"))


@pytest.mark.parametrize("again", [(), (FULLY,)])
def test_a_recorded_configuration_means_the_same(again: tuple[str, ...], tmp_path: Path) -> None:
    config = load(FULLY, *BATCH, PROMPTS).config
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(json.dumps(config.model_dump(mode="json")))
    assert load_config(RunConfig, [*again, str(recorded)]).config == config


MODE = "trainer.v1.trainer_mode"
V1 = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16")


def test_main_ppo_generates_batches_ahead_on_nodes_of_their_own() -> None:
    keys = (*V1, f"{MODE}=separate_async", "trainer.n_gpus_per_node=4")
    keys += ("trainer.v1.separate_async.num_warmup_batches=2",)
    keys += ("trainer.v1.separate_async.parameter_sync_step=4",)
    loaded = load(*keys, "actor_rollout_ref.rollout.nnodes=1")
    config = loaded.config
    assert (config.trainer.async_pipeline, config.trainer.max_lag) == (True, 2)
    assert [pool.num_devices for pool in place_run(config).pools] == [4, 4]
    assert list(ignored_keys(loaded)) == ["trainer.v1.separate_async.parameter_sync_step"]
    check_run(config)
    recorded = RunConfig.model_validate(config.model_dump())
    assert with_separate_devices(recorded) == (config, "")
    threshold = "trainer.v1.sampler.max_off_policy_threshold=2"
    bounded = load(*keys, threshold, "actor_rollout_ref.rollout.nnodes=1").config
    assert bounded.trainer.max_lag == 1
    with pytest.raises(UserError, match=r"rollout\.nnodes=0: trainer\.v1\.trainer_mode=sep"):
        check_run(load(*keys).config)


def test_main_ppo_takes_turns_on_shared_devices() -> None:
    config = load(*V1, f"{MODE}=colocate_async", "trainer.n_gpus_per_node=4").config
    assert (config.trainer.async_pipeline, config.trainer.max_lag) == (True, 1)
    assert [pool.num_devices for pool in place_run(config).pools] == [4]
    assert not config.actor_rollout_ref.hybrid_engine
    check_run(config)


def test_a_mode_that_is_asynchronous_contradicts_a_synchronous_pipeline() -> None:
    with pytest.raises(UserError, match=r"async_pipeline=False: trainer\.v1\.trainer_mode=coloc"):
        load(*V1, f"{MODE}=colocate_async", "trainer.async_pipeline=False")


def test_nodes_for_generation_have_no_effect_in_a_synchronous_run() -> None:
    loaded = load(*V1, "actor_rollout_ref.rollout.nnodes=0", f"{MODE}=sync")
    assert list(ignored_keys(loaded)) == ["actor_rollout_ref.rollout.nnodes"]
    assert not loaded.config.trainer.async_pipeline


@pytest.mark.parametrize(
    ("keys", "bypasses"),
    [
        (("async_training.compute_prox_log_prob=True",), False),
        (("async_training.compute_prox_log_prob=False",), True),
        (("async_training.use_rollout_log_probs=False",), False),
        (("async_training.use_rollout_log_probs=True",), True),
    ],
)
def test_older_keys_say_whose_log_probs_are_the_old_ones(
    keys: tuple[str, ...], bypasses: bool
) -> None:
    config = load(FULLY, *BATCH, PROMPTS, *keys).config
    assert config.algorithm.rollout_correction.bypass_mode is bypasses


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            ("data.train_batch_size=256",),
            "data.train_batch_size=256: trigger_parameter_sync_step (4) times require_batches (4) "
            "of async_training, times 32 prompts of a mini-batch, is 512. Set "
            "data.train_batch_size=0, which means that product, or leave async_training.* out.",
        ),
        (
            ("rollout.total_rollout_steps=100",),
            "rollout.total_rollout_steps=100: is the number of prompts of the whole run, and a "
            "step takes 512. Set rollout.total_rollout_steps=512 or more.",
        ),
        (
            ("trainer.nnodes=2", "rollout.n_gpus_per_node=3", PROMPTS),
            "rollout.n_gpus_per_node=3: the 19 devices that train or generate do not lie on nodes "
            "of 8.",
        ),
        (
            ("trainer.separated_node_tasks=[[actor-train,generate]]", PROMPTS),
            "rollout.nnodes=1: trainer.separated_node_tasks and separated_node_ratios give the "
            "devices that generate, too. Set rollout.nnodes=null rollout.n_gpus_per_node=null, or",
        ),
        (
            ("trainer.separated_node_ratios=[0.25,0.75]", PROMPTS),
            "rollout.nnodes=1: trainer.separated_node_tasks and separated_node_ratios give",
        ),
        (
            ("rollout.nnodes=null", PROMPTS),
            "rollout.n_gpus_per_node=8: rollout.nnodes is not set, and both give the devices that "
            "generate. Set rollout.nnodes, or rollout.n_gpus_per_node=null.",
        ),
        (
            ("async_training.compute_prox_log_prob=True", f"{BYPASS}=True", PROMPTS),
            f"{BYPASS}=True: async_training.use_rollout_log_probs and compute_prox_log_prob mean "
            "that it is False. Leave it out, or those of async_training.",
        ),
        (("rollout.nnodes=-1", PROMPTS), "rollout.nnodes=-1: must be at least 0."),
        (("rollout.n=4", PROMPTS), "rollout.n=4: no such key."),
    ],
)
def test_contradictions_are_one_line(keys: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(FULLY, *BATCH, *keys)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_no_batch_is_refused_without_verls_keys() -> None:
    with pytest.raises(UserError, match=r"data\.train_batch_size=0: must be at least 1"):
        check_run(load("data.train_batch_size=0").config)


def test_rounds_are_whole_batches() -> None:
    keys = ("trainer.deterministic_async=True", "async_training.staleness_threshold=0.5", PROMPTS)
    with pytest.raises(UserError, match=r"generates whole batches. Set trainer.generate_ahead_st"):
        check_run(load(FULLY, *BATCH, *keys).config)
