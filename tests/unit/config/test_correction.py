# SPDX-License-Identifier: Apache-2.0
"""``algorithm.rollout_correction``: verl's spellings, when it is on, what it refuses."""

from __future__ import annotations

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.check.rules import check_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.correction import REJECTION_OPTIONS, Bounds
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

KEY = "algorithm.rollout_correction"
LAG = ("trainer.async_pipeline=True", "trainer.generate_ahead_steps=2")
ONE_UPDATE = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
)
BYPASS = f"{KEY}.bypass_mode=True"


def config(*arguments: str) -> RunConfig:
    return load_config(RunConfig, arguments).config


def test_weights_are_on_where_rollouts_may_differ_and_only_there() -> None:
    assert config().importance_level is None and not config().compares_policies
    assert config("trainer.generate_ahead_steps=2").importance_level is None
    assert config("trainer.async_pipeline=True").importance_level is None
    assert config(*LAG).importance_level == "token"
    assert config("actor_rollout_ref.rollout.quantization=fp8").importance_level == "token"
    off = config(*LAG, f"{KEY}.rollout_is=null")
    assert off.importance_level is None and off.compares_policies
    assert config(f"{KEY}.rollout_is=sequence").importance_level == "sequence"


def test_bypass_mode_has_weights_only_with_reinforce() -> None:
    assert config(*LAG, BYPASS).importance_level is None
    assert config(BYPASS, f"{KEY}.rollout_is=token").importance_level is None
    reinforce = f"{KEY}.loss_type=reinforce"
    assert config(BYPASS, reinforce, f"{KEY}.rollout_is=token").importance_level == "token"
    assert config(*LAG, BYPASS, reinforce).importance_level == "token"


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        ((), False),
        (LAG, False),
        ((*LAG, f"{KEY}.rollout_is_batch_normalize=True"), True),
        ((f"{KEY}.rollout_is_batch_normalize=True",), False),
        ((f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=2"), True),
        ((f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=2", BYPASS), False),
        (("actor_rollout_ref.actor.ppo_epochs=2",), True),
    ],
)
def test_the_batch_is_scored_before_the_update_only_for_what_needs_all_of_it(
    arguments: tuple[str, ...], needed: bool
) -> None:
    assert config(*ONE_UPDATE, *arguments).needs_old_log_probs is needed


def test_thresholds_are_read_as_verl_writes_them() -> None:
    def bounds(*arguments: str) -> tuple[tuple[str, Bounds], ...]:
        return config(*arguments).algorithm.rollout_correction.rejections

    keys = config(f"{KEY}.rollout_is_threshold=0.5_5.0").algorithm.rollout_correction
    assert keys.importance_bounds == Bounds(0.5, 5.0)
    assert config().algorithm.rollout_correction.importance_bounds == Bounds(None, 2.0)
    both = f"{KEY}.rollout_rs='token_k1,seq_mean_k3'"
    assert bounds(both, f"{KEY}.rollout_rs_threshold=4") == (
        ("token_k1", Bounds(0.25, 4.0)),
        ("seq_mean_k3", Bounds(None, 4.0)),
    )
    assert bounds(both, f"{KEY}.rollout_rs_threshold='0.9_1.2,0.01'") == (
        ("token_k1", Bounds(0.9, 1.2)),
        ("seq_mean_k3", Bounds(None, 0.01)),
    )
    assert bounds() == ()


def test_the_names_of_verl_0_6_bound_the_ratio_of_trainer_to_rollout() -> None:
    """As in verl-recipe's run_dapo_qwen2.5_32b_rollout_corr.sh."""
    keys = (f"{KEY}.rollout_rs=geometric", f"{KEY}.rollout_rs_threshold=1.01")
    lower = f"{KEY}.rollout_rs_threshold_lower=0.98"
    found = config(*keys, lower, f"{KEY}.rollout_token_veto_threshold=1e-4")
    geometric, veto = found.algorithm.rollout_correction.rejections
    assert geometric == ("seq_mean_k1", Bounds(1 / 1.01, 1 / 0.98))
    assert veto == ("seq_max_k1", Bounds(None, pytest.approx(9.21034)))
    assert found.compares_policies and found.needs_old_log_probs
    check_run(found)

    def rejections(*arguments: str) -> tuple[tuple[str, Bounds], ...]:
        return config(*arguments).algorithm.rollout_correction.rejections

    assert rejections(*keys) == (("seq_mean_k1", Bounds(1 / 1.01, 1.01)),)
    assert rejections(f"{KEY}.rollout_rs=token") == (("token_k1", Bounds(0.5, 2.0)),)
    assert rejections(f"{KEY}.rollout_rs=sequence")[0][0] == "seq_sum_k1"
    only_veto = config(f"{KEY}.rollout_token_veto_threshold=0.5")
    assert only_veto.compares_policies and only_veto.needs_old_log_probs
    reinforced = config(BYPASS, f"{KEY}.use_policy_gradient=True", f"{KEY}.rollout_is=token")
    assert reinforced.importance_level == "token"
    assert list(ignored_keys(load_config(RunConfig, [lower]))) == [
        f"{KEY}.rollout_rs_threshold_lower"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [f"{KEY}.rollout_rs=token", f"{KEY}.rollout_rs_threshold=0.5_2"],
            "rollout_rs_threshold=.*: must be one positive bound",
        ),
        (
            [
                f"{KEY}.rollout_rs=geometric",
                f"{KEY}.rollout_rs_threshold=0.9",
                f"{KEY}.rollout_rs_threshold_lower=0.95",
            ],
            "not below rollout_rs_threshold_lower=0.95",
        ),
        ([f"{KEY}.rollout_rs='token,geometric'"], "rollout_rs='token': must list some of token_k1"),
        ([f"{KEY}.rollout_is_threshold=0"], r"rollout_is_threshold=0\.0: must be a number"),
        ([f"{KEY}.rollout_is_threshold='2_1'"], "rollout_is_threshold='2_1': must be a number"),
        ([f"{KEY}.rollout_is_threshold=0.5_2"], r"rollout_is_threshold=0\.52: must be a number"),
        ([f"{KEY}.rollout_is_threshold=[2,3]"], r"rollout_is_threshold=\[2,3\]: must be a number"),
        ([f"{KEY}.rollout_is_threshold=high"], "rollout_is_threshold='high': must be a number"),
        ([f"{KEY}.rollout_rs=token_k4"], "rollout_rs='token_k4': must list some of token_k1"),
        ([f"{KEY}.rollout_rs=token_k1"], "rollout_rs_threshold=None: must be one positive bound"),
        (
            [f"{KEY}.rollout_rs=token_k3", f"{KEY}.rollout_rs_threshold=0.1_0.2"],
            "only k1 takes LOW_HIGH",
        ),
        (
            [f"{KEY}.rollout_rs='token_k1,token_k2'", f"{KEY}.rollout_rs_threshold='1,2,3'"],
            "or one for each of rollout_rs='token_k1,token_k2'",
        ),
        (
            [
                *LAG,
                "actor_rollout_ref.hybrid_engine=False",
                "trainer.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.do_sample=False",
                "actor_rollout_ref.rollout.temperature=0.7",
            ],
            "temperature=0.7: must be 1 with",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_run(config(*arguments))
    assert "\n" not in str(error.value) and "Set " in str(error.value)


@pytest.mark.parametrize(
    "threshold",
    ["0", "0.5", "-1", "inf", "nan", "0_2", "-1_2", "2_0.5", "0.5_inf", "nan_2", "1_2_3"],
)
@pytest.mark.parametrize("option", [o for o in REJECTION_OPTIONS if o.endswith("k1")])
def test_a_bound_that_has_no_logarithm_or_keeps_nothing_is_refused(
    option: str, threshold: str
) -> None:
    keys = (f"{KEY}.rollout_rs={option}", f"{KEY}.rollout_rs_threshold='{threshold}'")
    with pytest.raises(UserError, match="rollout_rs_threshold='.*': must be one .*Set ") as error:
        check_run(config(*keys))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("threshold", ["0", "-1", "inf", "nan", "0_2", "0.5_2"])
@pytest.mark.parametrize("option", [o for o in REJECTION_OPTIONS if not o.endswith("k1")])
def test_a_bound_that_is_not_one_positive_number_is_refused(option: str, threshold: str) -> None:
    keys = (f"{KEY}.rollout_rs={option}", f"{KEY}.rollout_rs_threshold='{threshold}'")
    with pytest.raises(UserError, match="rollout_rs_threshold='.*': must be one .*Set "):
        check_run(config(*keys))


@pytest.mark.parametrize(
    "threshold", ["0.5", "inf", "nan", "-1_5", "2_0.5", "0.5_inf", "nan_2", "0.5_nan", "0.5_5_0"]
)
def test_a_bound_of_weights_that_is_none_is_refused(threshold: str) -> None:
    with pytest.raises(UserError, match="rollout_is_threshold='.*': must be a number.*Set "):
        check_run(config(f"{KEY}.rollout_is_threshold='{threshold}'"))


def test_the_least_that_thresholds_can_be_is_accepted() -> None:
    check_run(config(f"{KEY}.rollout_is_threshold='0_1'"))
    check_run(config(f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=1"))
    check_run(config(f"{KEY}.rollout_rs=token_k3", f"{KEY}.rollout_rs_threshold=1e-9"))


@pytest.mark.parametrize(
    ("argument", "reason", "switch"),
    [
        (
            f"{KEY}.loss_type=reinforce",
            "read only with algorithm.rollout_correction.bypass_mode=True",
            BYPASS,
        ),
        (f"{KEY}.rollout_is_threshold=3", "no importance weights", f"{KEY}.rollout_is=token"),
        (
            f"{KEY}.rollout_rs_threshold=3",
            "read only with algorithm.rollout_correction.rollout_rs!=null",
            f"{KEY}.rollout_rs=token_k1",
        ),
    ],
)
def test_keys_in_vain_are_named(argument: str, reason: str, switch: str) -> None:
    name = argument.split("=", maxsplit=1)[0]
    assert reason in ignored_keys(load_config(RunConfig, [argument]))[name]
    assert name not in ignored_keys(load_config(RunConfig, [argument, switch]))


def test_what_bypass_mode_replaces_is_named() -> None:
    arguments = [BYPASS, f"{KEY}.rollout_is=token", "actor_rollout_ref.actor.clip_ratio=0.1"]
    clipped = ignored_keys(load_config(RunConfig, arguments))
    assert list(clipped) == [f"{KEY}.rollout_is"]
    reinforced = ignored_keys(load_config(RunConfig, [*arguments, f"{KEY}.loss_type=reinforce"]))
    assert list(reinforced) == ["actor_rollout_ref.actor.clip_ratio"]
