# SPDX-License-Identifier: Apache-2.0
"""From rows of verl's schema to prompts, and the errors of rows that are wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tandem.config.schema.data import DataConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.prompts import NO_SOURCE, load_prompts
from tandem.data.tokenizer import TextCodec
from tandem.errors import UserError

Rows = list[dict[str, Any]]
Write = Callable[..., str]


def settings(path: str, **values: Any) -> DataConfig:
    return DataConfig.model_validate({"train_files": path, "val_files": path, **values})


def test_a_row_becomes_a_prompt(rows: Rows, write: Write, codec: TextCodec) -> None:
    entries = load_prompts(settings(write(rows)), codec)
    prompt = entries[1].as_draw(17)
    chat = f"<|im_start|>user\n{rows[1]['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.text == chat
    assert list(prompt.token_ids) == codec.encode([chat])[0]
    assert (prompt.uid, prompt.row) == (17, 1)
    assert (prompt.data_source, prompt.ground_truth) == ("openai/gsm8k", "10")
    assert prompt.extra_info == rows[1]["extra_info"]


def test_validation_prompts_are_in_row_order_with_their_row_as_uid(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    config = settings(write(rows), val_max_samples=4)
    prompts = draw_by_row(load_prompts(config, codec, validation=True))
    numbers = [prompt.row for prompt in prompts]
    assert numbers == sorted(numbers) == [prompt.uid for prompt in prompts]
    assert len(numbers) == 4
    assert [p.ground_truth for p in prompts] == [
        rows[number]["reward_model"]["ground_truth"] for number in numbers
    ]


def test_a_plain_string_is_taken_as_it_is(rows: Rows, write: Write, codec: TextCodec) -> None:
    rows[3] |= {"prompt": "2 + 2 ="}
    rows[5] |= {"prompt": "1 + 1 ="}
    entries = load_prompts(settings(write(rows, "mixed.jsonl")), codec)
    assert [entries[i].text for i in (3, 5)] == ["2 + 2 =", "1 + 1 ="]
    assert entries[3].token_ids.tolist() == codec.encode(["2 + 2 ="], plain=[True])[0]
    assert entries[4].text.startswith("<|im_start|>user\nWeng")


def test_columns_without_a_name_in_the_schema_become_extra_info(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    plain = {"prompt": "2?", "ground_truth": 2, "level": 3, "extra_info": {"index": 1}}
    filled = plain | {"reward_model": None, "extra_info": None}  # as in tables with such columns
    rows[0] |= {"level": 3}
    config = settings(write([plain, filled, rows[0]], "mixed.jsonl"))
    for validation in (False, True):
        entries = load_prompts(config, codec, validation=validation, by_function=True)
        infos = [entry.extra_info for entry in sorted(entries, key=lambda entry: entry.row)]
        assert infos == [{"level": 3, "index": 1}, {"level": 3}, rows[0]["extra_info"]]
        assert entries[1].ground_truth == 2


def test_columns_of_other_names_become_extra_info_too(write: Write, codec: TextCodec) -> None:
    row = {"question": "2?", "prompt": "hard", "src": "mine", "data_source": 5, "reward_model": {}}
    config = settings(write([row], "other.jsonl"), prompt_key="question", reward_fn_key="src")
    (entry,) = load_prompts(config, codec, by_function=True)
    assert entry.extra_info == {"prompt": "hard", "data_source": 5}


def test_a_prompt_that_ends_with_an_answer_is_warned_of(
    rows: Rows, write: Write, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    rows[0]["prompt"] = [*rows[0]["prompt"], {"role": "assistant", "content": "The answer is"}]
    entry = load_prompts(settings(write(rows)), codec)[0]
    assert entry.text.endswith("The answer is<|im_end|>\n<|im_start|>assistant\n")
    (message,) = caplog.messages
    assert f"1 of {len(rows)} prompts end with a message of the assistant" in message


def test_columns_can_have_other_names(rows: Rows, write: Write, codec: TextCodec) -> None:
    renamed = [{"q": row.pop("prompt"), "src": row.pop("data_source"), **row} for row in rows]
    config = settings(write(renamed), prompt_key="q", reward_fn_key="src")
    assert load_prompts(config, codec)[0].data_source == "openai/gsm8k"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"prompt": None}, "has no prompt under data.prompt_key='prompt'"),
        ({"prompt": []}, "has no prompt under data.prompt_key='prompt'"),
        ({"prompt": ""}, "has no prompt under data.prompt_key='prompt'"),
        ({"prompt": [{"content": "x"}]}, "neither text nor a list of {role, content}"),
        ({"reward_model": None}, "has no reward_model.ground_truth"),
        ({"reward_model": {"style": "rule"}}, "has no reward_model.ground_truth"),
        ({"data_source": None}, "has no data source under data.reward_fn_key='data_source'"),
    ],
)
def test_a_bad_row_is_named_with_its_file(
    broken: dict[str, Any], message: str, rows: Rows, write: Write, codec: TextCodec
) -> None:
    good = write(rows, "good.parquet")
    bad = write([rows[0], rows[1], {**rows[2], **broken}], "bad.jsonl")
    with pytest.raises(UserError) as error:
        load_prompts(settings("", train_files=(good, bad)), codec)
    assert str(error.value).startswith(f"data.train_files='{bad}': row 2 ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_row_that_the_template_refuses_is_named(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    rows[4]["prompt"] = [{"role": "user", "content": 5}]
    path = write(rows, "rows.jsonl")
    with pytest.raises(UserError, match="row 4 is refused by the chat template"):
        load_prompts(settings(path), codec)


def test_half_a_character_is_named_with_its_row(rows: Rows, write: Write, codec: TextCodec) -> None:
    rows[2] |= {"prompt": "2 \ud800 2 ="}
    with pytest.raises(UserError, match="row 2 has a prompt that is no text .*surrogates"):
        load_prompts(settings(write(rows, "half.jsonl")), codec)


def test_overlong_prompts_are_dropped_and_counted(
    rows: Rows, write: Write, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    everything = load_prompts(settings(write(rows)), codec)
    limit = len(everything[1].token_ids)
    config = settings(write(rows), filter_overlong_prompts=True, max_prompt_length=limit)
    with caplog.at_level(logging.INFO):
        kept = load_prompts(config, codec)
    assert [entry.row for entry in kept] == [
        entry.row for entry in everything if len(entry.token_ids) <= limit
    ]
    assert 0 < len(kept) < len(rows)
    assert f"kept {len(kept)} of 7 prompts, dropped {7 - len(kept)} longer" in caplog.text


def test_dropping_every_prompt_is_an_error(rows: Rows, write: Write, codec: TextCodec) -> None:
    config = settings(write(rows), filter_overlong_prompts=True, max_prompt_length=3)
    with pytest.raises(UserError, match=r"^data\.max_prompt_length=3: every prompt"):
        load_prompts(config, codec)


def test_an_overlong_prompt_is_an_error_with_row_and_length(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    lengths = [len(entry.token_ids) for entry in load_prompts(settings(write(rows)), codec)]
    longest = max(lengths)
    config = settings(write(rows), max_prompt_length=longest - 1)
    with pytest.raises(UserError) as error:
        load_prompts(config, codec)
    assert f"row {lengths.index(longest)} has a prompt of {longest} tokens" in str(error.value)
    assert "Set data.filter_overlong_prompts=True" in str(error.value)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation_cuts_prompts_to_the_limit(
    side: str, rows: Rows, write: Write, codec: TextCodec
) -> None:
    full = load_prompts(settings(write(rows)), codec)[0].token_ids.tolist()
    config = settings(write(rows), max_prompt_length=7, truncation=side)
    cut = load_prompts(config, codec)[0].token_ids.tolist()
    expected = {"left": full[-7:], "right": full[:7], "middle": full[:3] + full[-4:]}
    assert cut == expected[side]


def test_the_source_draws_resumes_and_ends(rows: Rows, write: Write, codec: TextCodec) -> None:
    config = settings(write(rows), train_batch_size=3)
    entries = load_prompts(config, codec)
    source = open_source(entries, config, total_epochs=1)
    first = source.draw(3)
    source.mark_trained([first[0].uid])
    source.mark_dropped([first[2].uid])
    state = json.loads(json.dumps(source.state()))
    rest = source.draw(3)
    assert source.draw(1) == []
    again = open_source(load_prompts(config, codec), config, total_epochs=1)
    again.restore(state)
    assert again.draw(4) == [first[1], *rest]
    assert sorted(prompt.uid for prompt in (*first, *rest)) == list(range(6))


def test_a_source_of_changed_rows_refuses_the_old_state(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    config = settings(write(rows), train_batch_size=3)
    state = open_source(load_prompts(config, codec), config, total_epochs=1).state()
    rows[6]["reward_model"]["ground_truth"] = "11"
    changed = settings(write(rows, "changed.parquet"), train_batch_size=3)
    source = open_source(load_prompts(changed, codec), changed, total_epochs=1)
    with pytest.raises(UserError, match=r"^data\.train_files: fingerprint is"):
        source.restore(state)


def test_what_a_model_scores_needs_no_ground_truth(
    rows: Rows, write: Write, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    left_to_a_model = [{**rows[0], "reward_model": {"style": "model"}}]
    path = write([*rows, *left_to_a_model, {**rows[1], "reward_model": None}], "mixed.jsonl")
    entries = load_prompts(settings(path), codec, by_model=True)
    assert [entry.ground_truth for entry in entries[-2:]] == [None, None]
    assert entries[0].as_draw(3).messages == rows[0]["prompt"]

    path = write([*rows, *left_to_a_model], "validation.jsonl")
    config = settings("", val_files=(path,))
    kept = load_prompts(config, codec, validation=True, by_model=True)
    assert [entry.row for entry in kept] == list(range(len(rows)))
    (record,) = caplog.records
    assert f"data.val_files: skipped 1 of {len(rows) + 1} rows" in record.getMessage()
    with pytest.raises(UserError, match=r"has no reward_model\.ground_truth"):
        load_prompts(config, codec, validation=True)


RAW = {"question": "1 + 1 =", "answer": "2"}


def test_a_missing_column_names_those_that_are_there(write: Write, codec: TextCodec) -> None:
    with pytest.raises(UserError) as caught:
        load_prompts(settings(write([RAW])), codec)
    assert caught.value.rule.endswith("; its columns are question, answer")
    assert "Set data.prompt_key" in caught.value.remedy and "docs/data.md" in caught.value.remedy
    with pytest.raises(UserError, match="has no reward_model.ground_truth; its columns are ques"):
        load_prompts(settings(write([RAW]), prompt_key="question"), codec)
    judged = RAW | {"ground_truth": "2"}
    with pytest.raises(UserError, match="has no data source .*; its columns are question, answer"):
        load_prompts(settings(write([judged]), prompt_key="question"), codec)


def test_functions_of_the_user_need_neither_truth_nor_source(
    write: Write, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(write([RAW]), prompt_key="question")
    for validation in (False, True):
        (entry,) = load_prompts(config, codec, by_function=True, validation=validation)
        assert (entry.ground_truth, entry.data_source) == (None, NO_SOURCE)
    some = [RAW, RAW | {"ground_truth": "2"}, RAW]
    mixed = settings(write(some, "mixed.jsonl"), prompt_key="question")
    load_prompts(mixed, codec, by_function=True)
    assert "2 of 3 rows have no ground truth, the first of them row 0" in caplog.text
    wrong = settings(write([RAW | {"data_source": 5}]), prompt_key="question")
    with pytest.raises(UserError, match="which must be text"):
        load_prompts(wrong, codec, by_function=True)


def test_a_ground_truth_may_have_a_column_of_its_own(write: Write, codec: TextCodec) -> None:
    row = {"prompt": "1 + 1 =", "data_source": "openai/gsm8k", "ground_truth": "2"}
    (entry,) = load_prompts(settings(write([row])), codec)
    assert entry.ground_truth == "2"


def test_images_are_refused_unless_there_are_none(
    rows: Rows, write: Write, codec: TextCodec
) -> None:
    without = [row | {"images": None} for row in rows]
    assert load_prompts(settings(write(without, "a.jsonl")), codec)
    with pytest.raises(UserError, match="row 0 has images, and the model reads text only"):
        load_prompts(settings(write([row | {"images": ["a.png"]} for row in rows])), codec)


def test_prompts_of_text_for_a_chat_model_are_warned_of(
    rows: Rows, write: Write, codec: TextCodec, caplog: pytest.LogCaptureFixture
) -> None:
    load_prompts(settings(write(rows)), codec)
    assert not caplog.messages
    rows[3] |= {"prompt": "2 + 2 ="}
    load_prompts(settings(write(rows, "mixed.jsonl")), codec)
    assert caplog.messages[-1].startswith("data.train_files: 1 of 7 prompts are text, to which")
