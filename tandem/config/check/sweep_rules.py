# SPDX-License-Identifier: Apache-2.0
"""The rules for runs of one sweep, which train adapters over one base in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.config.derived.trained_model import place, trained_model
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

_ROLES = "actor_rollout_ref"
_SHARED: Mapping[str, Callable[[RunConfig], Any]] = {
    f"{_ROLES}.model.path": lambda config: config.actor_rollout_ref.model.path,
    f"{_ROLES}.actor.load_weight": lambda config: trained_model(config).load_weight,
    f"{_ROLES}.actor.fsdp_config.dtype": lambda config: (
        config.actor_rollout_ref.actor.fsdp_config.dtype
    ),
    "trainer.seed": lambda config: (  # which draws the weights of a base that is not loaded
        None if trained_model(config).load_weight else config.trainer.seed
    ),
    "trainer.device": lambda config: config.trainer.device,
}
"""The keys that make the base, which all runs share."""


def check_sweep(configs: Sequence[RunConfig]) -> None:
    """Raise UserError if the runs of a sweep cannot share a base and a process."""
    for config in configs:
        _check_run(config)
    for key, value_of in _SHARED.items():
        values = list(dict.fromkeys(value_of(config) for config in configs))
        if len(values) > 1:
            raise UserError(
                key,
                ",".join(map(str, values)),
                rule="the runs of a sweep share one base, which this key makes",
                remedy="Give it one value, and start a sweep for each.",
            )


def _check_run(config: RunConfig) -> None:
    roles, trainer = config.actor_rollout_ref, config.trainer
    rollout = roles.rollout
    model = f"{_ROLES}.model"
    if trained_model(config).adapters is None:
        raise UserError(
            f"{model}.lora_rank",
            roles.model.lora_rank,
            rule="the runs of a sweep train adapters over one base",
            remedy=f"Set {model}.lora_rank=32, or start each run by tandem train.",
        )
    alone = place(config).is_one_process and trainer.nnodes == 1
    wrong = (
        ("trainer.n_gpus_per_node", trainer.n_gpus_per_node, not alone, "runs in one process"),
        ("trainer.max_lag", trainer.max_lag, trainer.max_lag > 0, "does not train asynchronously"),
        ("trainer.max_restarts", trainer.max_restarts, trainer.max_restarts > 0, "starts once"),
        (
            f"{_ROLES}.rollout.name",
            rollout.name,
            rollout.name not in ("auto", "native"),
            "generates with the native engine",
        ),
        (
            f"{_ROLES}.rollout.quantization",
            rollout.quantization,
            rollout.quantization is not None,
            "generates in the precision of the base",
        ),
        (
            "algorithm.adv_estimator",
            config.algorithm.adv_estimator,
            config.uses_critic,
            "has no critics",
        ),
        ("reward_model.enable", True, config.reward_model.enable, "has no reward models"),
    )
    for key, value, is_wrong, rule in wrong:
        if is_wrong:
            remedy = "Leave it out, or start each run by tandem train."
            raise UserError(key, value, rule=f"a sweep {rule}", remedy=remedy)
