# SPDX-License-Identifier: Apache-2.0
"""Real GSM8K rows, and a small byte-level tokenizer in Qwen2's form trained on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tandem.data.tokenizer import TextCodec, load_codec

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
EXAMPLES = (
    (
        "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
        "May. How many clips did Natalia sell altogether in April and May?",
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
        "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72",
        "72",
    ),
    (
        "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of "
        "babysitting. How much did she earn?",
        "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\n"
        "Working 50 minutes, she earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
        "10",
    ),
    (
        "A robe takes 2 bolts of blue fiber and half that much white fiber.  "
        "How many bolts in total does it take?",
        "It takes 2/2=<<2/2=1>>1 bolt of white fiber\n"
        "So the total amount of fabric is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3",
        "3",
    ),
)


def gsm8k_row(index: int) -> dict[str, Any]:
    """A row of verl's schema."""
    question, answer, truth = EXAMPLES[index % len(EXAMPLES)]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index, "answer": answer, "question": question},
    }


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Seven rows."""
    return [gsm8k_row(index) for index in range(7)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to ``name`` by its suffix and returns the path."""

    def write_rows(rows: list[dict[str, Any]], name: str = "train.parquet") -> str:
        path = tmp_path / name
        if path.suffix == ".parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".jsonl":
            path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        else:
            path.write_text(json.dumps(rows, indent=1))
        return str(path)

    return write_rows


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tokenizer: ChatML template, ``<|endoftext|>`` before plain text, ends with
    ``<|im_end|>``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        text for question, answer, _ in EXAMPLES for text in (question, answer, "user assistant")
    ]
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def codec(tokenizer_folder: Path) -> TextCodec:
    """That tokenizer loaded."""
    return load_codec(str(tokenizer_folder))
