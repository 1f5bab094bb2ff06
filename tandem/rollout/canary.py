# SPDX-License-Identifier: Apache-2.0
"""The canary: known tokens that are generated after each update, and must have the log-probs of the
trainer's model.

It finds weights that the engine loaded into the wrong place or did not use, which neither names nor
checksums show. The prompt is always the same, so that a prefix cache with keys and values of old
weights is found, too. The tokens after it differ from version to version: those of one version do
not go to all experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.api import EngineFailure
from tandem.models.language_model import LanguageModel
from tandem.rollout.packing import pack
from tandem.types import PackedBatch, TokenIds

NUM_TOKENS = 8
CANARY_LENGTH = 2 * NUM_TOKENS
"""The number of tokens of the prompt and the tokens after it."""
MAX_ERROR = 1e-3
"""The largest mean difference of log-probs if trainer and engine compute in fp32."""
MAX_ROUNDED_ERROR = 0.2
"""The largest mean difference if one of them does not."""
MAX_QUANTIZED_ERROR = 1.5
"""The largest mean difference if the engine multiplies in fp8, which keeps four bits of a number.

Of a model with large random weights, an unfavourable case, 60 versions differed by 0.46 on average
and by 0.98 at most. With the wrong sign of a matrix in the first of its two layers, 20 versions
differed by 2.6 to 3.2 on average, and in the last layer by 1.1 to 2.6: only gross mistakes show.
"""


def canary_tokens(vocabulary: int, version: int) -> tuple[TokenIds, TokenIds]:
    """Return the prompt of a version and the tokens after it."""
    prompt = tuple((37 * index + 5) % vocabulary for index in range(NUM_TOKENS))
    first = 5 + 11 * version
    later = range(NUM_TOKENS, CANARY_LENGTH)
    return prompt, tuple((37 * index + first) % vocabulary for index in later)


@torch.no_grad()
def expected_log_probs(model: LanguageModel, version: int) -> Tensor:
    """Return the log-probs (R,) of a version's tokens under the trainer's model, on the CPU."""
    prompt, response = canary_tokens(model.lm_head_weight.shape[0], version)
    packed = pack([prompt + response[:-1]], [0], prefix_starts=[0], device=torch.device("cpu"))
    target_R = torch.tensor(response)
    source_R = torch.arange(len(prompt) - 1, len(packed.token_T))
    batch = PackedBatch(
        token_ids_T=packed.token_T,
        position_ids_T=packed.position_T,
        segments=packed.segments,
        source_R=source_R,
        target_R=target_R,
        sequence_R=torch.zeros_like(target_R),
        num_sequences=1,
    )
    h_RD = model.hidden(batch)[source_R.to(model.lm_head_weight.device)]
    logits_RV = F.linear(h_RD, model.lm_head_weight).float().cpu()
    return torch.log_softmax(logits_RV, -1).gather(1, target_R[:, None])[:, 0]


def require_equal(
    expected_R: Tensor,
    found_R: Tensor,
    *,
    engine: str,
    version: int,
    dtypes: Iterable[torch.dtype],
    is_quantized: bool = False,
) -> None:
    """Raise EngineFailure if the log-probs differ by more than rounding, or are not finite.

    Args:
        engine: the name of the engine in the message.
        dtypes: the dtypes of trainer and engine.
        is_quantized: whether the engine multiplies matrices in fp8.
    """
    if found_R.shape != expected_R.shape:
        raise EngineFailure(
            f"{engine}: version {version} cannot be checked: of {len(expected_R)} known tokens, "
            f"{len(found_R)} came back"
        )
    bound = MAX_ERROR if set(dtypes) == {torch.float32} else MAX_ROUNDED_ERROR
    bound = MAX_QUANTIZED_ERROR if is_quantized else bound
    error = float((found_R - expected_R).abs().mean())
    if not error <= bound:
        raise EngineFailure(
            f"{engine}: version {version} was not loaded as the trainer has it: log-probs of known "
            f"tokens differ by {error:.1e} on average. Engine arguments that change what is "
            "computed, such as a cache in fp8, have the same effect"
        )
