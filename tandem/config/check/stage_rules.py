# SPDX-License-Identifier: Apache-2.0
"""The rules for stages of layers, which need the content of config.json."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.config.derived.pools import RankLayout
from tandem.config.derived.sizes import ModelSizes
from tandem.errors import UserError


def stage_errors(layout: RankLayout, sizes: ModelSizes, *, section: str) -> Iterator[UserError]:
    """Yield the error in dividing the layers of a model into stages.

    Args:
        section: the section of the keys, for messages.
    """
    stages, key = layout.pipeline_parallel, f"{section}.pipeline_model_parallel_size"
    given = {
        f"{section}.num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        f"{section}.num_layers_in_last_pipeline_stage": layout.last_stage_layers,
    }
    given = {name: count for name, count in given.items() if count is not None}
    if stages == 1:
        for name, count in given.items():
            rule, remedy = f"there is one stage, as {key}=1", f"Leave out {name}."
            yield UserError(name, count, rule=rule, remedy=remedy)
        return
    if sizes.tower:
        rule = "stages of layers are not built for models that see"
        yield UserError(key, stages, rule=rule, remedy=f"Leave out {key}.")
    if stages > sizes.num_layers:
        yield UserError(
            key,
            stages,
            rule=f"there are more stages than the {sizes.num_layers} layers of the model",
            remedy=f"Set {key}={sizes.num_layers} or less.",
        )
        return
    left, free = sizes.num_layers - sum(given.values()), stages - len(given)
    if given and (left < free or (free == 0 and left)):
        name, count = next(iter(given.items()))
        rest = f"{left} of {sizes.num_layers} layers to {free} other stage(s)"
        yield UserError(
            name,
            count,
            rule=f"it leaves {rest}, and each layer needs a stage and each stage a layer",
            remedy=f"Leave out {name} for equal shares.",
        )
