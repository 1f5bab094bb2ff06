# SPDX-License-Identifier: Apache-2.0
"""A large data set gives the prompts of a small one; they are rendered when they are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tandem.config.schema.data import DataConfig
from tandem.data.ledger import Source, open_ledger, open_source
from tandem.data.prompts import load_prompts, open_prompts
from tandem.data.tokenizer import TextCodec
from tandem.errors import UserError
from tandem.types import Prompt

Rows = list[dict[str, Any]]
Write = Callable[..., str]
NUM_ROWS, NUM_EXAMPLES = 40, 8


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data sets are large from 11 rows on, and files of lengths are kept in the test's folder."""
    monkeypatch.setattr("tandem.data.prompts.LARGE_ROWS", 10)
    monkeypatch.setattr("tandem.data.prompts.CHUNK_ROWS", NUM_EXAMPLES)
    monkeypatch.setattr("tandem.data.rendering.CHUNK_ROWS", NUM_EXAMPLES)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hub"))


@pytest.fixture
def many(rows: Rows) -> Rows:
    """Rows of growing length."""
    found = [dict(rows[index % len(rows)]) for index in range(NUM_ROWS)]
    for index, row in enumerate(found):
        row["prompt"] = [{"role": "user", "content": "How many apples? " * (index + 1)}]
    return found


@pytest.fixture
def encoded(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """All texts that the tokenizer has got."""
    texts: list[str] = []
    encode = codec.encode

    def count(given: list[str], **kwargs: Any) -> list[list[int]]:
        texts.extend(given)
        return encode(given, **kwargs)

    monkeypatch.setattr(codec, "encode", count)
    yield texts


@pytest.fixture
def filtered(many: Rows, write: Write) -> DataConfig:
    """The settings of a run that leaves long prompts out."""
    return settings(write(many), filter_overlong_prompts=True)


def settings(path: str, **values: Any) -> DataConfig:
    given = {"train_batch_size": 4, "truncation": "left", "max_prompt_length": 4096, **values}
    return DataConfig.model_validate({"train_files": path, **given})


def open_large(config: DataConfig, codec: TextCodec) -> Source[Prompt]:
    train = open_prompts(config, codec)
    return Source(train.read, open_ledger(train.rows, config, total_epochs=2))


def open_small(config: DataConfig, codec: TextCodec) -> Source[Prompt]:
    return open_source(load_prompts(config, codec), config, total_epochs=2)


def longest_of_rows(config: DataConfig, codec: TextCodec, *, share: float) -> int:
    """Return a length in tokens that ``share`` of the prompts have at most."""
    whole = config.model_copy(update={"filter_overlong_prompts": False})
    lengths = sorted(len(entry.token_ids) for entry in load_prompts(whole, codec))
    return lengths[int(share * len(lengths)) - 1]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"shuffle": False},
        {"truncation": "middle", "max_prompt_length": 20},
        {"train_max_samples": 30},
        {"filter_overlong_prompts": True, "max_prompt_length": 200},
    ],
)
def test_the_draws_are_those_of_a_small_set(
    values: dict[str, Any], many: Rows, write: Write, codec: TextCodec
) -> None:
    config = settings(write(many), **values)
    large, small = open_large(config, codec), open_small(config, codec)
    assert len(large) == len(small) > 10
    assert large.state() == small.state()
    assert large.draw(3 * NUM_ROWS) == small.draw(3 * NUM_ROWS)


def test_only_the_longest_are_rendered_before_they_are_drawn(
    many: Rows, write: Write, codec: TextCodec, encoded: list[str]
) -> None:
    config = settings(write(many))
    train = open_prompts(config, codec)
    assert [entry.row for entry in train.examples] == list(range(NUM_ROWS))[-NUM_EXAMPLES:]
    assert len(encoded) == NUM_EXAMPLES
    assert [entry.row for entry in train.read([7, 3])] == [7, 3]
    assert len(encoded) == NUM_EXAMPLES + 2


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(
    many: Rows, write: Write, codec: TextCodec
) -> None:
    config = settings(write(many))
    whole, first, again = (open_large(config, codec) for _ in range(3))
    uninterrupted = whole.draw(60)
    drawn = first.draw(24)
    first.mark_trained([prompt.uid for prompt in drawn if prompt.uid % 3])
    first.mark_dropped([prompt.uid for prompt in drawn if prompt.uid % 6 == 0])
    state = json.dumps(first.state())
    again.restore(json.loads(state))
    is_open = [prompt for prompt in uninterrupted[:24] if prompt.uid % 6 == 3]
    assert again.draw(len(is_open) + 36) == is_open + uninterrupted[24:]
    assert len(state) < 1000  # for any number of rows


def test_lengths_are_measured_once(
    many: Rows, write: Write, codec: TextCodec, encoded: list[str], tmp_path: Path
) -> None:
    config = settings(write(many), filter_overlong_prompts=True)
    limit = longest_of_rows(config, codec, share=0.75)
    config = config.model_copy(update={"max_prompt_length": limit})
    encoded.clear()
    first = open_prompts(config, codec)
    assert len(first.rows) == 0.75 * NUM_ROWS
    assert len(encoded) == NUM_ROWS + NUM_EXAMPLES
    encoded.clear()
    again = open_prompts(config, codec)
    assert [row.row for row in again.rows] == [row.row for row in first.rows]
    assert len(encoded) == NUM_EXAMPLES
    lower = longest_of_rows(config, codec, share=0.5)
    encoded.clear()
    shorter = config.model_copy(update={"max_prompt_length": lower})
    assert len(open_prompts(shorter, codec).rows) == 0.5 * NUM_ROWS
    assert len(encoded) == NUM_EXAMPLES
    (file,) = (tmp_path / "hub").rglob("*.npy")
    file.write_bytes(file.read_bytes()[:-3])
    encoded.clear()
    assert len(open_prompts(config, codec).rows) == 0.75 * NUM_ROWS
    assert len(encoded) == NUM_ROWS + NUM_EXAMPLES


def test_lengths_of_other_rows_are_not_used(
    many: Rows, write: Write, codec: TextCodec, encoded: list[str]
) -> None:
    open_prompts(settings(write(many), filter_overlong_prompts=True), codec)
    many[3]["prompt"] = [{"role": "user", "content": "Another question"}]
    encoded.clear()
    open_prompts(settings(write(many), filter_overlong_prompts=True), codec)
    assert len(encoded) == NUM_ROWS + NUM_EXAMPLES


@pytest.mark.parametrize("is_template", [True, False])
def test_lengths_by_another_template_are_not_used(
    is_template: bool,
    filtered: DataConfig,
    codec: TextCodec,
    encoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_prompts(filtered, codec)
    encoded.clear()
    if is_template:
        template = "{{ messages[0]['content'] }}"
        monkeypatch.setattr(codec.tokenizer, "chat_template", template)
    else:
        monkeypatch.setattr(codec, "_template_settings", {"enable_thinking": False})
    open_prompts(filtered, codec)
    assert len(encoded) == NUM_ROWS + NUM_EXAMPLES


def test_a_folder_that_cannot_be_written_costs_only_time(
    many: Rows, write: Write, codec: TextCodec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hub").write_text("a file")
    config = settings(write(many), filter_overlong_prompts=True)
    assert len(open_prompts(config, codec).rows) == NUM_ROWS
    assert "the lengths cannot be kept for the next start" in caplog.text


def test_every_row_is_checked_at_the_start(many: Rows, write: Write, codec: TextCodec) -> None:
    many[5] = {**many[5], "reward_model": None}  # not among the longest
    with pytest.raises(UserError, match="row 5 has no reward_model.ground_truth"):
        open_prompts(settings(write(many, "rows.jsonl")), codec)


def test_a_prompt_that_is_too_long_is_named_at_the_start(
    many: Rows, write: Write, codec: TextCodec
) -> None:
    config = settings(write(many), truncation="error")
    limit = longest_of_rows(config, codec, share=0.9)
    with pytest.raises(UserError, match=r"row 36 has a prompt of \d+ tokens, more than"):
        open_prompts(config.model_copy(update={"max_prompt_length": limit}), codec)


def test_few_characters_of_many_tokens_are_named_when_they_are_drawn(
    many: Rows, write: Write, codec: TextCodec
) -> None:
    """A byte-level tokenizer makes several tokens of a character that it has not seen."""
    many[5] = {**many[5], "prompt": [{"role": "user", "content": "\U0001d54f" * 150}]}
    config = settings(write(many), truncation="error", max_prompt_length=500)
    assert longest_of_rows(settings(write(many)), codec, share=1) > 500
    train = open_prompts(config, codec)
    train.read(range(5))
    with pytest.raises(UserError, match=r"row 5 has a prompt of \d+ tokens, more than"):
        train.read([5])
