# SPDX-License-Identifier: Apache-2.0
"""V26 on a CPU: vLLM quantizes new weights to fp8 as they come (``rollout.quantization=fp8``).

The expected log-probs are those of transformers' model in which each quantized product is computed
as vLLM says: weights with a scale for each row, inputs with a scale for each token, both in e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.rollout.feed import checkpoint_views
from tandem.rollout.vllm.engine import build
from tandem.testing.contracts.rollout import EngineBench
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.engines.bench import open_spec, running, write_model
from tests.engines.parity import check_refusals_by_name, is_seen

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
}
RULE = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=24, ignore_eos=True)
NUM_VERSIONS = 8
LARGEST = 448.0
"""The largest number of e4m3."""


def _requests(*, first_id: int) -> list[GenerationRequest]:
    """Return requests for a sample of each of eight prompts."""
    return [GenerationRequest((first_id + i,), tuple(range(2 + i, 42 + i)), RULE) for i in range(8)]


class _Quantized(nn.Module):
    """A linear map whose product is computed in fp8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight_ND, self.bias_N = _rounded(linear.weight.detach().float()), linear.bias

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTN = F.linear(_rounded(x_BTD.float()), self.weight_ND)
        bias_N = 0.0 if self.bias_N is None else self.bias_N
        return (y_BTN + bias_N).to(x_BTD.dtype)


def _rounded(rows: Tensor) -> Tensor:
    """Round each row to fp8 with a scale of its own."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (rows / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def _log_probs(
    bench: EngineBench, folder: Path, request: GenerationRequest, found: Completion, *, fp8: bool
) -> Tensor:
    """Return transformers' log-probs (R,) of a response, with products in fp8 or in bf16."""
    bench.model.save(folder)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer in module.model.layers if fp8 else ():
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, _Quantized(linear))
    tokens = torch.tensor(found.token_ids)
    ids = torch.cat((torch.tensor(request.prompt_ids), tokens))
    with torch.no_grad():
        logits_RV = module(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits_RV, -1).gather(1, tokens[:, None])[:, 0]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBench]:
    """An engine in fp8. Its tests run in the order of this file."""
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen2 tied", **SIZES)
    spec = open_spec(folder, dtype=torch.bfloat16, name="vllm", quantization="fp8")
    with running(build, spec) as bench:
        yield bench


def test_v26_log_probs_are_those_of_products_in_fp8(bench: EngineBench, tmp_path: Path) -> None:
    """Under three versions. They are far nearer to these than to those of the trainer in bf16."""
    for version in range(3):
        if version:
            bench.use_new_weights(seed=version)
        asked = _requests(first_id=100 * version)
        found = bench.generate(asked)
        errors: dict[bool, list[Tensor]] = {True: [], False: []}
        for request in asked:
            one = found[request.sample_ids[0]]
            for fp8, those in errors.items():
                expected_R = _log_probs(bench, tmp_path, request, one, fp8=fp8)
                those.append((torch.tensor(one.log_probs) - expected_R).abs())
        in_fp8, in_bf16 = (float(torch.cat(errors[fp8]).mean()) for fp8 in (True, False))
        assert in_fp8 < in_bf16 / 2


def test_v26_an_update_without_a_tensor_is_refused_by_its_name(bench: EngineBench) -> None:
    """Scales, which vLLM computes, need not come."""
    check_refusals_by_name(bench, names=list(dict(checkpoint_views(bench.model)))[::3])


def test_v26_a_matrix_with_the_wrong_sign_is_seen_by_the_canary(bench: EngineBench) -> None:
    """The bound of the canary is above what rounding to fp8 does, and below a gross mistake.

    A mistake in the first layer changes the inputs of the second one too. It stays for versions.
    """
    views = dict(checkpoint_views(bench.model))
    assert not any(is_seen(bench, views) for _ in range(NUM_VERSIONS))
    matrices = [name for name, view in views.items() if "layers.0" in name and view.ndim == 2]
    assert len(matrices) == 7
    for name in matrices:
        wrong = views | {name: -views[name]}
        assert any(is_seen(bench, wrong) for _ in range(NUM_VERSIONS)), name
