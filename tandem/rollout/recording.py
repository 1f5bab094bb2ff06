# SPDX-License-Identifier: Apache-2.0
"""The recorded experts of the tokens that an engine computes.

A row of routes belongs to a token that was fed. It stays that of the pass that first fed the token
to its sample, under whose weights the next token was drawn.

Shapes: t tokens, L layers with experts, X experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tandem.config.derived.experts import ExpertConfig
from tandem.models.decoder import Decoder
from tandem.models.routing import RecordedRoutes, empty_routes


def recorder_of(experts: ExpertConfig | None) -> RecordedRoutes | None:
    """Return a recorder of one pass; None if nothing is recorded."""
    return None if experts is None else RecordedRoutes(experts)


def routes_like(decoder: Decoder) -> Tensor | None:
    """Return a tensor like the routes of a token; None for a model without experts."""
    experts, device = decoder.config.experts, decoder.lm_head_weight.device
    if experts is None:
        return None
    return empty_routes(experts, decoder.config.num_layers, device=device)


@dataclass(slots=True)
class SharedRoutes:
    """The routes of the first tokens of all samples of a prompt, (t, L, X) on the host.

    They are those of the newest pass, because samples that enter later read its keys.
    """

    routes_tLX: np.ndarray | None = None


@dataclass(slots=True)
class SampleRoutes:
    """The routes of a sample's tokens, as far as they are known on the host.

    Attributes:
        shared: the routes of its prompt, which another sample may have computed.
        num_tokens: the number of tokens with known routes.
    """

    shared: SharedRoutes = field(default_factory=SharedRoutes)
    num_tokens: int = 0
    _parts: list[np.ndarray] = field(default_factory=list[np.ndarray])

    def record(self, routes_tLX: np.ndarray, *, start: int) -> None:
        """Append the routes of tokens from index ``start`` on. Those that are known stay."""
        if self.num_tokens < start:
            known_tLX = self.shared.routes_tLX
            assert known_tLX is not None, "a prefix was computed before what follows it"
            self._append(known_tLX[self.num_tokens : start])
        self._append(routes_tLX[self.num_tokens - start :])

    def joined(self) -> np.ndarray:
        """Return the routes of all tokens in order."""
        return np.concatenate(self._parts)

    def _append(self, routes_tLX: np.ndarray) -> None:
        self._parts.append(routes_tLX.copy())  # the buffer of a whole pass can then be freed
        self.num_tokens += len(routes_tLX)
