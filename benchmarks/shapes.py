# SPDX-License-Identifier: Apache-2.0
"""The models and workloads of the accelerator benchmarks: random weights of published shapes.

No weights are downloaded: speed does not depend on their values. The one property that matters,
how long responses are, is planted: a constant direction of the residual stream raises the
end-of-sequence logit to the wanted rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tandem.config.derived.adapters import ALL_LINEAR, Adapters
from tandem.models.adapters import with_adapters
from tandem.models.decoder import Decoder, DecoderConfig
from tandem.models.experts import Experts
from tandem.models.families import decoder_config
from tandem.models.operators import Operators
from tandem.types import Segments

PAD_ID, EOS_ID = 256, 257
PEAK_FLOPS = 989e12
"""Of one H100 or H200, dense bf16, as published."""
ADAM_BYTES_PER_PARAMETER = 30
"""fp32 weight, gradient and moments, and the bf16 copy of the weight: read or written once each."""


TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""The vision tower of all sizes of Qwen2.5-VL."""
PIXELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 3136,
    "max_pixels": 12845056,
}
VISION_IDS = {
    "<|vision_start|>": 258,
    "<|image_pad|>": 259,
    "<|vision_end|>": 260,
}
_VISION_KEYS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
TOKEN_SIDE = 28
"""The side of a token of Qwen2.5-VL in pixels: two by two patches."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2.5 model, of a Qwen3 or Qwen1.5 model with experts, or of a Qwen2.5-VL model.

    ``inner`` is the width of the feed-forward, or of one expert. ``chosen`` of ``experts`` compute
    a token, beside a shared expert of width ``shared``, which makes the model one of Qwen1.5.
    ``sees``: the model has a vision tower.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    sees: bool = False

    def decoder_config(self) -> DecoderConfig:
        """The decoder of this shape."""
        config = decoder_config(self.hf_config("bfloat16"))
        assert config is not None
        return config

    def hf_config(self, dtype: str) -> dict[str, object]:
        """Return the ``config.json`` of a Hugging Face folder of this shape."""
        config: dict[str, object] = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 65536,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "use_sliding_window": False,
            "initializer_range": 0.02,
            "bos_token_id": PAD_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": dtype,
        }
        if self.experts:
            config |= {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "head_dim": self.head_dim,
                "moe_intermediate_size": self.inner,
                "num_experts": self.experts,
                "num_experts_per_tok": self.chosen,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self.shared:
            config |= {
                "architectures": ["Qwen2MoeForCausalLM"],
                "model_type": "qwen2_moe",
                "shared_expert_intermediate_size": self.shared,
                "norm_topk_prob": False,
            }
        return self._with_tower(config) if self.sees else config

    def _with_tower(self, text: dict[str, object]) -> dict[str, object]:
        """Return the ``config.json`` of Qwen2.5-VL with this text decoder."""
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
        return {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "text_config": {**text, "rope_parameters": rope},
            "vision_config": {**TOWER, "out_hidden_size": self.hidden},
            "tie_word_embeddings": self.tied,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "dtype": text["torch_dtype"],
            **dict(zip(_VISION_KEYS, VISION_IDS.values(), strict=True)),
        }

    def layer_parameters_of(self, experts: float) -> float:
        """Parameters of the layers' matrices that so many experts of each layer take part in."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        own = self.heads * self.head_dim
        feed_forward = 3 * self.inner * experts + self.experts
        feed_forward += 3 * self.shared + 1 if self.shared else 0
        return self.layers * self.hidden * (qkv + own + feed_forward)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the layers' matrices."""
        return round(self.layer_parameters_of(self.experts or 1))

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of the layers' matrices that compute one token."""
        return round(self.layer_parameters_of(self.chosen or 1))

    def experts_read(self, rows: float) -> float:
        """Return how many experts of a layer so many rows are expected to choose."""
        if not self.experts:
            return 1
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    @property
    def head_parameters(self) -> int:
        """Parameters of the language-model head."""
        return self.vocabulary * self.hidden

    def kv_bytes_per_token(self, bytes_per_number: int = 2) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_number

    def train_flops(
        self, num_tokens: int, num_loss_tokens: int, *, key_pairs: int, frozen: bool = False
    ) -> float:
        """Forward and backward: 6 per matrix parameter and token, 12 x width per attended pair.

        A weight that is frozen under adapters has no gradient: 4 per parameter.

        ``num_tokens`` are those a padded, unshared computation would need without its padding;
        the head counts for tokens that carry loss only.
        """
        products = (
            self.active_layer_parameters * num_tokens + self.head_parameters * num_loss_tokens
        )
        matrices = (4 if frozen else 6) * products
        return matrices + 12 * self.layers * self.heads * self.head_dim * key_pairs


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, 64, 151936, True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, False),
    "qwen2.5-14b": Shape(5120, 13824, 48, 40, 8, 128, 152064, False),
    "qwen2.5-32b": Shape(5120, 27648, 64, 40, 8, 128, 152064, False),
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 128, 151936, False, experts=128, chosen=8),
    "qwen1.5-moe": Shape(
        2048, 1408, 24, 16, 16, 128, 151936, False, experts=60, chosen=4, shared=5632
    ),
    "olmoe-7b": Shape(2048, 1024, 16, 16, 16, 128, 50304, False, experts=64, chosen=8),
    "qwen2.5-vl-3b": Shape(2048, 11008, 36, 16, 2, 128, 151936, True, sees=True),
    "qwen2.5-vl-7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, False, sees=True),
}


def tower_flops(patches: int, *, of_pictures: int) -> float:
    """Return the operations of one forward pass of ``TOWER`` over pictures of equal size.

    Args:
        patches: the number of patches of all pictures together.
        of_pictures: the number of pictures.
    """
    width, layers = TOWER["hidden_size"], TOWER["depth"]
    window = (TOWER["window_size"] // TOWER["patch_size"]) ** 2
    num_full = len(TOWER["fullatt_block_indexes"])
    matrices = layers * width * (4 * width + 3 * TOWER["intermediate_size"])
    keys = num_full * patches / of_pictures + (layers - num_full) * window
    return patches * (2 * matrices + 4 * width * keys)


@dataclass(frozen=True)
class Workload:
    """``prompt`` counts the tokens of the picture, if there is one, and two marks around it.

    ``mean_response``: of geometric lengths up to ``response``; None for all of that length.
    ``picture``: its sides in pixels, width first.
    """

    prompts: int
    samples: int
    prompt: int
    response: int
    mean_response: int | None = None
    picture: tuple[int, int] | None = None

    @property
    def picture_tokens(self) -> int:
        """Tokens of a prompt's picture, as Qwen2.5-VL counts them."""
        width, height = self.picture or (0, 0)
        return round(width / TOKEN_SIDE) * round(height / TOKEN_SIDE)

    @property
    def words(self) -> int:
        """Tokens of a prompt that are of text."""
        return self.prompt - (self.picture_tokens + 2 if self.picture else 0)

    def tower_pass_flops(self) -> float:
        """Operations of a forward pass of the tower over the pictures of all prompts."""
        patches = 4 * self.picture_tokens * self.prompts
        return tower_flops(patches, of_pictures=self.prompts) if self.picture else 0.0

    @property
    def sequences(self) -> int:
        """The number of sequences of a step."""
        return self.prompts * self.samples

    def going_on(self) -> list[float]:
        """How many sequences are expected to have a token at each position of the response."""
        goes_on = 1.0 if self.mean_response is None else 1 - 1 / self.mean_response
        return [self.sequences * goes_on**position for position in range(self.response)]


WORKLOADS = {
    "S": Workload(64, 8, 128, 512),
    "S8": Workload(1, 8, 128, 512),
    "A": Workload(64, 16, 256, 512),
    "B": Workload(32, 16, 512, 2048),
    "C": Workload(64, 8, 256, 2048),
    "T": Workload(64, 8, 128, 2048, mean_response=512),
    "L": Workload(64, 16, 128, 4096, mean_response=512),
    "P": Workload(8, 16, 8192, 512),
    "R8": Workload(32, 4, 512, 8192),
    "R32": Workload(16, 2, 512, 32768),
    "V": Workload(64, 8, 128 + 999 + 2, 512, picture=(1024, 768)),
    "G": Workload(64, 5, 128 + 391 + 2, 512, picture=(640, 480)),
}


def decode_steps(shape: Shape, workload: Workload) -> list[tuple[float, float]]:
    """Return, by position, operations of matrix products and bytes of weights and cache."""
    active, head = shape.active_layer_parameters, shape.head_parameters
    kv_bytes = shape.kv_bytes_per_token()
    steps = []
    for position, rows in enumerate(workload.going_on()):
        read = shape.layer_parameters_of(shape.experts_read(rows)) + head
        cached = rows * (workload.prompt + position) * kv_bytes
        steps.append((2 * (active + head) * rows, 2 * read + cached))
    return steps


def generation_floor_s(
    shape: Shape, workload: Workload, *, flops: float, bandwidth: float
) -> float:
    """Prompts once, then every position at the slower of computing and reading."""
    prefill = 2 * shape.active_layer_parameters * workload.prompts * workload.prompt
    prefill += workload.tower_pass_flops()
    steps = decode_steps(shape, workload)
    return prefill / flops + sum(max(work / flops, moved / bandwidth) for work, moved in steps)


def update_flops(shape: Shape, workload: Workload, *, shared: bool, frozen: bool = False) -> float:
    """Forward and backward of a whole batch.

    Args:
        shared: every prompt is computed once, not once a sample. Pictures are counted once a
            prompt in either case.
        frozen: adapters are trained, whose own products are not counted. The tower is frozen too
            and computed forward only.
    """
    rows, prompt = workload.going_on(), workload.prompt
    num_prompts = workload.prompts if shared else workload.sequences
    pairs = sum(count * (prompt + position) for position, count in enumerate(rows))
    return (1 if frozen else 3) * workload.tower_pass_flops() + shape.train_flops(
        round(sum(rows) + num_prompts * prompt),
        round(sum(rows)),
        key_pairs=round(pairs + num_prompts * prompt**2 / 2),
        frozen=frozen,
    )


def update_floor_s(
    shape: Shape, workload: Workload, *, flops: float, bandwidth: float, frozen: bool = False
) -> float:
    """Forward and backward with shared prompts, then AdamW, which only moves bytes.

    ``frozen``: adapters are trained, whose bytes are not counted.
    """
    if frozen:
        return update_flops(shape, workload, shared=True, frozen=True) / flops
    parameters = shape.layer_parameters + shape.head_parameters * (1 if shape.tied else 2)
    computing = update_flops(shape, workload, shared=True) / flops
    return computing + ADAM_BYTES_PER_PARAMETER * parameters / bandwidth


@torch.no_grad()
def random_decoder(
    shape: Shape,
    *,
    device: str,
    dtype: torch.dtype,
    operators: Operators,
    seed: int = 0,
    adapter_rank: int = 0,
) -> Decoder:
    """Weights drawn on the device. ``adapter_rank``: that of adapters of all linear maps."""
    config = shape.decoder_config()
    if adapter_rank:
        config = with_adapters(config, adapters_of(adapter_rank))
    with torch.device("meta"):
        decoder = Decoder(config, operators)
    decoder.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for weight in decoder.parameters():
        if weight.dim() >= 2:
            weight.normal_(0.0, 0.02, generator=generator)
    for name, weight in decoder.named_parameters():
        if weight.dim() == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return decoder


def adapters_of(rank: int) -> Adapters:
    """Return adapters of all linear maps."""
    return Adapters(
        rank,
        alpha=rank,
        has_root_scale=False,
        targets=ALL_LINEAR,
        excludes=(),
        folder=None,
        section="actor_rollout_ref.model",
    )


@torch.no_grad()
def plant_balance(decoder: Decoder) -> None:
    """Make the routers send about as many tokens to each expert, as training with a loss of balance
    does.

    Without it, all tokens of a deep random model choose the same experts. The embeddings become
    large and what layers add becomes small, so that the states of a token remain its own. What a
    random router adds to all tokens alike is taken out of its rows layer by layer.
    """
    head = decoder.lm_head_weight
    decoder.embedding.weight.normal_()
    for name, weight in decoder.named_parameters():
        if name.endswith((".o.weight", ".down")):
            weight.mul_(1 / math.sqrt(2 * decoder.config.num_layers))
    generator = torch.Generator(head.device).manual_seed(2)
    tokens = torch.randint(0, len(head), (4096,), device=head.device, generator=generator)
    for experts in decoder.modules():
        if not isinstance(experts, Experts):
            continue
        mean_D = mean_input(experts, decoder, token_T=tokens)
        direction_D = mean_D / mean_D.norm()
        common_E1 = (experts.router.float() @ direction_D)[:, None]
        experts.router.sub_((common_E1 * direction_D).to(experts.router.dtype))


def mean_input(module: nn.Module, decoder: Decoder, *, token_T: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of what a module of the decoder reads, fp32 (D,)."""
    seen: list[torch.Tensor] = []
    with module.register_forward_pre_hook(lambda _, given: seen.append(given[0])):
        last_states(decoder, token_T)
    return seen[0].float().mean(0)


def last_states(decoder: Decoder, token_T: torch.Tensor) -> torch.Tensor:
    """Return the hidden states (T, D) of one sequence, fp32."""
    none = torch.zeros(1, dtype=torch.int64)
    one = Segments(none, torch.tensor([len(token_T)]), none, none)
    positions = torch.arange(len(token_T), device=token_T.device)
    attention = decoder.operators.packed_attention(one, token_T.device)
    return decoder(token_T, positions, attention).float()


@torch.no_grad()
def plant_end(decoder: Decoder, mean_response: int) -> None:
    """Make the end-of-sequence token about 1 in ``mean_response`` at every position.

    Coordinate 0 of the residual stream becomes a constant that no layer changes; the end token's
    row of the head reads it.
    """
    embedding, head = decoder.embedding.weight, decoder.lm_head_weight
    embedding[:, 0] = 1.0
    for name, weight in decoder.named_parameters():
        if name.endswith((".o.weight", ".down.weight")):
            weight[0] = 0.0
        elif name.endswith(".down"):  # of all experts
            weight[:, 0] = 0.0
    if head is not embedding:
        head[:, 0] = 1.0
    head[EOS_ID] = 0.0
    generator = torch.Generator(head.device).manual_seed(1)
    tokens = torch.randint(0, len(head), (512,), device=head.device, generator=generator)
    h_TD = last_states(decoder, tokens)
    log_total = torch.logsumexp(h_TD @ head.float().T, -1)
    wanted = (log_total - math.log(mean_response)).mean()
    head[EOS_ID, 0] = wanted / h_TD[:, 0].mean()
