# SPDX-License-Identifier: Apache-2.0
"""Keys of the asynchronous pipeline: what they resolve to, what is refused, what has no effect."""

from __future__ import annotations

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.check.rules import check_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

ASYNCHRONOUS = "trainer.async_pipeline=True"
HALVES = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
ROLLOUT = "actor_rollout_ref.rollout"


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, ["data.train_files=some", *overrides]).config


def refusal(*overrides: str) -> str:
    """The one line that refuses a configuration."""
    with pytest.raises(UserError) as caught:
        check_run(config(*overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "max_lag", "lockstep"),
    [
        ((), 0, True),
        (("trainer.generate_ahead_steps=3",), 0, True),
        ((ASYNCHRONOUS,), 0, True),
        ((ASYNCHRONOUS, "trainer.generate_ahead_steps=3"), 3, False),
        (
            (ASYNCHRONOUS, "trainer.generate_ahead_steps=3", "trainer.deterministic_async=True"),
            3,
            True,
        ),
    ],
)
def test_the_largest_lag_and_whether_generation_goes_in_rounds(
    overrides: tuple[str, ...], max_lag: int, lockstep: bool
) -> None:
    trainer = config(*overrides).trainer
    assert (trainer.max_lag, trainer.lockstep) == (max_lag, lockstep)


def test_02_a_negative_lag_is_refused() -> None:
    line = refusal(ASYNCHRONOUS, *HALVES, "trainer.generate_ahead_steps=-1")
    assert "trainer.generate_ahead_steps=-1" in line


def test_02_a_lag_beyond_all_use_is_refused() -> None:
    line = refusal(ASYNCHRONOUS, *HALVES, "trainer.generate_ahead_steps=100000000000")
    assert line == (
        "trainer.generate_ahead_steps=100000000000: must be at most 1000. "
        "Set trainer.generate_ahead_steps=0 (the default)."
    )
    check_run(config(ASYNCHRONOUS, *HALVES, "trainer.generate_ahead_steps=1000"))


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ((), "Set actor_rollout_ref.hybrid_engine=False"),
        (("trainer.n_gpus_per_node=4",), "Set actor_rollout_ref.hybrid_engine=False"),
        (
            (
                "trainer.n_gpus_per_node=4",
                "trainer.separated_node_tasks=[[logp,actor-train,generate],ref_logp]",
                "trainer.separated_node_ratios=[0.5,0.5]",
            ),
            "take generate out of that group in trainer.separated_node_tasks",
        ),
    ],
)
def test_02_generation_on_the_trainers_devices_cannot_be_asynchronous(
    overrides: tuple[str, ...], remedy: str
) -> None:
    line = refusal(ASYNCHRONOUS, "trainer.generate_ahead_steps=1", *overrides)
    assert line.startswith("trainer.async_pipeline=True: ")
    assert remedy in line


def test_02_the_remedy_of_one_device_is_enough() -> None:
    line = refusal(ASYNCHRONOUS, "trainer.generate_ahead_steps=1")
    words = [word.rstrip(".;,") for word in line.partition(": ")[2].split() if "=" in word]
    remedy = [word for word in words if not word.startswith("trainer.async_pipeline")]
    assert len(remedy) == 3
    check_run(config(ASYNCHRONOUS, "trainer.generate_ahead_steps=1", *remedy))


IN_TURNS = (
    ASYNCHRONOUS,
    "trainer.generate_ahead_steps=1",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)


@pytest.mark.parametrize("number", [1, 4])
def test_trainer_and_rollout_can_take_turns(number: int) -> None:
    check_run(config(*IN_TURNS, f"trainer.n_gpus_per_node={number}"))
    check_run(config(*IN_TURNS, f"{ROLLOUT}.partial_rollout=keep_cache"))


@pytest.mark.parametrize(
    "key", ["trainer.deterministic_async=True", f"{ROLLOUT}.partial_rollout=False"]
)
def test_sequences_of_turns_go_on_under_new_weights(key: str) -> None:
    line = refusal(*IN_TURNS, key)
    assert line.startswith(f"{key}: ") and "trainer.separated_node_tasks" in line
    check_run(config(*IN_TURNS, key, "trainer.generate_ahead_steps=0"))


def test_devices_of_its_own_are_enough() -> None:
    check_run(config(ASYNCHRONOUS, "trainer.generate_ahead_steps=1", *HALVES))


@pytest.mark.parametrize(
    ("overrides", "without_effect"),
    [
        (("trainer.generate_ahead_steps=2",), {"trainer.generate_ahead_steps"}),
        ((ASYNCHRONOUS, *HALVES), {"trainer.async_pipeline"}),
        ((ASYNCHRONOUS, *HALVES, "trainer.generate_ahead_steps=2"), set()),
        ((f"{ROLLOUT}.partial_rollout=False",), {f"{ROLLOUT}.partial_rollout"}),
        ((f"{ROLLOUT}.partial_rollout=keep_cache",), {f"{ROLLOUT}.partial_rollout"}),
        (
            (
                ASYNCHRONOUS,
                *HALVES,
                "trainer.generate_ahead_steps=2",
                "trainer.deterministic_async=True",
                f"{ROLLOUT}.partial_rollout=False",
            ),
            {f"{ROLLOUT}.partial_rollout"},
        ),
    ],
)
def test_keys_that_change_nothing_are_named(
    overrides: tuple[str, ...], without_effect: set[str]
) -> None:
    loaded = load_config(RunConfig, ["data.train_files=some", *overrides])
    assert set(ignored_keys(loaded)) == without_effect
