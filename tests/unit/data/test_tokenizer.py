# SPDX-License-Identifier: Apache-2.0
"""Loading a tokenizer, chat templates, special tokens, ends of response."""

from __future__ import annotations

import json
import random
import shutil
from array import array
from pathlib import Path
from typing import Any

import pytest
import transformers

from tandem.data.tokenizer import ChatRefused, TextCodec, is_chat, load_codec
from tandem.errors import UserError

CHAT = [{"role": "user", "content": "How many?"}]
END_OF_TEXT, TURN_START, TURN_END = 0, 1, 2


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tokenizer's folder to change."""
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))


def test_chats_are_rendered_with_and_without_generation_prompt(codec: TextCodec) -> None:
    closed = "<|im_start|>user\nHow many?<|im_end|>\n"
    assert codec.render([CHAT, CHAT]) == [closed + "<|im_start|>assistant\n"] * 2
    assert codec.render([CHAT], generation_prompt=False) == [closed]


def test_absent_fields_that_parquet_filled_in_are_not_seen(codec: TextCodec) -> None:
    filled = [{"role": "user", "content": "How many?", "name": None}]
    strict = TextCodec(codec.tokenizer, eos_ids=(TURN_END,))
    strict.tokenizer.chat_template, kept = (
        "{{ 'name' in messages[0] }}",
        codec.tokenizer.chat_template,
    )
    try:
        assert strict.render([filled]) == ["False"]
    finally:
        codec.tokenizer.chat_template = kept


def test_a_list_of_parts_is_the_text_of_its_parts(codec: TextCodec) -> None:
    """Templates of models of text would leave the parts out, or print the list."""
    parts = [{"type": None, "text": "2+"}, {"type": "text", "text": "3?", "image": None}]
    chats = [[{"role": "user", "content": content}] for content in (parts, "2+3?")]
    listed, plain = codec.render(chats)
    assert listed == plain
    for part in ({"type": "image", "text": None}, {"type": "input_audio", "text": "a"}, "2+3?"):
        with pytest.raises(ChatRefused, match="a part of a message is no text") as error:
            codec.render([chats[0], [{"role": "user", "content": [*parts, part]}]])
        assert error.value.position == 1


def test_template_settings_reach_the_template(folder: Path) -> None:
    codec = load_codec(
        str(folder),
        chat_template="{{ mood }}: {{ messages[0].content }}",
        template_settings={"mood": "calm"},
    )
    assert codec.render([CHAT]) == ["calm: How many?"]


def test_only_plain_text_gets_special_tokens(codec: TextCodec) -> None:
    plain, rendered = codec.encode(["How", "<|im_start|>How"], plain=[True, False])
    assert plain[0] == END_OF_TEXT
    assert rendered[0] == TURN_START
    assert plain[1:] == rendered[1:]
    assert codec.encode(["How", ""]) == [plain[1:], []]
    assert codec.encode([]) == []


def test_decoding_drops_special_tokens_unless_told(codec: TextCodec) -> None:
    ids = codec.encode(["#### 72<|im_end|>", "a  b\n"])
    assert codec.decode(ids) == ["#### 72", "a  b\n"]
    assert codec.decode(ids, skip_special=False)[0] == "#### 72<|im_end|>"


class LoudTokenizer(transformers.PreTrainedTokenizerFast):
    """One whose texts are more than what its ids stand for."""

    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("kind", [transformers.PreTrainedTokenizerFast, LoudTokenizer])
@pytest.mark.parametrize("length", [3, 512])
def test_texts_are_those_of_transformers(
    kind: type[transformers.PreTrainedTokenizerFast], length: int, folder: Path
) -> None:
    """Also of so many ids that threads share them, and of a tokenizer with its own ways."""
    tokenizer = kind.from_pretrained(folder)
    chance = random.Random(0)
    ids = [array("i", chance.choices(range(len(tokenizer)), k=length)) for _ in range(16)]
    codec = TextCodec(tokenizer, eos_ids=(TURN_END,))
    for skips in (True, False):
        expected = [tokenizer.decode(one.tolist(), skip_special_tokens=skips) for one in ids]
        assert codec.decode(ids, skip_special=skips) == expected


def test_ends_of_response_are_the_tokenizers_and_those_of_the_generation_config(
    folder: Path,
) -> None:
    assert load_codec(str(folder)).eos_ids == (TURN_END,)
    config = folder / "generation_config.json"
    for listed, expected in (([2, 0], (0, 2)), (0, (0, 2)), (None, (2,))):
        config.write_text(json.dumps({"eos_token_id": listed}))
        assert load_codec(str(folder)).eos_ids == expected


def test_a_damaged_generation_config_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json is not valid JSON"):
        load_codec(str(folder))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", "[]", r"generation_config\.json is not a JSON object\. Correct"),
        ("generation_config.json", "5", r"generation_config\.json is not a JSON object"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json is not a JSON object"),
        ("tokenizer_config.json", "5", r"tokenizer_config\.json is not a JSON object"),
        ("tokenizer.json", "[]", "the tokenizer cannot be loaded"),
        ("tokenizer.json", "5", "the tokenizer cannot be loaded"),
    ],
)
def test_a_file_that_is_no_object_is_named(
    folder: Path, name: str, content: str, message: str
) -> None:
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=f"^actor_rollout_ref.model.path.*{message}") as caught:
        load_codec(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", ["x", [[1]], -3, 1.5, True, [2, None], 10**30])
def test_ends_of_response_that_are_no_tokens_are_refused(folder: Path, ids: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match=r"eos_token_id=.* must be a token id or a list of them\."):
        load_codec(str(folder))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chat_template", 5, "chat_template=5 in .* must be a text or a list of mappings or null"),
        ("chat_template", [5], "the tokenizer cannot be loaded .TypeError"),
        ("eos_token", 5, "eos_token=5 in .* must be a text or a mapping or null"),
        ("added_tokens_decoder", 5, "added_tokens_decoder=5 in .* must be a mapping or null"),
        ("model_max_length", "x", "model_max_length='x' in .* must be a number or null"),
        ("extra_special_tokens", 5, "extra_special_tokens=5 in .* must be a list or a mapping"),
        ("padding_side", "up", "the tokenizer cannot be loaded .ValueError: Padding side"),
    ],
)
def test_a_setting_of_another_type_is_named(
    folder: Path, name: str, value: object, message: str
) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=message) as caught:
        load_codec(str(folder))
    assert "\n" not in str(caught.value)


def test_without_a_chat_template_messages_are_an_error(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    codec = load_codec(str(folder))
    assert not codec.has_chat_template
    with pytest.raises(UserError, match=r"^actor_rollout_ref\.model\.path='.*no chat template"):
        codec.render([CHAT])


def test_the_refused_chat_is_found(folder: Path) -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    codec = load_codec(str(folder), chat_template=template)
    chats = [CHAT, [{"role": "tool", "content": "x"}], CHAT]
    with pytest.raises(ChatRefused, match=r"refused by the chat template \(user first\)") as error:
        codec.render(chats)
    assert error.value.position == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__self__.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].mkdir('here') }}",
    ],
)
def test_a_chat_template_reaches_no_python(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    codec = load_codec(str(folder), chat_template=template)
    with pytest.raises(ChatRefused, match="refused by the chat template"):
        codec.render([CHAT])
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "path",
    ["/nowhere/model", "~/nowhere/model", "./nowhere", "a/b/c", "x" * 300, "~nobody-has-this/x"],
)
def test_a_folder_that_is_not_there_is_an_error(path: str) -> None:
    with pytest.raises(UserError, match=r"^model\.path='.*no such folder"):
        load_codec(path, key="model.path")


def test_a_model_that_is_neither_cached_nor_reachable_is_one_line() -> None:
    with pytest.raises(UserError, match="neither a local folder, nor in the Hugging Face") as error:
        load_codec("tandem-tests/no-such-model")
    assert "hf download tandem-tests/no-such-model" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer \(tokenizer\.json") as error:
        load_codec(str(tmp_path))
    assert "\n" not in str(error.value)


def test_what_is_a_chat() -> None:
    assert is_chat(CHAT)
    assert is_chat([{"role": "assistant", "content": None, "tool_calls": [{}]}])
    for value in (None, "text", [], ["text"], [{"role": "user"}], [{"content": "x"}], CHAT[0]):
        assert not is_chat(value)
