# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: a Hugging Face tokenizer, its chat template, its ends of response.

Guarantees: what cannot be loaded is a one-line UserError, at once also where there is no network.
Not here: truncation and filtering (``prompts``), multimodal processors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import jinja2
import tokenizers
import transformers
from httpx import HTTPError
from huggingface_hub import model_info
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils.hub import cached_file

from tandem.errors import UserError
from tandem.types import TokenIds

logger = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
"""What takes the place of the template in tokenizer_config.json, for transformers too."""
_TEMPLATE_SUFFIX = ".jinja"
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

_DECODING = ("decode", "batch_decode", "_decode")
_MIN_IDS_FOR_THREADS = 4096
"""Fewer are decoded before the threads have begun."""

Message = Mapping[str, Any]
Chat = Sequence[Message]


class ChatRefused(ValueError):
    """The chat template failed; ``position`` says on which of the chats given to it."""

    def __init__(self, position: int, cause: str) -> None:
        super().__init__(f"is refused by the chat template ({cause}). Mend or remove it.")
        self.position = position


class TextCodec:
    """A tokenizer with its chat template settings.

    Attributes:
        tokenizer: the Hugging Face tokenizer, for saving beside an exported model.
        eos_ids: ids that end a response, ascending: the tokenizer's and the generation config's.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        eos_ids: TokenIds,
        template_settings: Mapping[str, Any] | None = None,
        own_template: str | None = None,
        key: str = "actor_rollout_ref.model.path",
    ) -> None:
        """``template_settings`` goes to the chat template (``data.apply_chat_template_kwargs``).

        ``own_template`` is the chat template if it is not the one that came with the tokenizer.
        """
        self._key = key
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._template_settings = dict(template_settings or {})
        self._own_template = own_template
        self._decoder = _plain_decoder(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered at all."""
        return bool(self.tokenizer.chat_template)

    @property
    def eos_text(self) -> str:
        """The tokenizer's end-of-sequence token as text. Raises UserError if it has none."""
        if self.tokenizer.eos_token is None:
            raise UserError(
                f"{self._key}={self.tokenizer.name_or_path!r}: the tokenizer has no eos_token, "
                "which ends a response. Set eos_token in tokenizer_config.json."
            )
        return str(self.tokenizer.eos_token)

    def render(self, chats: Sequence[Chat], *, generation_prompt: bool = True) -> list[str]:
        """Chats to text by the chat template.

        Raises:
            UserError: there is no template.
            ChatRefused: the template raises something for a chat.
        """
        if not self.has_chat_template:
            raise UserError(
                f"{self._key}={self.tokenizer.name_or_path!r}: the tokenizer has no chat template "
                "but the data holds messages. Use an instruct model, add chat_template.jinja to "
                "the model folder, or give prompts as plain strings."
            )
        if not chats:
            return []
        try:
            return self._apply_template(chats, generation_prompt)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{self._key}={self.tokenizer.name_or_path!r}: the chat template is not valid "
                f"Jinja (line {error.lineno}: {error.message}). Mend it."
            ) from error
        except Exception:  # a template is a program and can raise anything
            for position, chat in enumerate(chats):
                self._apply_alone(chat, position, generation_prompt=generation_prompt)
            raise

    def _apply_alone(self, chat: Chat, position: int, *, generation_prompt: bool) -> None:
        try:
            self._apply_template([chat], generation_prompt)
        except Exception as error:
            raise ChatRefused(position, str(error)) from error

    def _apply_template(self, chats: Sequence[Chat], generation_prompt: bool) -> list[str]:
        texts = self.tokenizer.apply_chat_template(
            [[_present(message) for message in chat] for chat in chats],
            tokenize=False,
            **{**self._template_settings, "add_generation_prompt": generation_prompt},
        )
        return [str(text) for text in texts]

    def encode(
        self, texts: Sequence[str], *, plain: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Token ids of each text, in one batch spread over threads. A text marked ``plain`` gets
        the tokenizer's special tokens, if any; rendered templates have theirs already."""
        plain = [False] * len(texts) if plain is None else plain
        pairs = list(zip(texts, plain, strict=True))
        rendered_ids = iter(self._encode([text for text, is_plain in pairs if not is_plain], False))
        plain_ids = iter(self._encode([text for text, is_plain in pairs if is_plain], True))
        return [next(plain_ids if is_plain else rendered_ids) for is_plain in plain]

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, add_special_tokens=special_tokens, return_attention_mask=False
        )
        return encoded["input_ids"]

    def encode_answered(self, chats: Sequence[Chat], answers: Sequence[str]) -> list[list[int]]:
        """Token ids of whole conversations: each chat with its answer. Raises as ``render``."""
        answered = [
            [*chat, {"role": "assistant", "content": answer}]
            for chat, answer in zip(chats, answers, strict=True)
        ]
        return self.encode(self.render(answered, generation_prompt=False))

    def save_own_template(self, folder: Path) -> None:
        """Leave the chat template that was trained with in a model folder, if it is not the one
        that lies there already.
        """
        if self._own_template is not None:
            path = folder / TEMPLATE_FILE
            path.write_text(self._own_template, encoding="utf-8")

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Text of each sequence of ids; rewards see it without special tokens, as in verl."""
        if self._decoder is None:
            sequences = [list(sequence) for sequence in ids]
            return self.tokenizer.batch_decode(sequences, skip_special_tokens=skip_special)
        if sum(map(len, ids)) < _MIN_IDS_FOR_THREADS:
            return [self._decoder.decode(one, skip_special_tokens=skip_special) for one in ids]
        return self._decoder.decode_batch(list(ids), skip_special_tokens=skip_special)


def load_codec(
    path: str,
    *,
    template_settings: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    key: str = "actor_rollout_ref.model.path",
) -> TextCodec:
    """Load the tokenizer of a model.

    Args:
        path: a local folder (``~`` is expanded), or the id of a model in the hub's cache or on it.
        template_settings: passed to the chat template.
        chat_template: replaces the tokenizer's own; the text itself, or a file ``*.jinja``.
        trust_remote_code: whether code that comes with the tokenizer may run.
        key: the configuration key ``path`` came from, for messages.

    Raises:
        UserError: nothing could be loaded from there.
    """
    folder = Path(path).expanduser()
    local = folder.is_dir() or _is_cached(path, key)
    if not local:
        _require_on_hub(path, key)
    source = str(folder) if folder.is_dir() else path
    try:
        tokenizer = _loader(source, local=local).from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{key}={path!r}: no tokenizer could be loaded from there ({_first_words(error)}). "
            "A model folder needs tokenizer.json and tokenizer_config.json."
        ) from error
    own_template = None if chat_template is None else _read_template(chat_template)
    if own_template is not None:
        tokenizer.chat_template = own_template
    generation_config = _find_file(source, "generation_config.json", local=local)
    eos_ids = _eos_ids(tokenizer, generation_config, key=key)
    logger.debug("tokenizer %s: %d tokens, eos ids %s", source, len(tokenizer), eos_ids)
    return TextCodec(
        tokenizer,
        eos_ids=eos_ids,
        template_settings=template_settings,
        own_template=own_template,
        key=key,
    )


def _plain_decoder(tokenizer: Any) -> tokenizers.Tokenizer | None:
    """The fast tokenizer below one of transformers, which decodes a batch on all cores and not one
    sequence after the other; None if a text is more than what that makes of the ids."""
    plain, own = transformers.PreTrainedTokenizerFast, type(tokenizer)
    is_plain = all(getattr(own, name) is getattr(plain, name) for name in _DECODING)
    if not is_plain or tokenizer.clean_up_tokenization_spaces:
        return None
    return tokenizer.backend_tokenizer


def _read_template(value: str) -> str:
    """The text of a template. Raises UserError if it names a file that cannot be read."""
    if not value.endswith(_TEMPLATE_SUFFIX):
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"custom_chat_template={value!r}: cannot be read ({_first_words(error)}). "
            "Name a file that holds a chat template, or write the template itself."
        ) from error


def _loader(source: str, *, local: bool) -> Any:
    """The class that loads the tokenizer of ``source``: for one that says it is generic the generic
    class, without the second that looking through all families takes."""
    settings = _find_file(source, "tokenizer_config.json", local=local)
    named = "" if settings is None else json.loads(settings.read_text()).get("tokenizer_class")
    has_tokens = _find_file(source, "tokenizer.json", local=local) is not None
    is_generic = has_tokens and named in _GENERIC_CLASSES
    return transformers.PreTrainedTokenizerFast if is_generic else transformers.AutoTokenizer


def _find_file(source: str, name: str, *, local: bool) -> Path | None:
    """A file of a model folder, of the hub's cache or, unless ``local``, of the hub."""
    file = cached_file(
        source,
        name,
        local_files_only=local,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if file is None else Path(file)


def _is_cached(path: str, key: str) -> bool:
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise UserError(f"{key}={path!r}: no such folder. Check the path.") from error
    return _find_file(path, "tokenizer_config.json", local=True) is not None


def _require_on_hub(path: str, key: str) -> None:
    """Ask the hub once and briefly; loading from a hub out of reach retries for half a minute."""
    try:
        model_info(path, timeout=10)
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            f"{key}={path!r}: neither a local folder, nor in the Hugging Face cache, nor to be had "
            f"from the hub ({_first_words(error)}). Give a folder, or fetch it where there is a "
            f"network: hf download {path}"
        ) from error


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _eos_ids(
    tokenizer: transformers.PreTrainedTokenizerBase, config: Path | None, *, key: str
) -> TokenIds:
    """Ascending. Chat models often list more than one: the end of a turn and the end of text."""
    ids = [] if config is None else _listed_eos_ids(config, key)
    if isinstance(tokenizer.eos_token_id, int):
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


def _listed_eos_ids(file: Path, key: str) -> list[int]:
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except ValueError as error:
        raise UserError(f"{key}: {file} is not valid JSON ({error}). Mend or remove it.") from error
    if listed is None:
        return []
    return [int(token) for token in (listed if isinstance(listed, list) else [listed])]


def is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether a value read from a file is a list of messages."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and _is_message(message) for message in value)
    )


def _is_message(message: Message) -> bool:
    says_something = message.get("content") is not None or bool(message.get("tool_calls"))
    return isinstance(message.get("role"), str) and says_something


def _present(message: Message) -> dict[str, Any]:
    """Parquet fills fields that only other rows have with None; a template must not see those."""
    return {name: value for name, value in message.items() if value is not None}
