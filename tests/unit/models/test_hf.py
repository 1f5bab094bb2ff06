# SPDX-License-Identifier: Apache-2.0
"""Families of transformers behind the same interface: right log-probs or a clear refusal."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CohereConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    PhiConfig,
)

from tandem.errors import UserError
from tandem.models.folder import open_model
from tests.unit.models.tiny_models import (
    SIZES,
    VOCAB,
    hf_logits,
    open_fp32,
    pack_separate,
    pack_shared,
    sample_sequences,
    write_hf,
)

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OTHERS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS
    ),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=16, **TOKENS),
    "phi": lambda: PhiConfig(**SIZES, resid_pdrop=0.3, embd_pdrop=0.3, **TOKENS),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25, **TOKENS),
    "granite": lambda: GraniteConfig(**SIZES, logits_scaling=3.0, **TOKENS),
}


def gradients(model, packed) -> dict:
    model.module.zero_grad()
    logits_TV = model.hidden(packed) @ model.lm_head_weight.T
    logits_TV.log_softmax(-1)[packed.source_R, packed.target_R].sum().backward()
    return {name: x.grad.clone() for name, x in model.module.named_parameters()}


@pytest.mark.parametrize("case", OTHERS)
def test_logits_equal_the_models_own(case, tmp_path):
    theirs = write_hf(OTHERS[case](), tmp_path)
    ours = open_fp32(tmp_path)
    assert ours.decoder is None
    assert ours.family == case
    ours.module.train()  # dropout must be off in training, too
    with torch.no_grad():
        for packed in (pack_shared(*sample_sequences()), pack_separate(*sample_sequences())):
            logits_TV = ours.hidden(packed) @ ours.lm_head_weight.T
            torch.testing.assert_close(logits_TV, hf_logits(theirs, packed), rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", ["gpt2", "phi"])
def test_gradients_equal_the_models_own_also_with_checkpointing(case, tmp_path):
    theirs = write_hf(OTHERS[case](), tmp_path)
    ours = open_fp32(tmp_path)
    packed = pack_shared(*sample_sequences())
    logits_TV = hf_logits(theirs, packed)
    logits_TV.log_softmax(-1)[packed.source_R, packed.target_R].sum().backward()
    plain = gradients(ours, packed)
    ours.set_gradient_checkpointing(True)
    assert ours.module.is_gradient_checkpointing
    recomputed = gradients(ours, packed)
    ours.set_gradient_checkpointing(False)
    assert not ours.module.is_gradient_checkpointing
    with pytest.raises(UserError, match="recompute_granularity='pointwise'.* Use full"):
        ours.set_gradient_checkpointing(True, "pointwise")
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(plain[name], parameter.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(recomputed[name], plain[name], rtol=1e-6, atol=1e-6)


def test_round_trip(tmp_path):
    write_hf(OTHERS["phi"](), tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "b").mkdir()
    open_fp32(tmp_path / "a").save(tmp_path / "b")
    assert (tmp_path / "b" / "tokenizer.json").exists()
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_random_weights(tmp_path):
    OTHERS["gpt2"]().save_pretrained(tmp_path)
    state = torch.get_rng_state()
    one, same = (
        open_model(str(tmp_path), dtype=torch.float32, device="cpu", random_seed=5)
        for _ in range(2)
    )
    assert torch.equal(one.lm_head_weight, same.lm_head_weight)
    assert torch.equal(state, torch.get_rng_state())


def test_soft_capped_logits_are_refused(tmp_path):
    Gemma2Config(**SIZES, head_dim=16, **TOKENS).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gemma2' cannot be trained here: it soft-caps"):
        open_model(str(tmp_path), dtype=torch.float32, device="cpu", random_seed=0)


def test_missing_tensor_is_named(tmp_path):
    write_hf(OTHERS["gemma"](), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"tensor 'model\.norm\.weight' is missing"):
        open_fp32(tmp_path)


def test_not_a_causal_language_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(UserError, match="transformers cannot load it"):
        open_model(str(tmp_path), dtype=torch.float32, device="cpu", random_seed=0)
