# SPDX-License-Identifier: Apache-2.0
"""The keyed draw as the sampler of vLLM's second model runner, which takes less time of the host.

The runner keeps tokens on the device, and knows a request by its place among the states there.

Shapes: B rows of logits, one for each scheduled request; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.models.operators import upload
from tandem.rollout.sampler import DrawRows
from tandem.rollout.vllm.draw import Batch, DrawnLogProbs, Stream

FIRST_VERSION = (0, 26)
"""The first version of vLLM whose sampler is known. Earlier ones use the first model runner."""


class KeyedSampler:
    """vLLM's sampler, which keeps its states and returns tokens that streams draw."""

    def __init__(
        self,
        sampler: Any,
        stream_of: Callable[[Any], Stream],
        *,
        log_probs: DrawnLogProbs,
        draw_rows: DrawRows,
    ) -> None:
        """Take the sampler of a runner.

        Args:
            stream_of: returns the stream of a request by its sampling parameters.
            log_probs: gets the log-probs of the drawn tokens.
            draw_rows: draws the tokens of a step.
        """
        self._sampler = sampler
        sampler.sample = self._sample  # the sampler calls it between its other work
        self._stream_of, self._draw_rows, self._log_probs = stream_of, draw_rows, log_probs
        self._streams: dict[int, Stream] = {}
        self._input_batch: Any = None
        self._places = b""
        self._batch = Batch.of(())

    def __getattr__(self, name: str) -> Any:
        """Return what else the runner and its workers ask a sampler for."""
        return getattr(self._sampler, name)

    def add_request(self, place: int, *given: Any) -> None:
        """Put a request into a place. Its sampling parameters come last."""
        self._sampler.add_request(place, *given)
        stream = self._stream_of(given[-1])
        stream.token_ids = stream.log_probs  # the tokens are on the device
        self._streams[place] = stream
        self._places = b""

    def __call__(self, logits_BV: Tensor, input_batch: Any) -> Any:
        """Return vLLM's ``SamplerOutput``."""
        self._input_batch = input_batch
        return self._sampler(logits_BV, input_batch)

    def _sample(self, logits_BV: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return the drawn tokens (B,), and the logits."""
        given = self._input_batch
        if (places := given.idx_mapping_np.tobytes()) != self._places:
            self._places = places
            self._batch = Batch.of([self._streams[place] for place in given.idx_mapping_np])
        length_B = given.num_computed_tokens_np + given.num_scheduled_tokens
        position_B = length_B - self._sampler.req_states.prompt_len.np[given.idx_mapping_np]
        # A request whose prompt is cut into chunks draws with its last chunk.
        (drawing,) = np.nonzero(length_B >= given.prefill_len_np)
        draw = self._batch.draw(
            logits_BV,
            torch.from_numpy(position_B.clip(min=0).astype(np.int64)),
            draw_rows=self._draw_rows,
        )
        streams, logp_B = self._batch.streams, draw.logp_B
        if len(drawing) < len(streams):
            streams = [streams[index] for index in drawing.tolist()]
            logp_B = logp_B[upload(torch.from_numpy(drawing), logp_B.device)]
        self._log_probs.note(streams, position_B[drawing].tolist(), logp_B=logp_B)
        return draw.token_B, logits_BV
