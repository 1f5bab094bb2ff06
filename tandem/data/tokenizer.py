# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face tokenizer with its chat template and its end-of-response tokens.

Multimodal processors are not supported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import jinja2
import tokenizers
import transformers
from httpx import HTTPError
from huggingface_hub import model_info
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils.hub import cached_file

from tandem.config.parse.json_content import read_object
from tandem.data.byte_decoder import ByteDecoder
from tandem.errors import UserError, shown_value
from tandem.types import TokenIds

logger = logging.getLogger(__name__)

TEMPLATE_FILE = "chat_template.jinja"
"""The file that replaces the template of tokenizer_config.json, also for transformers."""
_TEMPLATE_SUFFIX = ".jinja"
_SETTINGS_FILE = "tokenizer_config.json"
_TOKEN = ("a text or a mapping", (str, dict))
_SETTINGS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "tokenizer_class": ("a text", (str,)),
    "model_max_length": ("a number", (int, float)),
    "chat_template": ("a text or a list of mappings", (str, list, dict)),
    "added_tokens_decoder": ("a mapping", (dict,)),
    "extra_special_tokens": ("a list or a mapping", (list, dict)),
    "additional_special_tokens": ("a list", (list,)),
    **dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), _TOKEN),
}
"""The types of values in tokenizer_config.json, whose readers in transformers check few."""
_MAX_ID = 2**31 - 1
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tokenization_*.py")

_DECODING = ("decode", "batch_decode", "_decode")
_MIN_IDS_FOR_THREADS = 4096
"""The number of ids from which threads, or a table of bytes, decode faster than a loop."""

_PROMPTS = "add_generation_prompt"
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})

Message = Mapping[str, Any]
Chat = Sequence[Message]


class ChatRefused(ValueError):
    """The error of a chat template that fails on a chat. ``position`` is the index of the chat.

    Its text completes a sentence whose subject is the row of the chat.
    """

    def __init__(self, position: int, cause: str) -> None:
        super().__init__(f"is refused by the chat template ({cause})")
        self.position = position


class TextCodec:
    """A tokenizer with its chat template settings.

    Attributes:
        tokenizer: the Hugging Face tokenizer, for saving beside an exported model.
        eos_ids: the ids that end a response, ascending, from tokenizer and generation config.
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
        """Create a codec.

        Args:
            template_settings: the arguments of the chat template
                (``data.apply_chat_template_kwargs``).
            own_template: the chat template, if it replaces the tokenizer's.
            key: the configuration key of the model, for messages.
        """
        self._key = key
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self._template_settings = dict(template_settings or {})
        self._own_template = own_template
        self._decoder = _plain_decoder(tokenizer)

    @functools.cached_property
    def _byte_decoder(self) -> ByteDecoder | None:
        """The decoder for many ids; None if the vocabulary is not byte-level."""
        decoder = self._decoder
        return ByteDecoder(decoder) if decoder and ByteDecoder.can_decode(decoder) else None

    @functools.cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token, which is no fewer than it stands for."""
        return max(map(len, self.tokenizer.get_vocab()))

    @property
    def has_chat_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def eos_text(self) -> str:
        """The tokenizer's end-of-sequence token as text. Raises UserError if it has none."""
        if self.tokenizer.eos_token is None:
            raise UserError(
                self._key,
                self.tokenizer.name_or_path,
                rule="the tokenizer has no eos_token, which ends a response",
                remedy="Set eos_token in tokenizer_config.json.",
            )
        return str(self.tokenizer.eos_token)

    def rendering_digest(self) -> str | None:
        """Return a hash of all that decides the tokens of a chat besides its messages.

        None if there is no such hash: a tokenizer without a Rust backend, or a template that asks
        for the time.
        """
        template = str(self.tokenizer.chat_template)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or "strftime_now" in template:
            return None
        parts = [
            *(transformers.__version__, tokenizers.__version__, template),
            *(json.dumps(self._template_settings, sort_keys=True, default=str), backend.to_str()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def render(
        self,
        chats: Sequence[Chat],
        *,
        generation_prompt: bool = True,
        settings: Mapping[str, Any] = NO_SETTINGS,
    ) -> list[str]:
        """Render chats by the chat template.

        Args:
            settings: more arguments of the template, e.g. ``tools``.

        Raises:
            UserError: there is no template, or it is not valid Jinja.
            ChatRefused: the template raises an exception for a chat.
        """
        if not self.has_chat_template:
            raise UserError(
                self._key,
                self.tokenizer.name_or_path,
                rule="the tokenizer has no chat template, but the data has messages",
                remedy="Use an instruct model, add chat_template.jinja to the model folder, or "
                "give prompts as plain strings.",
            )
        if not chats:
            return []
        try:
            return self._apply_template(chats, {**settings, _PROMPTS: generation_prompt})
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                self._key,
                self.tokenizer.name_or_path,
                rule=f"the chat template is not valid Jinja (line {error.lineno}: {error.message})",
                remedy="Correct the template.",
            ) from error
        except Exception:  # a template is a program and can raise anything
            for position, chat in enumerate(chats):
                self._apply_alone(
                    chat, position, settings={**settings, _PROMPTS: generation_prompt}
                )
            raise

    def _apply_alone(self, chat: Chat, position: int, *, settings: Mapping[str, Any]) -> None:
        try:
            self._apply_template([chat], settings)
        except Exception as error:
            raise ChatRefused(position, str(error)) from error

    def _apply_template(self, chats: Sequence[Chat], settings: Mapping[str, Any]) -> list[str]:
        texts = self.tokenizer.apply_chat_template(
            [[_present(message) for message in chat] for chat in chats],
            tokenize=False,
            **{**self._template_settings, **settings},
        )
        return [str(text) for text in texts]

    def encode(
        self, texts: Sequence[str], *, plain: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Return the token ids of each text, computed by several threads.

        Args:
            plain: whether the tokenizer adds its special tokens to each text; a rendered template
                has them already. None if it adds them to no text.
        """
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
        """Return the token ids of each chat with its answer; raise the errors of ``render``."""
        answered = [
            [*chat, {"role": "assistant", "content": answer}]
            for chat, answer in zip(chats, answers, strict=True)
        ]
        return self.encode(self.render(answered, generation_prompt=False))

    def save_own_template(self, folder: Path) -> None:
        """Write the chat template into a model folder if it did not come with the tokenizer."""
        if self._own_template is not None:
            path = folder / TEMPLATE_FILE
            path.write_text(self._own_template, encoding="utf-8")

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Return the text of each sequence, by default without special tokens, as in verl."""
        if self._decoder is None:
            sequences = [list(sequence) for sequence in ids]
            return self.tokenizer.batch_decode(sequences, skip_special_tokens=skip_special)
        if sum(map(len, ids)) < _MIN_IDS_FOR_THREADS:
            return [self._decoder.decode(one, skip_special_tokens=skip_special) for one in ids]
        if self._byte_decoder is not None:
            return [self._byte_decoder.decode(one, skip_special=skip_special) for one in ids]
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
        path: a local folder (``~`` is expanded), or the id of a model in the hub or its cache.
        template_settings: the arguments of the chat template.
        chat_template: a template, or a file ``*.jinja``, that replaces the tokenizer's.
        trust_remote_code: whether code from the model's repository may run.
        key: the configuration key of ``path``, for messages.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    folder = Path(os.path.expanduser(path))
    is_folder = os.path.isdir(folder)
    local = is_folder or _is_cached(path, key)
    if not local:
        _require_on_hub(path, key)
    source = str(folder) if is_folder else path
    if is_folder and not _has_tokenizer(folder):
        raise UserError(
            key,
            path,
            rule="the folder has no tokenizer (tokenizer.json, vocab.json or tokenizer.model)",
            remedy="Copy the tokenizer files of its base model into the folder.",
        )
    loader = _loader(source, local=local, key=key)
    try:
        tokenizer = loader.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=local
        )
    except Exception as error:  # libraries, or the model's own code, read files of the user
        raise UserError(
            key,
            path,
            rule=f"the tokenizer cannot be loaded ({type(error).__name__}: {_first_words(error)})",
            remedy="A model folder needs tokenizer.json and tokenizer_config.json.",
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


def _has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder has a vocabulary, or its own code for one."""
    return any(path for name in _VOCABULARIES for path in folder.glob(name))


def _plain_decoder(tokenizer: Any) -> tokenizers.Tokenizer | None:
    """Return the Rust tokenizer, which decodes on all cores; None if its texts may differ."""
    plain, own = transformers.PreTrainedTokenizerFast, type(tokenizer)
    is_plain = all(getattr(own, name) is getattr(plain, name) for name in _DECODING)
    if not is_plain or tokenizer.clean_up_tokenization_spaces:
        return None
    return tokenizer.backend_tokenizer


def _read_template(value: str) -> str:
    if not value.endswith(_TEMPLATE_SUFFIX):
        return value
    try:
        return Path(os.path.expanduser(value)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            "custom_chat_template",
            value,
            rule=f"the file cannot be read ({_first_words(error)})",
            remedy="Give the path of a chat template, or the template itself.",
        ) from error


def _loader(source: str, *, local: bool, key: str) -> Any:
    # ``AutoTokenizer`` takes a second to search all families, so generic tokenizers avoid it.
    settings = _find_file(source, _SETTINGS_FILE, local=local)
    content = {} if settings is None else _read_settings(settings, key)
    has_tokens = _find_file(source, "tokenizer.json", local=local) is not None
    is_generic = has_tokens and content.get("tokenizer_class") in _GENERIC_CLASSES
    return transformers.PreTrainedTokenizerFast if is_generic else transformers.AutoTokenizer


def _read_settings(file: Path, key: str) -> dict[str, Any]:
    """Read tokenizer_config.json. Raise UserError if a value has another type than its name."""
    content = _read_file(file, key)
    for name, (kind, types) in _SETTINGS.items():
        if not isinstance(content.get(name), (*types, type(None))):
            rule = f"{name}={content[name]!r} in {file} must be {kind} or null"
            raise UserError(key, rule=rule, remedy="Correct or remove it.")
    return content


def _read_file(file: Path, key: str) -> dict[str, Any]:
    """Read a JSON file of a model's folder. Raise UserError if it holds no object."""
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise UserError(key, rule=f"{file} {error}", remedy="Correct or remove it.") from error


def _find_file(source: str, name: str, *, local: bool) -> Path | None:
    """Find a file in a model folder, in the hub's cache or, unless ``local``, on the hub."""
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
        raise UserError(key, path, rule="no such folder", remedy="Check the path.") from error
    return _find_file(path, "tokenizer_config.json", local=True) is not None


def _require_on_hub(path: str, key: str) -> None:
    """Raise UserError unless the hub has the model."""
    # One request with a short deadline: loading from an unreachable hub retries for 30 s.
    try:
        model_info(path, timeout=10)
    except (OSError, ValueError, HTTPError) as error:
        raise UserError(
            key,
            path,
            rule="neither a local folder, nor in the Hugging Face cache, nor available from the "
            f"hub ({_first_words(error)})",
            remedy="Give a folder, or download the model on a machine with network access: "
            f"hf download {path}",
        ) from error


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _eos_ids(
    tokenizer: transformers.PreTrainedTokenizerBase, config: Path | None, *, key: str
) -> TokenIds:
    # Chat models often have two: the end of a turn and the end of text.
    ids = [] if config is None else _listed_eos_ids(config, key)
    if isinstance(tokenizer.eos_token_id, int):
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


def _listed_eos_ids(file: Path, key: str) -> list[int]:
    listed = _read_file(file, key).get("eos_token_id")
    if listed is None:
        return []
    ids = listed if isinstance(listed, list) else [listed]
    if not all(type(one) is int and 0 <= one <= _MAX_ID for one in ids):
        rule = f"eos_token_id={shown_value(listed)} in {file} must be a token id or a list of them"
        raise UserError(key, rule=rule, remedy="Correct or remove it.")
    return ids


def is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value read from a file is a list of messages."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(message, dict) and _is_message(message) for message in value)
    )


def _is_message(message: Message) -> bool:
    says_something = message.get("content") is not None or bool(message.get("tool_calls"))
    return isinstance(message.get("role"), str) and says_something


def _present(message: Message) -> dict[str, Any]:
    # Parquet fills fields that a row lacks with None; a template must not see these.
    given = {name: value for name, value in message.items() if value is not None}
    # Templates of models of text leave lists of parts out, or print them.
    return given | {"content": _joined(given["content"])} if "content" in given else given


def _joined(content: Any) -> Any:
    """Return the text of a list of parts. Raise ValueError if a part is no text."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, Mapping)]
    # Parquet has null for a type that is left out.
    spoken = [part.get("text") for part in parts if (part.get("type") or "text") == "text"]
    texts = [text for text in spoken if isinstance(text, str)]
    if len(texts) < len(content):
        raise ValueError("a part of a message is no text, and the model reads text only")
    return "".join(texts)
