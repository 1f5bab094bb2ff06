# SPDX-License-Identifier: Apache-2.0
"""The rules for layers that megatron-core computes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from tandem.config.derived.pools import RankLayout
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import ModelOfTask
from tandem.errors import UserError

_ENGINE = "of Megatron needs Transformer Engine, which tandem does not use"


def mcore_errors(
    layout: RankLayout, sizes: ModelSizes, *, model: ModelOfTask
) -> Iterator[UserError]:
    """Yield the errors in ``backend=mcore``."""
    if not layout.groups_heads:
        return
    key = f"{model.section}.backend"
    rules = {
        "it trains on two devices or more": layout.num_ranks == 1,
        f"a layer with experts {_ENGINE}": sizes.experts is not None,
        "latent attention is not built for it": sizes.latent is not None,
        f"context parallelism {_ENGINE}": layout.sequence_parallel > 1,
        "models that see are not built for it": sizes.tower > 0,
        "adapters (LoRA) are not built for it": model.config.trains_adapters,
        "it recomputes whole layers only, by recompute_granularity=full": (
            model.config.enable_gradient_checkpointing
            and model.config.recompute_granularity != "full"
        ),
    }
    for rule, is_broken in rules.items():
        if is_broken:
            yield UserError(key, "mcore", rule=rule, remedy=f"Set {key}=native.")
    stored, stored_key = model.layout.model_dtype, f"{model.section}.model_dtype"
    if model.optim is not None and stored != "float32":
        yield UserError(
            stored_key,
            stored,
            rule=f"{key}=mcore stores the weights of its layers in float32 only",
            remedy=f"Set {stored_key}=float32.",
        )


def require_megatron_core(
    key: str | None, *, platform: str, runs_megatron: bool, adaptor: str = ""
) -> None:
    """Raise UserError if a model needs megatron-core and this machine cannot compute with it.

    Args:
        key: the key that asks for megatron-core; None if no model does.
        platform: the name of the platform of the devices that train.
        runs_megatron: whether they compute its layers.
        adaptor: the package with which they do; "" if they need none.
    """
    if key is None:
        return
    if not runs_megatron:
        raise UserError(
            key,
            "mcore",
            rule="it computes on NVIDIA's and Huawei's devices only, and the platform is "
            f"{platform}",
            remedy=f"Set {key}=native.",
        )
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise UserError(
            key,
            "mcore",
            rule="megatron-core is not installed",
            remedy=f"Run pip install 'megatron-core>=0.16', or set {key}=native.",
        )
    if adaptor and find_spec(adaptor) is None:
        raise UserError(
            key,
            "mcore",
            rule=f"on {platform} it needs the package {adaptor}, which is not installed",
            remedy=f"Install {adaptor} beside the megatron-core that it names, or set "
            f"{key}=native.",
        )
