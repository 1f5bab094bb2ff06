# SPDX-License-Identifier: Apache-2.0
"""The vision towers of Qwen2.5-VL and Qwen3-VL, which turn pictures into embeddings of tokens.

Parameters have the names of Hugging Face's files behind the prefix of the family. Pictures arrive
as bytes; patches are made on the device of the tower. Attention is within windows or whole
pictures. Norms, rotations, gates and attention are the operators of the decoder. There are no
videos.

Shapes: N patches, U = N / merge^2 image tokens, P numbers of a patch, D width of the tower, H
heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tandem.config.derived.vision import VisionConfig
from tandem.models.operators import TORCH, Angles, AttendWithin, Operators
from tandem.pictures import Picture

_THETA = 10000.0
_NORM_EPS = 1e-6

TOWER = "tower."
"""What the names of a decoder's parameters begin with that are of its tower."""

_MEMORY_BYTES = 1 << 30
"""The features that a frozen tower remembers; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Features:
    """The embeddings of the tokens of pictures.

    Attributes:
        embeddings: (U, width of the decoder), in place of the tokens' own.
        levels: what is added behind the first layers of the decoder, one (U, width) each.
    """

    embeddings: Tensor
    levels: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """The memory of all tensors."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.levels))


@dataclass(frozen=True, slots=True)
class TowerLayout:
    """The layout of pictures, which follows from their sizes alone.

    Attributes:
        order_U: the image tokens in the order of the attention windows.
        window_lengths, picture_lengths: the lengths of runs of patches that attend to one another.
        place_N2: the row and column of each patch in its picture, in the order of the patches.
        size_N2: the rows and columns of the picture of each patch.
    """

    order_U: np.ndarray
    window_lengths: np.ndarray
    picture_lengths: np.ndarray
    place_N2: np.ndarray
    size_N2: np.ndarray


def lay_out(sizes: Sequence[tuple[int, int]], config: VisionConfig) -> TowerLayout:
    """Return the layout of pictures of ``sizes``: rows and columns in tokens."""
    merge, first = config.merge, 0
    orders: list[np.ndarray] = []
    windows: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for rows, columns in sizes:
        token = np.arange(rows * columns)
        row, column = np.divmod(token, columns)
        inner_row, inner_column = np.divmod(np.arange(merge**2), merge)
        place = (row[:, None] * merge + inner_row, column[:, None] * merge + inner_column)
        places.append(np.stack([x.ravel() for x in place], axis=1))
        window = np.zeros_like(token)
        if config.window:
            across = -(-columns // config.window)
            window = row // config.window * across + column // config.window
        orders.append(first + np.argsort(window, kind="stable"))
        windows.append(np.bincount(window) * merge**2)
        first += rows * columns
    lengths = np.array([rows * columns * merge**2 for rows, columns in sizes])
    size_2 = np.array(sizes) * merge
    return TowerLayout(
        order_U=np.concatenate(orders),
        window_lengths=np.concatenate(windows),
        picture_lengths=lengths,
        place_N2=np.concatenate(places),
        size_N2=np.repeat(size_2, lengths, axis=0),
    )


class VisionTower(nn.Module):
    """A vision tower."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.temporal, config.patch, config.patch)
        bias = config.window == 0
        convolution = nn.Conv3d(config.channels, config.hidden, shape, shape, bias=bias)
        self.patch_embed = nn.ModuleDict({"proj": convolution})
        if config.position_side:
            self.pos_embed = nn.Embedding(config.position_side**2, config.hidden)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.merger = _Merger(config)
        if config.deepstack:
            mergers = (_Merger(config, norms_after=True) for _ in config.deepstack)
            self.deepstack_merger_list = nn.ModuleList(mergers)
        self._known: dict[int, Features] = {}
        if config.is_frozen:
            self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        return next(self.parameters()).dtype

    def forward(
        self,
        pictures: Sequence[Picture],
        *,
        operators: Operators = TORCH,
        recomputes: bool = False,
    ) -> Features:
        """Return the features of the tokens of at least one picture, one picture after another.

        A frozen tower looks at a picture once, and remembers what it saw. With ``recomputes``, the
        backward pass of another computes its blocks again, with the same results.
        """
        if not self.config.is_frozen:
            return self.look(pictures, operators=operators, recomputes=recomputes)
        unknown = [picture for picture in pictures if picture.first_id not in self._known]
        found = {p.first_id: self._known[p.first_id] for p in pictures if p not in unknown}
        if unknown:
            # Features outlive the context, so they must not be of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                found |= _by_picture(self.look(unknown, operators=operators), unknown)
            self._remember(found)
        features = [found[picture.first_id] for picture in pictures]
        levels = zip(*(one.levels for one in features), strict=True)
        embeddings = torch.cat([one.embeddings for one in features])
        return Features(embeddings, tuple(torch.cat(level) for level in levels))

    def _remember(self, found: dict[int, Features]) -> None:
        self._known |= found
        total = sum(features.num_bytes for features in self._known.values())
        while total > _MEMORY_BYTES:
            total -= self._known.pop(next(iter(self._known))).num_bytes

    def look(
        self,
        pictures: Sequence[Picture],
        *,
        operators: Operators = TORCH,
        recomputes: bool = False,
    ) -> Features:
        """Compute the features of pictures."""
        convolution = cast(nn.Conv3d, self.patch_embed["proj"])
        weight, bias = convolution.weight, convolution.bias
        patches_NP = torch.cat([self._patches(picture, weight.device) for picture in pictures])
        # The steps of the convolution are as large as its kernel: it is a linear map of patches.
        x_ND = F.linear(patches_NP.to(weight.dtype), weight.flatten(1), bias)
        sizes = [(picture.rows, picture.columns) for picture in pictures]
        return self._features(x_ND, sizes, operators=operators, recomputes=recomputes)

    def _patches(self, picture: Picture, device: torch.device) -> Tensor:
        """Return the normalised patches of a picture, fp32, in the order of its tokens."""
        config = self.config
        merge, patch = config.merge, config.patch
        values = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).to(device)
        mean, std = (torch.tensor(x, device=device) for x in (config.mean, config.std))
        pixels = (values.view(-1, 3) * (1 / 255) - mean) / std
        grid = pixels.view(picture.rows, merge, patch, picture.columns, merge, patch, 3)
        frame = grid.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 3)  # patches, colours, rows, columns
        return frame[:, :, None].expand(-1, -1, config.temporal, -1, -1).flatten(1)

    def _features(
        self,
        x_ND: Tensor,
        sizes: Sequence[tuple[int, int]],
        *,
        operators: Operators,
        recomputes: bool,
    ) -> Features:
        config, layout, device = self.config, lay_out(sizes, self.config), x_ND.device
        if config.position_side:
            x_ND = x_ND + self._positions(layout, device)
        unit = config.merge**2
        order_N = _upload((layout.order_U[:, None] * unit + np.arange(unit)).ravel(), device)
        x_ND, delta_ND = x_ND[order_N], None
        angles = self._angles(_upload(layout.place_N2, device)[order_N], x_ND.dtype)
        whole = operators.attention_within(layout.picture_lengths, device)
        windowed = whole
        if config.window:
            windowed = operators.attention_within(layout.window_lengths, device)
        levels: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            is_whole = index in config.full_blocks or not config.window
            compute = partial(
                block, attend=whole if is_whole else windowed, angles=angles, operators=operators
            )
            if recomputes:
                x_ND, delta_ND = _recomputed(compute, x_ND, delta_ND)
            else:
                x_ND, delta_ND = compute(x_ND, delta_ND)
            if index in config.deepstack:
                merger = self.deepstack_merger_list[config.deepstack.index(index)]
                levels.append(merger(x_ND, delta_ND, operators=operators))
        back_U = _upload(np.argsort(layout.order_U), device)
        embeddings_UD = self.merger(x_ND, delta_ND, operators=operators)
        return Features(embeddings_UD[back_U], tuple(level[back_U] for level in levels))

    def _angles(self, place_N2: Tensor, dtype: torch.dtype) -> Angles:
        """Return the cosines and signed sines (N, 1, E) of rows and columns."""
        half = self.config.hidden // self.config.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=place_N2.device) / half
        angles_N2 = place_N2[:, :, None].float() * (1.0 / _THETA**exponents)
        angles_N1H = angles_N2.flatten(1)[:, None]
        cos_N1H, sin_N1H = angles_N1H.cos(), angles_N1H.sin()
        wide = torch.promote_types(dtype, torch.float32)
        cos_N1E, sin_N1E = torch.cat((cos_N1H, cos_N1H), -1), torch.cat((-sin_N1H, sin_N1H), -1)
        return cos_N1E.to(wide), sin_N1E.to(wide)

    def _positions(self, layout: TowerLayout, device: torch.device) -> Tensor:
        """Return the learned grid at the sizes of the pictures: bilinear, with aligned corners."""
        side = self.config.position_side
        exact = layout.place_N2 * (side - 1) / np.maximum(layout.size_N2 - 1, 1)
        exact = exact.astype(np.float32)
        low = np.floor(exact).astype(np.int64)
        high, share = np.minimum(low + 1, side - 1), exact - low
        dtype = self.pos_embed.weight.dtype
        total = torch.zeros((), dtype=dtype, device=device)
        for rows, row_share in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, column_share in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                weight_N = (row_share * column_share).astype(np.float32)
                weight_N1 = _upload(weight_N, device)[:, None].to(dtype)
                total = total + self.pos_embed(_upload(rows * side + columns, device)) * weight_N1
        return total


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden, config.inner
        norm = partial(nn.RMSNorm if config.window else nn.LayerNorm, hidden, eps=_NORM_EPS)
        self.norm1, self.norm2, self.num_heads = norm(), norm(), config.num_heads
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(hidden, 3 * hidden), "proj": nn.Linear(hidden, hidden)}
        )
        self.is_windowed = config.window > 0
        names = ("gate_proj", "up_proj") if self.is_windowed else ("linear_fc1",)
        maps = {name: nn.Linear(hidden, inner) for name in names}
        last = "down_proj" if self.is_windowed else "linear_fc2"
        self.mlp = nn.ModuleDict({**maps, last: nn.Linear(inner, hidden)})

    def forward(
        self,
        x_ND: Tensor,
        delta_ND: Tensor | None,
        *,
        attend: AttendWithin,
        angles: Angles,
        operators: Operators,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream and what is to be added to it, from those of the block before."""
        h_ND, x_ND = _add_norm(self.norm1, x_ND, delta_ND=delta_ND, operators=operators)
        qkv_NME = self.attn["qkv"](h_ND).view(len(x_ND), 3 * self.num_heads, -1)
        turned, v_NHE = qkv_NME.split((2 * self.num_heads, self.num_heads), 1)
        turned = operators.rotate(turned, angles).to(turned.dtype)
        q_NHE, k_NHE = turned.chunk(2, 1)
        o_ND = self.attn["proj"](attend(q_NHE, k_NHE, v_NHE=v_NHE).flatten(1))
        h_ND, x_ND = _add_norm(self.norm2, x_ND, delta_ND=o_ND, operators=operators)
        if self.is_windowed:
            return x_ND, self._gated(h_ND, operators)
        inner = F.gelu(self.mlp["linear_fc1"](h_ND), approximate="tanh")
        return x_ND, self.mlp["linear_fc2"](inner)

    def _gated(self, h_ND: Tensor, operators: Operators) -> Tensor:
        maps = [cast(nn.Linear, self.mlp[name]) for name in ("gate_proj", "up_proj")]
        weight = torch.cat([linear.weight for linear in maps])
        bias = torch.cat([linear.bias for linear in maps])
        return self.mlp["down_proj"](operators.gate(F.linear(h_ND, weight, bias)))


class _Merger(nn.Module):
    """The map from merge^2 patches to an image token of the decoder."""

    def __init__(self, config: VisionConfig, *, norms_after: bool = False) -> None:
        super().__init__()
        self.wide = wide = config.hidden * config.merge**2
        width = wide if norms_after else config.hidden
        self.norms_after, self.is_windowed = norms_after, config.window > 0
        if self.is_windowed:
            self.ln_q = nn.RMSNorm(width, eps=_NORM_EPS)
            self.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, config.out))
        else:
            self.norm = nn.LayerNorm(width, eps=_NORM_EPS)
            self.linear_fc1 = nn.Linear(wide, wide)
            self.linear_fc2 = nn.Linear(wide, config.out)

    def forward(self, x_ND: Tensor, delta_ND: Tensor | None, *, operators: Operators) -> Tensor:
        if self.is_windowed:
            h_ND, _ = _add_norm(self.ln_q, x_ND, delta_ND=delta_ND, operators=operators)
            return self.mlp(h_ND.view(-1, self.wide))
        x_ND = x_ND if delta_ND is None else x_ND + delta_ND
        if self.norms_after:
            h_UD = self.norm(x_ND.view(-1, self.wide))
        else:
            h_UD = self.norm(x_ND).view(-1, self.wide)
        return self.linear_fc2(F.gelu(self.linear_fc1(h_UD)))


def _add_norm(
    norm: nn.Module, x_ND: Tensor, *, delta_ND: Tensor | None, operators: Operators
) -> tuple[Tensor, Tensor]:
    """Return the norm of the residual sum, and the sum."""
    if isinstance(norm, nn.RMSNorm):
        return operators.add_norm(x_ND, delta_ND, weight_D=norm.weight, eps=_NORM_EPS)
    x_ND = x_ND if delta_ND is None else x_ND + delta_ND
    return norm(x_ND), x_ND


def is_of_tower(name: str) -> bool:
    """Return whether a parameter of a decoder is of its vision tower."""
    return name.startswith(TOWER)


def smallest_picture(config: VisionConfig) -> Picture:
    """Return a black picture of one token, for a process that has none to look at."""
    side = config.token_side
    return Picture(0, 1, 1, side, bytes(3 * side**2))


def _recomputed(
    compute: Callable[..., tuple[Tensor, Tensor]], *streams: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Apply a block and keep only its inputs for the backward pass."""
    result = checkpoint(compute, *streams, use_reentrant=False, preserve_rng_state=False)
    return cast("tuple[Tensor, Tensor]", result)


def _by_picture(features: Features, pictures: Sequence[Picture]) -> dict[int, Features]:
    """Return the features of each picture, by its first id."""
    counts = [picture.num_tokens for picture in pictures]
    tensors = [tensor.split(counts) for tensor in (features.embeddings, *features.levels)]
    parts = zip(*tensors, strict=True)
    return {
        picture.first_id: Features(part[0], tuple(part[1:]))
        for picture, part in zip(pictures, parts, strict=True)
    }


def _upload(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
