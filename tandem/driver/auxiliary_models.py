# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's model folders (trained model, critic, reward model) before anything is loaded.

Each is checked against the others and against the data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandem.config.derived.pools import CRITIC, REWARD_MODEL, place_run
from tandem.config.derived.trained_model import TrainedModel
from tandem.config.schema.run import RunConfig
from tandem.data.rendering import PromptEntry
from tandem.data.tokenizer import ChatRefused, TextCodec, load_codec
from tandem.driver.model_checks import (
    length_warnings,
    position_warnings,
    require_known_tokens,
    require_vocabulary,
)
from tandem.errors import UserError
from tandem.models.folder import ModelFolder, adapt_folder, check_folder
from tandem.workers.deployment import policy_spec
from tandem.workers.policies import policy_folder

logger = logging.getLogger(__name__)

_KEY = "reward_model.model.path"
_SOME_ANSWER = "Yes."


def open_trained_model(
    model: TrainedModel, *, template_settings: Mapping[str, Any], fetches_weights: bool = True
) -> tuple[ModelFolder, TextCodec]:
    """Return the checked folder of the model that a command trains, and its tokenizer.

    Args:
        template_settings: the arguments of the chat template.
        fetches_weights: whether weights that are only on the hub are downloaded.

    Raises:
        UserError: the folder or the tokenizer cannot be used.
    """
    config = model.config
    folder = check_folder(
        config.path,
        trust_remote_code=config.trust_remote_code,
        load_weight=model.load_weight,
        fetches_weights=fetches_weights,
        key=model.key,
    )
    if model.adapters is not None:
        folder = adapt_folder(folder, model.adapters, seed=0)
        decoder = folder.decoder_config
        assert decoder is not None, "only models of our decoder have adapters"
        for warning in model.adapters.warnings(
            decoder.num_layers, model=config.path, sees=decoder.vision is not None
        ):
            logger.warning("%s", warning)
    codec = load_codec(
        config.path,
        template_settings=template_settings,
        chat_template=model.chat_template,
        trust_remote_code=config.trust_remote_code,
        key=model.key,
    )
    return folder, codec


def check_tokens(
    model: TrainedModel, folder: ModelFolder, *, token_ids: Sequence[np.ndarray]
) -> None:
    """Raise UserError if the data has unknown tokens; warn if it is too long for the model.

    Args:
        token_ids: one array per sequence of the data.
    """
    require_known_tokens(token_ids, folder.hf_config, path=model.config.path, key=model.key)
    for warning in length_warnings(model, folder.hf_config):
        logger.warning("%s", warning)


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """The critic and the reward model of a run.

    Attributes:
        folders: their checked folders, by task.
        conversations: the tokenizer of the reward model's input; None if that is the policy's
            tokens.
    """

    folders: Mapping[str, ModelFolder]
    conversations: TextCodec | None


def check_auxiliary_models(
    config: RunConfig,
    policy: ModelFolder,
    *,
    entries: Sequence[PromptEntry],
    fetches_weights: bool = True,
) -> AuxiliaryModels:
    """Return the critic and the reward model, if the run needs them.

    Args:
        entries: the training prompts.
        fetches_weights: whether weights that are only on the hub are downloaded.

    Raises:
        UserError: a folder holds no such model, or the model cannot read its input.
    """
    folders: dict[str, ModelFolder] = {}
    if config.uses_critic:
        spec = policy_spec(config, place_run(config), task=CRITIC)
        critic = policy_folder(spec, fetches_weights=fetches_weights)
        folders[CRITIC] = critic
        path, key = config.critic.model.path, "critic.model.path"
        require_vocabulary(critic.hf_config, policy.hf_config, path=path, key=key)
    if not config.reward_model.enable:
        return AuxiliaryModels(folders, None)
    spec = policy_spec(config, place_run(config), task=REWARD_MODEL)
    judge = policy_folder(spec, fetches_weights=fetches_weights)
    folders[REWARD_MODEL] = judge
    path = config.reward_model.model.path
    if config.reward_model.model.input_tokenizer is None:
        require_vocabulary(judge.hf_config, policy.hf_config, path=path, key=_KEY)
        conversations = None
    else:
        conversations = _open_conversations(config, judge, entries=entries)
    for warning in position_warnings(
        judge.hf_config,
        config.data.max_prompt_length + config.data.max_response_length,
        keys="data.max_prompt_length + data.max_response_length",
        model=f"{_KEY}={path!r}",
    ):
        logger.warning("%s", warning)
    return AuxiliaryModels(folders, conversations)


def _open_conversations(
    config: RunConfig, judge: ModelFolder, *, entries: Sequence[PromptEntry]
) -> TextCodec:
    """Return the reward model's tokenizer, after rendering every prompt with it once."""
    model = config.reward_model.model
    codec = load_codec(
        model.path,
        chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
        key=_KEY,
    )
    chats = [entry.messages for entry in entries if not isinstance(entry.messages, str)]
    if len(chats) < len(entries):
        raise UserError(
            "reward_model.model.input_tokenizer",
            model.input_tokenizer,
            rule="must be null if prompts are plain text, because conversations are rendered "
            "from messages",
            remedy="Set reward_model.model.input_tokenizer=null and use a reward model with the "
            "policy's tokenizer.",
        )
    try:
        rows = codec.encode_answered(chats, [_SOME_ANSWER] * len(chats))
    except ChatRefused as error:
        rule = f"row {entries[error.position].row} of data.train_files {error}"
        raise UserError(_KEY, model.path, rule=rule, remedy="Correct or remove the row.") from error
    ids = (np.array(row) for row in rows)
    require_known_tokens(ids, judge.hf_config, path=model.path, key=_KEY)
    return codec
