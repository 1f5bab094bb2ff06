# SPDX-License-Identifier: Apache-2.0
"""Runs of models that see: how the model reads pictures, and what is not built for them yet."""

from __future__ import annotations

from dataclasses import replace

from tandem.config.derived.model_values import wrong_value
from tandem.config.derived.vision import read_pixel_bounds, text_part
from tandem.config.schema.data import PictureConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.data.images import PictureRule
from tandem.data.tokenizer import TextCodec
from tandem.errors import UserError
from tandem.models.folder import ModelFolder

_KEYS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")


def picture_rule(
    config: RunConfig | SftConfig, folder: ModelFolder, *, codec: TextCodec
) -> PictureRule | None:
    """Return how the model of a run reads pictures; None for a model of text.

    Raises:
        UserError: the run needs what is not built for models that see, or a file of the model does
            not say how it reads pictures.
    """
    vision = None if folder.decoder_config is None else folder.decoder_config.vision
    if vision is None:
        return None
    if isinstance(config, RunConfig) and config.reward_model.enable:
        rule = "reward models do not see, and the policy does"
        raise UserError("reward_model.enable", True, rule=rule, remedy="Use a reward function.")
    if isinstance(config, RunConfig) and config.uses_critic:
        rule = "critics do not see, and the policy does"
        remedy = "Use an estimator without a critic, such as algorithm.adv_estimator=grpo."
        raise UserError("critic.model.path", config.critic.model.path, rule=rule, remedy=remedy)
    data, limit = config.data, None
    if isinstance(config, RunConfig):
        limit = config.actor_rollout_ref.rollout.limit_images
    rule = reading_rule(folder, data.mm_processor_kwargs, codec=codec)
    return None if rule is None else replace(rule, max_pictures=limit, column=data.image_key)


def reading_rule(
    folder: ModelFolder, sizes: PictureConfig, *, codec: TextCodec
) -> PictureRule | None:
    """Return how a model reads any number of pictures; None for a model of text.

    Args:
        sizes: bounds that replace those of the model.

    Raises:
        UserError: a file of the model does not say how it reads pictures, or ``sizes`` are wrong.
    """
    vision = None if folder.decoder_config is None else folder.decoder_config.vision
    if vision is None:
        return None
    ids = [folder.hf_config.get(key) for key in _KEYS]
    known = [token for token in ids if isinstance(token, int)]
    if len(known) < len(ids):
        missing = _KEYS[[isinstance(token, int) for token in ids].index(False)]
        value = folder.hf_config.get(missing)
        raise wrong_value(missing, value, rule="must be the id of a token")
    fewest, most = read_pixel_bounds(folder.path)
    fewest = fewest if sizes.min_pixels is None else sizes.min_pixels
    most = most if sizes.max_pixels is None else sizes.max_pixels
    smallest = vision.token_side**2
    if most < max(fewest, smallest):
        raise UserError(
            "data.mm_processor_kwargs.max_pixels",
            most,
            rule=f"must not be below min_pixels ({fewest}), or below one token ({smallest})",
            remedy="Raise it.",
        )
    return PictureRule(
        side=vision.token_side,
        min_pixels=fewest,
        max_pixels=most,
        vocabulary=text_part(folder.hf_config)["vocab_size"],
        placeholder=known[1],
        texts=tuple(codec.decode([[token] for token in known], skip_special=False)),
    )
