# SPDX-License-Identifier: Apache-2.0
"""The names that a run and the plug-in in a server share."""

from __future__ import annotations

BACKEND = "tandem"
"""The name of tandem's plug-in for weights in ``--weight-transfer-config``."""
PROCESSOR = "tandem.rollout.attached.plugin:KeyedDraw"
"""The value of ``--logits-processors``."""
STREAM = "tandem"
"""The entry of a request's ``extra_args`` that holds the stream of its draws."""
LOGPROBS_MODE = "processed_logits"
"""The value of ``--logprobs-mode``: vLLM returns what the draw left of the logits, which is the
log-prob of the drawn token."""
PROTOCOL = 2
"""The number of the messages between a run and the plug-in. Other versions of tandem may have
another."""
SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
"""The entries of config.json by which models are told apart before weights are sent."""
