# SPDX-License-Identifier: Apache-2.0
"""The scores of response tokens: a critic's values against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tandem.models.folder import ModelFolder, check_critic_folder, open_part
from tandem.models.language_model import LanguageModel
from tandem.models.parallel import WHOLE
from tests.fakes.scoring import score_batch
from tests.unit.models.tiny_models import NATIVE, pack_shared, write_hf

FIRST, SECOND = [3, 5, 7, 9], [11, 13]
ROWS = [(FIRST, [2, 4, 6]), (FIRST, [8]), (SECOND, [10, 12, 14, 16])]
BATCH = pack_shared([FIRST, SECOND], [[[2, 4, 6], [8]], [[10, 12, 14, 16]]])


def open_critic(folder: ModelFolder) -> LanguageModel:
    return open_part(folder, WHOLE, dtype=torch.float32, device="cpu")


def values_of(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        scores = score_batch(model, BATCH, temperature=0.3, with_entropy=True)
    assert scores.entropy_R is None
    return scores.score_R


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_a_critic_that_was_saved_says_the_same_in_transformers(family: str, tmp_path: Path) -> None:
    write_hf(NATIVE[family](), tmp_path / "policy")
    folder = check_critic_folder(str(tmp_path / "policy"), seed=3, key="critic.model.path")
    model = open_critic(folder)
    with torch.no_grad():  # as if it had been trained
        for parameter in model.module.parameters():
            parameter.add_(0.05)
    saved = tmp_path / "critic"
    saved.mkdir()
    model.save(saved)
    theirs = AutoModelForTokenClassification.from_pretrained(saved).eval()
    values_R = values_of(model)
    found = []
    for prompt, response in ROWS:
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([prompt + response])).logits[0, :, 0]
        found.append(logits[len(prompt) - 1 : -1])
    torch.testing.assert_close(values_R, torch.cat(found), rtol=0, atol=1e-5)
    assert float(values_R.std()) > 1e-3

    again = check_critic_folder(str(saved), seed=4, key="critic.model.path")
    assert again.value_head_seed is None, "the folder has a head of its own"
    assert torch.equal(values_of(open_critic(again)), values_R)
    assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] is False
