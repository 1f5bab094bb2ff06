# SPDX-License-Identifier: Apache-2.0
"""The rules for models with experts, which need the content of config.json."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_ATTENTION = "[q_proj,k_proj,v_proj,o_proj]"


def replay_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield errors in the keys of routing replay."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    records = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if mode == "R2":
        yield UserError(
            _MODE, mode, rule="is not built", remedy=f"Set {_MODE}=R3 and {_RECORDS}=True."
        )
    elif mode == "R3" and not records:
        rule = f"replays what the rollout records, and {_RECORDS}=False"
        yield UserError(_MODE, mode, rule=rule, remedy=f"Set {_RECORDS}=True.")
    elif mode == "disabled" and records:
        rule = f"nothing reads the experts that it records, as {_MODE}=disabled"
        yield UserError(_RECORDS, True, rule=rule, remedy=f"Set {_MODE}=R3.")


def require_built(config: RunConfig | SftConfig, sizes: ModelSizes | None) -> None:
    """Raise UserError if a key asks for what is not built for models with experts.

    Args:
        sizes: the sizes of the trained model; None for an unknown model, which is not checked.
    """
    if sizes is None:
        return
    if sizes.experts is None:
        _require_no_replay(config)
        return
    adapters = trained_model(config).adapters
    if adapters is not None and any(".mlp." in name for name in adapters.modules(sizes.num_layers)):
        raise UserError(
            f"{adapters.section}.target_modules",
            adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets),
            rule="adapters (LoRA) of the feed-forward are not built for models with experts",
            remedy=f"Set {adapters.section}.target_modules={_ATTENTION}.",
        )
    if isinstance(config, RunConfig):
        quantization = config.actor_rollout_ref.rollout.quantization
        if quantization is not None:
            key = "actor_rollout_ref.rollout.quantization"
            rule = "it is not built for models with experts"
            raise UserError(key, quantization, rule=rule, remedy=f"Leave out {key}.")


def _require_no_replay(config: RunConfig | SftConfig) -> None:
    if isinstance(config, RunConfig):
        mode = config.actor_rollout_ref.actor.router_replay.mode
        if mode != "disabled":
            rule = "the model has no experts, so there is no choice to replay"
            remedy = f"Leave out {_MODE} and {_RECORDS}."
            raise UserError(_MODE, mode, rule=rule, remedy=remedy)
