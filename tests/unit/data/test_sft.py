# SPDX-License-Identifier: Apache-2.0
"""Supervised examples: what carries loss, single-turn and multi-turn."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema.sft import SftDataConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.packing import TrainSequence, pack
from tandem.data.sft import load_sft_examples
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.errors import UserError

Rows = list[dict[str, Any]]
Write = Callable[..., str]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "Thanks."},
]


def settings(path: str, **values: Any) -> SftDataConfig:
    return SftDataConfig.model_validate({"train_files": path, "val_files": path, **values})


def gsm8k(path: str, **values: Any) -> SftDataConfig:
    """verl's GSM8K command: question and answer stand inside ``extra_info``."""
    keys = {
        "prompt_key": "extra_info",
        "response_key": "extra_info",
        "prompt_dict_keys": ["question"],
        "response_dict_keys": ["answer"],
    }
    return settings(path, **keys, **values)


def learned(sequence: TrainSequence, codec: TextCodec) -> str:
    mask = sequence.loss_mask or (True,) * len(sequence.response_ids)
    ids = [token for token, counts in zip(sequence.response_ids, mask, strict=True) if counts]
    return codec.decode([ids], skip_special=False)[0]


def test_single_turn_learns_the_response_and_its_end(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    sequence = draw_by_row(load_sft_examples(gsm8k(write(rows)), codec))[1]
    info = rows[1]["extra_info"]
    prompt = f"<|im_start|>user\n{info['question']}<|im_end|>\n<|im_start|>assistant\n"
    assert list(sequence.prompt_ids) == codec.encode([prompt])[0]
    assert list(sequence.response_ids) == codec.encode([info["answer"] + "<|im_end|>"])[0]
    assert sequence.loss_mask is None
    assert sequence.prompt_key == 1


def test_a_prompt_may_be_a_list_of_messages(rows: Rows, write: Write, codec: TextCodec) -> None:
    for row in rows:
        row["answer"] = "yes"
    config = settings(write(rows), prompt_key="prompt")
    sequence = draw_by_row(load_sft_examples(config, codec))[0]
    text = codec.decode([sequence.prompt_ids], skip_special=False)[0]
    assert text.endswith('answer after "####".<|im_end|>\n<|im_start|>assistant\n')


def test_without_a_chat_template_the_prompt_is_plain(
    rows: Rows, write: Write, tokenizer_folder: Path
) -> None:
    codec = load_codec(str(tokenizer_folder), chat_template="")
    sequence = draw_by_row(load_sft_examples(gsm8k(write(rows)), codec))[0]
    question = rows[0]["extra_info"]["question"]
    assert list(sequence.prompt_ids) == codec.encode([question], plain=[True])[0]


def test_multi_turn_learns_every_assistant_turn_and_nothing_else(
    write: Write, codec: TextCodec
) -> None:
    path = write([{"messages": CONVERSATION}])
    (example,) = load_sft_examples(settings(path, multiturn={"enable": True}), codec)
    sequence = example.as_draw(5)
    assert learned(sequence, codec) == "4<|im_end|>\n6<|im_end|>\n"
    whole = codec.decode([sequence.prompt_ids + sequence.response_ids], skip_special=False)[0]
    assert whole == codec.render([CONVERSATION[:5]], generation_prompt=False)[0]
    assert pack([sequence]).target_R.tolist() == codec.encode(["4<|im_end|>\n6<|im_end|>\n"])[0]
    assert sequence.prompt_key == 5


def test_a_conversation_may_begin_with_the_assistant(write: Write, codec: TextCodec) -> None:
    path = write([{"messages": CONVERSATION[2:]}])
    (example,) = load_sft_examples(settings(path, multiturn={"enable": True}), codec)
    sequence = example.as_draw(0)
    assert learned(sequence, codec) == "4<|im_end|>\n6<|im_end|>\n"
    start = codec.decode([sequence.prompt_ids], skip_special=False)[0]
    assert start == "<|im_start|>assistant\n"


def test_a_first_answer_without_a_visible_begin_is_refused(
    write: Write, tokenizer_folder: Path
) -> None:
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    codec = load_codec(str(tokenizer_folder), chat_template=plain)
    path = write([{"messages": CONVERSATION[2:]}])
    with pytest.raises(UserError, match="row 0 begins with an assistant message.*Put another"):
        load_sft_examples(settings(path, multiturn={"enable": True}), codec)


def test_the_chat_template_gets_the_tools_and_the_thinking_of_a_row(
    write: Write, tokenizer_folder: Path
) -> None:
    shown = (
        "{{ tools | tojson if tools else '-' }}|{{ enable_thinking }}|"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    codec = load_codec(str(tokenizer_folder), chat_template=shown)
    tools = [{"name": "add", "values": None}, {"name": "run", "values": [1]}]
    talk = {"messages": CONVERSATION[:3]}
    path = write([{**talk, "tools": tools, "thinks": False}, {**talk, "thinks": None}])
    keys = {"enable": True, "enable_thinking_key": "thinks", "enable_thinking_default": True}
    examples = load_sft_examples(settings(path, multiturn=keys), codec)
    heads = [
        codec.decode([example.as_draw(0).prompt_ids], skip_special=False)[0].rpartition("|")[0]
        for example in examples
    ]
    assert heads == ['[{"name": "add"}, {"name": "run", "values": [1]}]|False', "-|True"]


def test_a_template_that_rewrites_earlier_turns_is_refused(
    write: Write, tokenizer_folder: Path
) -> None:
    forgetful = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if loop.last or m.role != 'assistant' %}{{ m.content }}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    codec = load_codec(str(tokenizer_folder), chat_template=forgetful)
    path = write([{"messages": CONVERSATION[:3]}, {"messages": CONVERSATION}])
    with pytest.raises(UserError, match=r"row 1 cannot be cut into turns.*message 4"):
        load_sft_examples(settings(path, multiturn={"enable": True}), codec)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"messages": None}, "has no list of"),
        ({"messages": [{"role": "user"}]}, "has no list of"),
        ({"messages": CONVERSATION[:2]}, "must have an assistant message"),
    ],
)
def test_a_bad_conversation_is_named(
    broken: dict[str, Any], message: str, write: Write, codec: TextCodec
) -> None:
    path = write([{"messages": CONVERSATION}, broken], "rows.jsonl")
    with pytest.raises(UserError, match=rf"^data\.train_files='.*rows\.jsonl': row 1 .*{message}"):
        load_sft_examples(settings(path, multiturn={"enable": True}), codec)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"question": None}, r"has no value under 'extra_info\.question'"),
        ({"answer": ""}, r"has no value under 'extra_info\.answer'"),
        ({"answer": 72}, "a response that is not text"),
        ({"question": 72}, "a prompt that is neither text"),
    ],
)
def test_a_bad_row_is_named(
    broken: dict[str, Any], message: str, rows: Rows, write: Write, codec: TextCodec
) -> None:
    rows[3]["extra_info"] |= broken
    with pytest.raises(UserError, match=f"row 3 .*{message}"):
        load_sft_examples(gsm8k(write(rows, "rows.jsonl")), codec)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'question'; its columns are prompt, answer. Set data.prompt_key to the column of"),
        ({"prompt_key": "prompt", "response_key": "reply"}, "'reply'.* Set data.response_key to"),
        ({"prompt_key": "q"}, "data.multiturn.enable=True for conversations"),
        (
            {"multiturn": {"enable": True}},
            "'messages'; its columns are prompt, answer. Set data.mul",
        ),
    ],
)
def test_a_column_that_is_missing_is_named_with_those_that_exist(
    values: dict[str, Any], message: str, write: Write, codec: TextCodec
) -> None:
    path = write([{"prompt": "2 + 2?", "answer": "4"}], "rows.jsonl")
    with pytest.raises(UserError, match=f"row 0 has no .*{message}"):
        load_sft_examples(settings(path, **values), codec)


def test_a_row_that_is_too_long_is_an_error_with_its_length(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    examples = load_sft_examples(gsm8k(write(rows)), codec)
    length = len(examples[0].token_ids)
    with pytest.raises(
        UserError, match=rf"row 0 has {length} tokens, more than data\.max_length=9"
    ):
        load_sft_examples(gsm8k(write(rows), max_length=9), codec)


def test_truncation_cuts_ids_and_loss_alike(rows: Rows, write: Write, codec: TextCodec) -> None:
    full = load_sft_examples(gsm8k(write(rows)), codec)[0]
    ids, mask = full.token_ids.tolist(), full.loss_mask.tolist()
    limit = len(ids) - 20
    kept = {
        side: load_sft_examples(gsm8k(write(rows), max_length=limit, truncation=side), codec)[0]
        for side in ("left", "right")
    }
    assert kept["right"].token_ids.tolist() == ids[:limit]
    assert kept["right"].loss_mask.tolist() == mask[:limit]
    assert kept["left"].token_ids.tolist() == ids[-limit:]
    assert kept["left"].loss_mask.tolist() == mask[-limit:]


def test_a_response_cut_off_its_prompt_does_not_learn_its_first_token(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    config = gsm8k(write(rows), max_length=10, truncation="left")
    sequence = draw_by_row(load_sft_examples(config, codec))[0]
    assert len(sequence.prompt_ids) == 1
    assert len(sequence.response_ids) == 9


def test_rows_of_which_nothing_is_left_to_learn_are_dropped_and_counted(
    rows: Rows, write: Write, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    examples = load_sft_examples(gsm8k(write(rows)), codec)
    prompt_lengths = [int(example.loss_mask.argmax()) for example in examples]
    limit = sorted(set(prompt_lengths))[1]
    config = gsm8k(write(rows), max_length=limit, truncation="right")
    with caplog.at_level(logging.WARNING):
        kept = load_sft_examples(config, codec)
    assert [e.row for e in kept] == [i for i, length in enumerate(prompt_lengths) if length < limit]
    assert f"dropped {7 - len(kept)} of 7 examples" in caplog.text
    with pytest.raises(UserError, match="no token with loss in any row"):
        load_sft_examples(gsm8k(write(rows), max_length=4, truncation="right"), codec)


def test_the_source_draws_and_resumes(rows: Rows, write: Write, codec: TextCodec) -> None:
    config = gsm8k(write(rows), train_batch_size=2)
    source = open_source(load_sft_examples(config, codec), config, total_epochs=2)
    first = source.draw(2)
    assert [sequence.prompt_key for sequence in first] == [0, 1]
    source.mark_trained([0, 1])
    state = json.loads(json.dumps(source.state()))
    again = open_source(load_sft_examples(config, codec), config, total_epochs=2)
    again.restore(state)
    assert again.draw(20) == source.draw(20)
    assert again.draw(1) == []


def test_no_validation_files_are_no_validation_examples(codec: TextCodec) -> None:
    assert load_sft_examples(SftDataConfig(val_files=()), codec, validation=True) == []
