# SPDX-License-Identifier: Apache-2.0
"""The completion of a sequence, made from its tokens and their log-probs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from tandem.types import Completion, FinishReason


def complete(
    sample_id: int,
    token_ids: Sequence[int],
    *,
    log_probs: Sequence[float],
    eos_ids: Sequence[int],
    versions: Sequence[tuple[int, int]],
    routes: Any = None,
) -> Completion:
    """Return the completion of a finished sequence.

    It is FAILED if its last log-prob is NaN, because then the logits were not finite.

    Args:
        eos_ids: tokens that end it; empty if it ignores them.
        versions: (index, version) of the first token that each weights version drew, ascending.
            Versions that drew no token are left out.
        routes: see ``Completion``.
    """
    if math.isnan(log_probs[-1]):
        reason = FinishReason.FAILED
    else:
        reason = FinishReason.STOP if token_ids[-1] in eos_ids else FinishReason.LENGTH
    (_, first_version), *switches = versions
    return Completion(
        sample_id=sample_id,
        token_ids=array("i", token_ids),
        log_probs=array("f", log_probs),
        finish_reason=reason,
        weights_version=first_version,
        switches=tuple(switch for switch in switches if switch[0] < len(token_ids)),
        routes=routes,
    )
