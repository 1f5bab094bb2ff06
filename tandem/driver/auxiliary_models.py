# SPDX-License-Identifier: Apache-2.0
"""The models beside the policy of a run, critic and reward model, and whether they can be it: all
that can be said before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.config.derived.pools import CRITIC, REWARD_MODEL, place_run
from tandem.config.schema.run import RunConfig
from tandem.data.prompts import PromptEntry
from tandem.data.tokenizer import ChatRefused, TextCodec, load_codec
from tandem.driver.model_checks import position_caution, require_known_tokens, require_vocabulary
from tandem.errors import UserError
from tandem.models.folder import ModelFolder
from tandem.workers.deployment import policy_spec
from tandem.workers.policies import policy_folder

logger = logging.getLogger(__name__)

_KEY = "reward_model.model.path"
_SOME_ANSWER = "Yes."


@dataclass(frozen=True, slots=True)
class Beside:
    """By their names in a placement's layouts; ``conversations`` renders what the reward model
    reads, None if that are the policy's own tokens."""

    folders: Mapping[str, ModelFolder]
    conversations: TextCodec | None


def check_beside(
    config: RunConfig, policy: ModelFolder, *, entries: Sequence[PromptEntry]
) -> Beside:
    """The models beside ``policy`` that the run needs.

    Args:
        entries: what is trained on.

    Raises:
        UserError: a folder that is no such model, or one that cannot read what it is to.
    """
    folders: dict[str, ModelFolder] = {}
    if config.uses_critic:
        folders[CRITIC] = critic = policy_folder(
            policy_spec(config, place_run(config), task=CRITIC)
        )
        path, key = config.critic.model.path, "critic.model.path"
        require_vocabulary(critic.hf_config, policy.hf_config, path=path, key=key)
    if not config.reward_model.enable:
        return Beside(folders, None)
    folders[REWARD_MODEL] = judge = policy_folder(
        policy_spec(config, place_run(config), task=REWARD_MODEL)
    )
    path = config.reward_model.model.path
    if config.reward_model.model.input_tokenizer is None:
        require_vocabulary(judge.hf_config, policy.hf_config, path=path, key=_KEY)
        conversations = None
    else:
        conversations = _conversations(config, judge, entries=entries)
    for warning in position_caution(
        judge.hf_config,
        config.data.max_prompt_length + config.data.max_response_length,
        keys="data.max_prompt_length + data.max_response_length",
        model=f"{_KEY}={path!r}",
    ):
        logger.warning("%s", warning)
    return Beside(folders, conversations)


def _conversations(
    config: RunConfig, judge: ModelFolder, *, entries: Sequence[PromptEntry]
) -> TextCodec:
    """The reward model's tokenizer, which has been tried on all prompts."""
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
            f"reward_model.model.input_tokenizer={model.input_tokenizer!r}: must be null with "
            "prompts that are plain text, as conversations are rendered from messages. Set "
            "reward_model.model.input_tokenizer=null, for a model with the policy's tokens."
        )
    try:
        rows = codec.encode_answered(chats, [_SOME_ANSWER] * len(chats))
    except ChatRefused as error:
        rule = f"row {entries[error.position].row} of data.train_files {error}"
        raise UserError(_KEY, model.path, rule=rule, remedy="Correct or remove the row.") from error
    ids = (np.array(row) for row in rows)
    require_known_tokens(ids, judge.hf_config, path=model.path, key=_KEY)
    return codec
