# SPDX-License-Identifier: Apache-2.0
"""Models that see: the sizes of their vision tower, and the sizes of the pictures they read.

A family is a line of ``VISION_FAMILIES``. Sizes come from ``vision_config`` of config.json, limits
and normalisation from preprocessor_config.json. The file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem.config.derived.model_values import MOST_PARTS, wrong_value
from tandem.config.parse.json_content import read_object
from tandem.errors import UserError

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
_WIDE = ("hidden_size", "intermediate_size", "out_hidden_size", "num_position_embeddings")
_MOST_NUMBERS = 10**7
"""The bound of these sizes of a tower. The bound of the others is ``MOST_PARTS``."""
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

Rgb = tuple[float, float, float]


TEXT_MODULES = "model.language_model."
"""What the names of modules of the text decoder begin with in transformers' models that see."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The properties that a family of models that see fixes in code.

    Attributes:
        text: the family of its decoder.
        text_prefix, tower_prefix: the prefixes of the names of tensors in its files.
        interleaves: whether time, row and column alternate among the rotary frequencies, instead of
            one block each.
        sections: the number of rotary frequencies of each axis, if config.json names none.
        normalisation: mean and standard deviation of the colours, if no file names them.
        defaults: the values of transformers' class for keys that vision_config lacks.
    """

    text: str
    text_prefix: str
    tower_prefix: str
    interleaves: bool
    sections: tuple[int, int, int]
    normalisation: tuple[Rgb, Rgb]
    defaults: Mapping[str, Any]


_SHARED: Mapping[str, Any] = {
    "num_heads": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_5_vl": VisionFamily(
        text="qwen2",
        text_prefix="model.",
        tower_prefix="visual.",
        interleaves=False,
        sections=(16, 24, 24),
        normalisation=_CLIP,
        defaults={
            **_SHARED,
            "hidden_size": 3584,
            "intermediate_size": 3420,
            "depth": 32,
            "patch_size": 14,
            "out_hidden_size": 3584,
            "window_size": 112,
            "fullatt_block_indexes": (7, 15, 23, 31),
            "hidden_act": "silu",
        },
    ),
    "qwen3_vl": VisionFamily(
        text="qwen3",
        text_prefix="model.language_model.",
        tower_prefix="model.visual.",
        interleaves=True,
        sections=(24, 20, 20),
        normalisation=_HALF,
        defaults={
            **_SHARED,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "depth": 27,
            "patch_size": 16,
            "out_hidden_size": 3584,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": (8, 16, 24),
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
}
"""The families of models that see, by ``model_type`` in config.json."""

MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""The bounds of the number of pixels of a picture, if no file names them (transformers')."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The architecture of a vision tower.

    Attributes:
        hidden, inner: the width of its blocks, and that of their feed-forward.
        depth: the number of blocks.
        patch: the side of a patch in pixels.
        out: the width of the decoder.
        merge: the number of patches on a side of an image token.
        temporal: the number of frames of a patch; a picture is repeated.
        window: the number of image tokens on a side of an attention window; 0 for none.
        full_blocks: the blocks that attend to whole pictures all the same.
        deepstack: the blocks whose outputs are added behind the first layers of the decoder.
        position_side: the side of the learned square grid of positions; 0 for none.
        mean, std: the normalisation of the colours, which are 0 to 1 before it.
        family: the ``model_type`` of config.json.
        is_frozen: whether training leaves it as it is.
    """

    hidden: int
    inner: int
    depth: int
    num_heads: int
    patch: int
    out: int
    merge: int
    temporal: int
    channels: int
    window: int
    full_blocks: tuple[int, ...]
    deepstack: tuple[int, ...]
    position_side: int
    mean: Rgb
    std: Rgb
    family: str
    is_frozen: bool = False

    @property
    def token_side(self) -> int:
        """The side of an image token in pixels."""
        return self.patch * self.merge

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the matrices; the rest is below a hundredth."""
        wide = self.hidden * self.merge**2
        inner = (3 if self.window else 2) * self.inner
        mergers = (1 + len(self.deepstack)) * wide * (wide + self.out)
        patches = self.channels * self.temporal * self.patch**2 + self.position_side**2
        return self.hidden * (self.depth * (4 * self.hidden + inner) + patches) + mergers


def seeing_family(hf_config: Mapping[str, Any]) -> VisionFamily | None:
    """Return the family of a model that sees; None if the model does not see."""
    return VISION_FAMILIES.get(str(hf_config.get("model_type")))


def text_part(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the decoder of a model: of a model that sees, those of its text part.

    They are at the top level of config.json, or in ``text_config``.
    """
    family = seeing_family(hf_config)
    if family is None:
        return hf_config
    nested: Mapping[str, Any] = hf_config.get("text_config") or {}
    plain = {key: value for key, value in hf_config.items() if key != "text_config"}
    tied = hf_config.get("tie_word_embeddings", nested.get("tie_word_embeddings", False))
    kept = {"model_type": hf_config["model_type"], "tie_word_embeddings": tied}
    return {**plain, **nested, **kept}


def vision_config(hf_config: Mapping[str, Any]) -> VisionConfig | None:
    """Return the tower of a model; None if the model does not see.

    Args:
        hf_config: the content of config.json.

    Raises:
        UserError: vision_config of config.json is not of a tower that tandem computes.
    """
    family = seeing_family(hf_config)
    if family is None:
        return None
    own: Mapping[str, Any] = hf_config.get("vision_config") or {}
    if "in_chans" in own:  # the name of the key on the hub
        own = {**own, "in_channels": own["in_chans"]}
    values = {**family.defaults, **{key: own[key] for key in family.defaults if key in own}}
    _require_sizes(values)
    mean, std = family.normalisation
    side = values.get("num_position_embeddings", 0)
    window = values.get("window_size", 0)
    return VisionConfig(
        hidden=values["hidden_size"],
        inner=values["intermediate_size"],
        depth=values["depth"],
        num_heads=values["num_heads"],
        patch=values["patch_size"],
        out=values["out_hidden_size"],
        merge=values["spatial_merge_size"],
        temporal=values["temporal_patch_size"],
        channels=values["in_channels"],
        window=window // values["spatial_merge_size"] // values["patch_size"],
        full_blocks=tuple(values.get("fullatt_block_indexes", ())),
        deepstack=tuple(values.get("deepstack_visual_indexes", ())),
        position_side=round(side**0.5),
        mean=mean,
        std=std,
        family=hf_config["model_type"],
    )


def read_normalisation(folder: Path) -> tuple[Rgb, Rgb] | None:
    """Return mean and standard deviation of the colours; None if the folder names none.

    Raises:
        UserError: they are not three numbers each.
    """
    content = read_preprocessor(folder)
    if "image_mean" not in content or "image_std" not in content:
        return None
    mean, std = _rgb(content, "image_mean"), _rgb(content, "image_std")
    if 0 in std:
        raise _bad_colours("image_std", std)
    return mean, std


def read_preprocessor(folder: Path) -> Mapping[str, Any]:
    """Return the settings for pictures of a model's folder; {} if there are none.

    They are ``preprocessor_config.json``, or the part ``image_processor`` of
    ``processor_config.json``, where transformers 5 saves them.

    Raises:
        UserError: the file is not a mapping in JSON.
    """
    if (folder / PREPROCESSOR_FILE).is_file():
        return _read_mapping(folder / PREPROCESSOR_FILE)
    if not (folder / PROCESSOR_FILE).is_file():
        return {}
    part = _read_mapping(folder / PROCESSOR_FILE).get("image_processor")
    return cast(dict[str, Any], part) if isinstance(part, dict) else {}


def _read_mapping(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError) as error:
        raise UserError(
            str(path),
            rule="it cannot be read as a mapping in JSON",
            remedy=f"Use the {path.name} that belongs to the weights.",
        ) from error


def read_pixel_bounds(folder: Path) -> tuple[int, int]:
    """Return the fewest and the most pixels of a picture after resizing.

    Old files name them ``min_pixels`` and ``max_pixels``, newer ones the edges of ``size``.
    """
    content = read_preprocessor(folder)
    size: Any = content.get("size")
    edges = cast(dict[str, Any], size) if isinstance(size, dict) else {}
    found = (
        content.get("min_pixels") or edges.get("shortest_edge") or MIN_PIXELS,
        content.get("max_pixels") or edges.get("longest_edge") or MAX_PIXELS,
    )
    if all(isinstance(x, int) for x in found) and 0 < found[0] <= found[1]:
        return found
    raise UserError(
        f"{PREPROCESSOR_FILE}: min_pixels, max_pixels",
        list(found),
        rule="must be positive integers, the second not below the first",
        remedy=f"Use the {PREPROCESSOR_FILE} that belongs to the weights.",
    )


def _rgb(content: Mapping[str, Any], key: str) -> Rgb:
    match content[key]:
        case [int() | float() as red, int() | float() as green, int() | float() as blue]:
            return float(red), float(green), float(blue)
        case other:
            raise _bad_colours(key, other)


def _bad_colours(key: str, value: Any) -> UserError:
    return UserError(
        f"{PREPROCESSOR_FILE}: {key}",
        value,
        rule="must be three numbers, and image_std without a 0",
        remedy=f"Use the {PREPROCESSOR_FILE} that belongs to the weights.",
    )


def _require_sizes(values: Mapping[str, Any]) -> None:
    """Raise UserError unless the tower's sizes are numbers that fit one another."""
    lists = ("fullatt_block_indexes", "deepstack_visual_indexes")
    for key, value in values.items():
        if key == "hidden_act":
            if value in _ACTIVATIONS:
                continue
            rule = f"must be one of {', '.join(_ACTIVATIONS)}"
        elif key in lists:
            if _are_blocks(value, values["depth"]):
                continue
            rule = "must be indices of blocks, below depth"
        else:
            most = _MOST_NUMBERS if key in _WIDE else MOST_PARTS
            if isinstance(value, int) and 0 < value <= most:
                continue
            rule = f"must be a positive integer, at most {most}"
        raise _error(key, value, rule=rule)
    if values["hidden_size"] % (4 * values["num_heads"]):
        rule = f"must be a multiple of four times num_heads ({values['num_heads']})"
        raise _error("hidden_size", values["hidden_size"], rule=rule)
    if values["in_channels"] != 3:
        raise _error("in_channels", values["in_channels"], rule="must be 3 (red, green, blue)")


def _are_blocks(value: Any, depth: int) -> bool:
    every = cast(list[Any], value) if isinstance(value, list | tuple) else [None]
    return all(isinstance(x, int) and 0 <= x < depth for x in every)


def _error(key: str, value: Any, *, rule: str) -> UserError:
    return wrong_value(f"vision_config.{key}", value, rule=rule)
