# SPDX-License-Identifier: Apache-2.0
"""What the quickstart writes loads through the public formats: parquet, tokenizer, model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from tandem.config.derived.sizes import ModelSizes
from tandem.models.weights import read_config
from tandem.quickstart import materials as module
from tandem.quickstart.materials import (
    NUM_DEMONSTRATIONS,
    NUM_TEST,
    NUM_TRAIN,
    NUM_UNSEEN,
    Materials,
    prepare,
)
from tandem.quickstart.model import (
    NUM_EXPERTS,
    QUICKSTART_SIZE,
    padded_vocab,
    random_weights,
    write_expert_model,
    write_model,
)
from tandem.quickstart.tokenizer import END_ID, MAX_VOCAB, PAD_ID

MAX_PROMPT_TOKENS = 40


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return prepare(tmp_path_factory.mktemp("quickstart"), seed=0)


def questions(path: Path) -> list[str]:
    return [row["prompt"][0]["content"] for row in parquet.read_table(path).to_pylist()]


def test_splits_have_their_sizes_and_share_no_question(materials: Materials) -> None:
    train, test = questions(materials.train), questions(materials.test)
    unseen = questions(materials.test_unseen)
    shown = parquet.read_table(materials.demonstrations)["question"].to_pylist()
    assert (len(train), len(shown)) == (NUM_TRAIN, NUM_DEMONSTRATIONS)
    assert (len(test), len(unseen)) == (NUM_TEST, NUM_UNSEEN)
    assert not (set(test) | set(unseen)) & (set(train) | set(shown))


def test_prompts_have_the_schema_of_verl(materials: Materials) -> None:
    row = parquet.read_table(materials.train).to_pylist()[0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["prompt"][0].keys() == {"role", "content"}
    assert row["reward_model"]["style"] == "rule"
    assert row["extra_info"]["answer"].endswith(f"#### {row['reward_model']['ground_truth']}")
    assert row["extra_info"]["index"] == 0


def test_tests_do_not_depend_on_the_seed_but_training_does(
    materials: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 100
    for name in ("NUM_TRAIN", "NUM_DEMONSTRATIONS", "NUM_UNSEEN"):
        monkeypatch.setattr(module, name, few)
    other = prepare(tmp_path, seed=1)
    assert questions(other.test) == questions(materials.test)
    assert len(questions(other.train)) == few
    assert questions(other.train) != questions(materials.train)[:few]
    name = "model.safetensors"
    assert (other.model / name).read_bytes() != (materials.model / name).read_bytes()


def test_tokenizer_loads_and_renders_chatml(materials: Materials) -> None:
    tokenizer = AutoTokenizer.from_pretrained(materials.model)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END_ID, PAD_ID)
    assert len(tokenizer) <= MAX_VOCAB
    chat = [{"role": "user", "content": "Tom has 18 eggs."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nTom has 18 eggs.<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer(" 18")["input_ids"]] == [" ", "1", "8"]


def test_the_longest_prompts_fit_the_recipe(materials: Materials) -> None:
    tokenizer = AutoTokenizer.from_pretrained(materials.model)
    longest = sorted(questions(materials.train), key=len)[-300:]
    chats = [[{"role": "user", "content": question}] for question in longest]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    assert max(map(len, tokenizer(texts)["input_ids"])) <= MAX_PROMPT_TOKENS


def test_model_is_an_ordinary_qwen2_folder(materials: Materials) -> None:
    config = AutoConfig.from_pretrained(materials.model)
    weights = load_file(materials.model / "model.safetensors")
    assert config.model_type == "qwen2"
    assert config.eos_token_id == END_ID
    assert materials.num_parameters == sum(w.numel() for w in weights.values()) == 155_200
    assert weights["model.embed_tokens.weight"].shape == (config.vocab_size, config.hidden_size)
    assert all(w.dtype == torch.float32 for w in weights.values())


def test_weights_follow_the_seed(tmp_path: Path) -> None:
    count = write_model(tmp_path, num_tokens=100, eos_id=END_ID, pad_id=PAD_ID, seed=5)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["vocab_size"] == padded_vocab(100) == 112
    assert count == 155_200 - (496 - 112) * 64
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)


def test_random_weights_repeat(materials: Materials) -> None:
    first, second = (random_weights(QUICKSTART_SIZE, 32, seed=2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_with_experts_has_as_many_parameters_for_each_token(tmp_path: Path) -> None:
    sizes = {"num_tokens": 200, "eos_id": END_ID, "pad_id": PAD_ID, "seed": 0}
    (tmp_path / "dense").mkdir()
    write_model(tmp_path / "dense", **sizes)
    write_expert_model(tmp_path, **sizes)
    dense, sparse = (ModelSizes.of(read_config(x)) for x in (tmp_path / "dense", tmp_path))
    router = QUICKSTART_SIZE.num_layers * QUICKSTART_SIZE.hidden * NUM_EXPERTS
    assert sparse.active_layer_parameters == dense.active_layer_parameters + router
    assert sparse.num_parameters > 2 * dense.num_parameters
