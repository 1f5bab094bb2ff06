# SPDX-License-Identifier: Apache-2.0
"""How Megatron is brought to Ascend devices: MindSpeed replaces parts of it, told by the settings
of a run, before its groups are formed.

There is no Megatron engine yet (``actor.strategy=megatron`` is refused): this is its first step on
such devices, and nothing calls it before then. Importing this file replaces nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.schema.fsdp import MegatronConfig
from tandem.errors import UserError


def mindspeed_settings(config: MegatronConfig) -> dict[str, Any]:
    """What MindSpeed is told: the sizes that its replacements depend on, then what the user wrote.

    Example:
        >>> mindspeed_settings(MegatronConfig(override_transformer_config={"use_flash_attn": True}))
        {'context_parallel_size': 1, 'use_flash_attn': True}
    """
    return {
        "context_parallel_size": config.context_parallel_size,
        **config.override_transformer_config,
    }


def start_megatron(config: MegatronConfig, *, key: str) -> Mapping[str, Any]:
    """Replace, then form Megatron's groups. Returns what MindSpeed was told.

    Args:
        key: what asked for Megatron, for the message.

    Raises:
        UserError: a package is missing.
    """
    settings = mindspeed_settings(config)
    try:
        _replace_parts(settings)
        _form_groups(config)
    except ImportError as error:
        raise UserError(
            f"{key}=megatron: on this platform it takes the packages mindspeed and megatron-core "
            f"({error}). Install them, or set {key}=fsdp."
        ) from error
    return settings


def _replace_parts(settings: Mapping[str, Any]) -> None:
    """Importing the adaptor replaces parts of Megatron already, hence before Megatron is used."""
    from mindspeed.megatron_adaptor import repatch  # pyright: ignore[reportMissingImports]

    repatch(settings)


def _form_groups(config: MegatronConfig) -> None:
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
    )
