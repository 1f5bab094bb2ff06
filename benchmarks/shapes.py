# SPDX-License-Identifier: Apache-2.0
"""What the accelerator benchmarks run on: random weights of published shapes, and workloads.

No weights are downloaded: speed does not depend on their values. The one property that matters,
how long responses are, is planted: a constant direction of the residual stream raises the
end-of-sequence logit to the wanted rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tandem.models.decoder import Decoder, DecoderConfig
from tandem.models.operators import Operators
from tandem.models.rotary import RopeConfig
from tandem.types import Segments

EOS_ID = 257


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2.5 model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    def decoder_config(self) -> DecoderConfig:
        """The decoder of this shape."""
        return DecoderConfig(
            family="qwen2",
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope=RopeConfig(1e6),
            max_position_embeddings=32768,
            tie_embeddings=self.tied,
            qkv_bias=True,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            initializer_range=0.02,
        )

    @property
    def layer_parameters(self) -> int:
        """Parameters of the layers' matrices."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        own = self.heads * self.head_dim
        return self.layers * self.hidden * (qkv + own + 3 * self.inner)

    @property
    def head_parameters(self) -> int:
        """Parameters of the language-model head."""
        return self.vocabulary * self.hidden

    def kv_bytes_per_token(self, bytes_per_number: int = 2) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def train_flops(self, num_tokens: int, num_loss_tokens: int, key_pairs: int) -> float:
        """Forward and backward: 6 per matrix parameter and token, 12 x width per attended pair.

        ``num_tokens`` are those a padded, unshared computation would need without its padding;
        the head counts for tokens that carry loss only.
        """
        matrices = 6 * (self.layer_parameters * num_tokens + self.head_parameters * num_loss_tokens)
        return matrices + 12 * self.layers * self.heads * self.head_dim * key_pairs


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, False),
}


@dataclass(frozen=True)
class Workload:
    """``mean_response``: of geometric lengths up to ``response``; None for all of that length."""

    prompts: int
    samples: int
    prompt: int
    response: int
    mean_response: int | None = None


WORKLOADS = {
    "S": Workload(64, 8, 128, 512),
    "A": Workload(64, 16, 256, 512),
    "B": Workload(32, 16, 512, 2048),
    "T": Workload(64, 8, 128, 2048, mean_response=512),
}


@torch.no_grad()
def random_decoder(
    shape: Shape, *, device: str, dtype: torch.dtype, operators: Operators, seed: int = 0
) -> Decoder:
    """Weights drawn on the device."""
    with torch.device("meta"):
        decoder = Decoder(shape.decoder_config(), operators)
    decoder.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for weight in decoder.parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, 0.02, generator=generator)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return decoder


@torch.no_grad()
def plant_end(decoder: Decoder, mean_response: int) -> None:
    """Make the end-of-sequence token about 1 in ``mean_response`` at every position.

    Coordinate 0 of the residual stream becomes a constant that no layer changes; the end token's
    row of the head reads it.
    """
    embedding, head = decoder.embedding.weight, decoder.lm_head_weight
    embedding[:, 0] = 1.0
    for layer in decoder.layers:
        layer.o.weight[0] = 0.0
        layer.down.weight[0] = 0.0
    if head is not embedding:
        head[:, 0] = 1.0
    head[EOS_ID] = 0.0
    generator = torch.Generator(head.device).manual_seed(1)
    tokens = torch.randint(1000, 2000, (512,), device=head.device, generator=generator)
    none = torch.zeros(1, dtype=torch.int64)
    one = Segments(none, torch.tensor([512]), none, none)
    positions = torch.arange(512, device=head.device)
    attention = decoder.operators.packed_attention(one, head.device)
    h_TD = decoder(tokens, positions, attention).float()
    log_total = torch.logsumexp(h_TD @ head.float().T, -1)
    wanted = (log_total - math.log(mean_response)).mean()
    head[EOS_ID, 0] = wanted / h_TD[:, 0].mean()
