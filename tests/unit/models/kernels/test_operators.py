# SPDX-License-Identifier: Apache-2.0
"""A whole decoder computes the same with the fused operators as with those of torch."""

from __future__ import annotations

import pytest
import torch

from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.models.operators import Operators
from tests.unit.models.tiny_models import NATIVE, pack_shared, write_hf

PACKED = pack_shared([[5, 60, 3], [44]], [[[7, 12], [2]], [[21]]])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


WITH_HEAD_NORMS, WITHOUT = "qwen3_biases", "qwen2_tied"


@pytest.fixture
def model(request, tmp_path, device) -> LanguageModel:
    """Return a model of two layers in fp32, with or without norms of queries and keys."""
    write_hf(NATIVE[request.param](), tmp_path)
    return open_model(str(tmp_path), dtype=torch.float32, device=device)


def results(model: LanguageModel, operators: Operators) -> dict[str, torch.Tensor]:
    """Return hidden states, and the gradients of all weights for a loss that tells them apart."""
    model.decoder.operators = operators
    model.module.zero_grad()
    h_TD = model.hidden(PACKED)
    weights_TD = torch.randn(h_TD.shape, generator=torch.Generator().manual_seed(1))
    (h_TD * weights_TD.to(h_TD.device)).sum().backward()
    parameters = model.module.named_parameters()
    return {"hidden": h_TD.detach()} | {n: p.grad for n, p in parameters if p.grad is not None}


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        (WITHOUT, None),
        *((WITH_HEAD_NORMS, how) for how in (None, "pointwise", "feed_forward", "full")),
    ],
    indirect=["model"],
)
def test_decoder_equals_torch(model, recompute, fused):
    theirs = results(model, model.decoder.operators)
    model.set_gradient_checkpointing(recompute is not None, recompute or "full")
    ours = results(model, fused)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for name, their in theirs.items():
        scale = their.abs().max().clamp_min(1.0)
        torch.testing.assert_close(ours[name] / scale, their / scale, **CLOSE)


@pytest.mark.parametrize("model", [WITH_HEAD_NORMS], indirect=True)
def test_decoder_without_gradients(model, fused):
    with torch.no_grad():
        theirs_TD = model.hidden(PACKED)
        model.decoder.operators = fused
        ours_TD = model.hidden(PACKED)
    assert not torch.equal(ours_TD, torch.zeros_like(ours_TD))
    torch.testing.assert_close(ours_TD, theirs_TD, **CLOSE)
