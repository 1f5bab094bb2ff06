# SPDX-License-Identifier: Apache-2.0
"""The rules for models with experts, which need the content of config.json."""

from __future__ import annotations

from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

_ATTENTION = "[q_proj,k_proj,v_proj,o_proj]"


def require_built(config: RunConfig | SftConfig, sizes: ModelSizes | None) -> None:
    """Raise UserError if a key asks for what is not built for models with experts.

    Args:
        sizes: the sizes of the trained model; None for an unknown model, which is not checked.
    """
    if sizes is None or sizes.experts is None:
        return
    model = trained_model(config)
    adapters, own = model.adapters, model.of_task["actor-train"]
    if adapters is not None and any(".mlp." in name for name in adapters.modules(sizes.num_layers)):
        raise UserError(
            f"{adapters.section}.target_modules",
            adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets),
            rule="adapters (LoRA) of the feed-forward are not built for models with experts",
            remedy=f"Set {adapters.section}.target_modules={_ATTENTION}.",
        )
    if own.optim is not None and own.optim.optimizer == "Muon":
        key = f"{own.section.rpartition('.')[0]}.optim.optimizer".removeprefix(".")
        raise UserError(
            key, "Muon", rule="it is not built for models with experts", remedy=f"Set {key}=AdamW."
        )
    if isinstance(config, RunConfig):
        quantization = config.actor_rollout_ref.rollout.quantization
        if quantization is not None:
            key = "actor_rollout_ref.rollout.quantization"
            rule = "it is not built for models with experts"
            raise UserError(key, quantization, rule=rule, remedy=f"Leave out {key}.")
