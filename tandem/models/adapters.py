# SPDX-License-Identifier: Apache-2.0
"""Adapters of our decoder as PEFT's files have them: names, initial values, reading, writing.

A trained tensor of a fused map is cut by rows into PEFT's tensors: ``adapter_tensors`` is the one
list for reading, writing and initial values, as ``file_tensors`` is for the base. The
written folder is what peft and vLLM load. A file of ours beside PEFT's two names the base model
with a hash, so that no run continues on another base.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.config.derived.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Adapters,
    base_of,
    read_adapters,
)
from tandem.config.derived.vision import TEXT_MODULES, VISION_FAMILIES
from tandem.errors import UserError
from tandem.models.adapted import AdapterConfig
from tandem.models.decoder import DecoderConfig, parameter_shapes
from tandem.models.families import decoder_config
from tandem.models.file_tensors import FileTensor, file_tensors, name_in_family
from tandem.models.weights import (
    convert_folder,
    copy_companions,
    read_config,
    read_slices,
    slices_by_name,
    weight_files,
    write_tensors,
)
from tandem.types import HeldSlice

BASE_FILE = "tandem_base.json"
"""The file that names the base model of an adapter in a checkpoint."""
_PREFIX = "base_model.model."
_KINDS = ("F32", "BF16", "F16", "F64")
"""The types of tensors that peft saves, by the names of safetensors."""
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""The number of pieces of a file that its hash reads, and their size."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model of an adapter.

    Attributes:
        path: its folder.
        digest: ``base_digest`` of the folder.
    """

    path: str
    digest: str


def with_adapters(config: DecoderConfig, adapters: Adapters) -> DecoderConfig:
    """Return the configuration of a decoder with adapters.

    Raises:
        UserError: no module of the decoder is adapted.
    """
    chosen = set(adapters.modules(config.num_layers, sees=config.vision is not None))
    maps: dict[str, list[int]] = {}
    for name, parts in _parts(config).items():
        for index, part in enumerate(parts):
            if _module(part.name, config) in chosen:
                maps.setdefault(name, []).append(index)
    listed = tuple((name, tuple(indices)) for name, indices in maps.items())
    return replace(
        config,
        adapters=AdapterConfig(adapters.rank, adapters.alpha, adapters.has_root_scale, maps=listed),
    )


def adapter_tensors(config: DecoderConfig) -> Iterator[FileTensor]:
    """Yield the tensors of PEFT's file in the decoder's order."""
    if config.adapters is None:
        return
    rank, parts = config.adapters.rank, _parts(config)
    for name, indices in config.adapters.maps:
        first_b = 0
        for place, index in enumerate(indices):
            part = parts[name][index]
            module = f"{_PREFIX}{_module(part.name, config)}"
            yield FileTensor(f"{module}.lora_A.weight", f"{name}.lora_a", place * rank, rank)
            yield FileTensor(f"{module}.lora_B.weight", f"{name}.lora_b", first_b, part.rows)
            first_b += part.rows


def draw_adapters(config: DecoderConfig, slices: Iterable[HeldSlice], *, seed: int) -> None:
    """Fill slices of adapters with PEFT's initial values: A uniform within 1/sqrt(D), B zero.

    The values are drawn in fp32 on the CPU and do not depend on the slices.
    """
    wanted, shapes = slices_by_name(slices), parameter_shapes(config)
    generator = torch.Generator().manual_seed(seed)
    for tensor in adapter_tensors(config):
        num_columns = shapes[tensor.parameter][1]
        values = torch.zeros(tensor.rows, num_columns, dtype=torch.float32, device="cpu")
        if tensor.parameter.endswith(".lora_a"):
            bound = 1 / math.sqrt(num_columns)
            values.uniform_(-bound, bound, generator=generator)
        read_slices(values, tensor, slices=wanted[tensor.parameter])


def check_adapter(config: DecoderConfig, folder: Path, *, key: str) -> None:
    """Compare names and shapes of an adapter's tensors with the decoder's; read no values.

    Raises:
        UserError: a tensor is missing or unexpected, or has another shape or type.
    """
    shapes = parameter_shapes(config)
    expected = {x.name: [x.rows, shapes[x.parameter][1]] for x in adapter_tensors(config)}
    with _opened(folder, key=key) as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        found = {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
    for name, shape in expected.items():
        if name not in found:
            raise _other_base(folder, f"tensor {name!r} is missing", key=key)
        own_shape, kind = found[name]
        if own_shape != shape:
            rule = f"tensor {name!r} has shape {own_shape}, not {shape}"
            raise _other_base(folder, rule, key=key)
        if kind not in _KINDS:
            rule = f"tensor {name!r} is of type {kind}, not one of {', '.join(_KINDS)}"
            raise _other_base(folder, rule, key=key)
    for name in found:
        if name not in expected:
            raise _other_base(folder, f"tensor {name!r} is unexpected", key=key)


def load_adapter(
    config: DecoderConfig, folder: Path, *, slices: Iterable[HeldSlice], key: str
) -> None:
    """Read slices of adapters from a folder of PEFT's form.

    Raises:
        UserError: see ``check_adapter``.
    """
    check_adapter(config, folder, key=key)
    wanted = slices_by_name(slices)
    with _opened(folder, key=key) as tensors:
        for tensor in adapter_tensors(config):
            values = tensors.get_slice(tensor.name)
            read_slices(values, tensor, slices=wanted[tensor.parameter])


def save_adapter(
    config: DecoderConfig, folder: Path, *, adapters: Mapping[str, Tensor], base: Path
) -> None:
    """Write the adapters, whole tensors by parameter, and their base into an existing folder.

    Raises:
        OSError: the disk is full or not writable.
    """
    assert config.adapters is not None, "a decoder without adapters has nothing to write here"
    tensors = {
        x.name: adapters[x.parameter].detach()[x.start : x.start + x.rows].cpu().clone()
        for x in adapter_tensors(config)
    }
    write_tensors(tensors, folder / ADAPTER_WEIGHTS)
    describe_adapter(config, folder, base=base)


def describe_adapter(config: DecoderConfig, folder: Path, *, base: Path) -> None:
    """Write the description of adapters, the file of their base, and the tokenizer's files."""
    _write_json(_description(config, base), folder / ADAPTER_CONFIG)
    _write_json(asdict(BaseModel(str(base.resolve()), base_digest(base))), folder / BASE_FILE)
    copy_companions(base, folder)


def merge_adapter(
    source: Path, folder: Path, *, base: Path | None = None, dtype: str | None = None
) -> None:
    """Write the base model of a checkpoint with the adapters added to its weights.

    The sum W + scale B A is computed in fp32 as peft's ``merge_and_unload`` does, and rounded once.

    Args:
        folder: the folder to write, created if it does not exist.
        base: the folder of the base model if it has moved.
        dtype: torch's name of a precision, such as ``bfloat16``; None keeps that of the base.

    Raises:
        UserError: the base is missing or has other weights, or the checkpoint is incomplete.
        OSError: the disk is full or not writable.
    """
    adapters = read_adapters(source, key="checkpoint", section="actor_rollout_ref.model")
    base = Path(read_base(source, key="checkpoint").path) if base is None else base
    if not (base / "config.json").is_file():
        raise UserError(
            "--base",
            str(base),
            rule="the base model of these adapters is not there",
            remedy="Name the folder that it is in now by --base FOLDER.",
        )
    require_base(source, base, key="--base", value=base)
    with _opened(source, key="checkpoint") as tensors:
        factors = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118

    config = decoder_config(read_config(base))
    assert config is not None, "only models of our decoder have adapters"

    def merged(name: str, weight: Tensor) -> Tensor:
        module = f"{_PREFIX}{_module(name_in_family(name, config), config)}"
        a, b = (factors.get(f"{module}.lora_{factor}.weight") for factor in "AB")
        if a is None or b is None:
            return weight
        return weight.float() + (b.float() @ a.float()) * adapters.scale

    convert_folder(base, folder, dtype=dtype, change=merged)


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a checkpoint of a model has adapters and no base."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_base(folder: Path, *, key: str) -> BaseModel:
    """Return the base model of a checkpoint. Raise UserError if it cannot be read."""
    try:
        return BaseModel(**json.loads((folder / BASE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            key,
            str(folder),
            rule=f"{BASE_FILE} cannot be read ({error})",
            remedy="Use a complete checkpoint.",
        ) from error


def require_base(folder: Path, base: Path, *, key: str, value: Path) -> None:
    """Raise UserError unless ``base`` has the weights that a checkpoint was trained on.

    Args:
        key, value: what the user has to change, for the message.
    """
    trained_on = read_base(folder, key=key)
    if trained_on.digest != base_digest(base):
        raise UserError(
            key,
            str(value),
            rule=f"the adapters of {folder} were trained on other weights than those in {base}",
            remedy=f"Use {trained_on.path} as it was, or start again.",
        )


def require_own_base(folder: Path, base: Path, *, key: str) -> None:
    """Raise UserError if an adapter to start from was trained on other weights than ``base`` has.

    A checkpoint has a hash of its base. PEFT's description has a path or a name; the weights are
    compared if it is the path of a folder on this host, and if those of ``base`` are here.
    """
    if not _has_weights(base):
        return
    if (folder / BASE_FILE).is_file():
        trained_on = read_base(folder, key=key)
        path, digest = trained_on.path, trained_on.digest
        remedy = f"Use {path}, or an adapter of this model."
    else:
        path = base_of(folder)
        if not path or not _has_weights(Path(path)):
            return
        try:
            digest = base_digest(Path(path))
        except OSError:  # files of another user cannot be compared
            return
        remedy = "Use that model, or remove base_model_name_or_path in a copy of the adapter."
    if digest != base_digest(base):
        rule = f"the adapter was trained on {path}, which has other weights than {base}"
        raise UserError(key, str(folder), rule=rule, remedy=remedy)


def base_digest(folder: Path) -> str:
    """Return a hash of a base model: of its files of weights, their sizes and samples of them.

    It reads at most 1 MiB of each file. A folder without weights (random ones) is hashed by its
    config.json.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    try:
        files = weight_files(folder)
    except UserError:
        files = []
    for file in files:
        for part in _samples_of(file):
            digest.update(part)
    return digest.hexdigest()


def file_digest(file: Path) -> str:
    """Return a hash of a file's name, its size and samples of it; at most 1 MiB is read."""
    digest = hashlib.sha256()
    for part in _samples_of(file):
        digest.update(part)
    return digest.hexdigest()


def _samples_of(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with file.open("rb") as content:
        for index in range(_SAMPLES):
            content.seek(index * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            yield content.read(_SAMPLE_BYTES)


def _has_weights(folder: Path) -> bool:
    """Return whether a model's files are in a folder, and not its configuration alone."""
    try:
        return (folder / "config.json").is_file() and bool(weight_files(folder))
    except (UserError, OSError):  # a folder of another user cannot be read
        return False


def _parts(config: DecoderConfig) -> dict[str, list[FileTensor]]:
    """Return the parts of each linear map of the layers, by the name of the map."""
    parts: dict[str, list[FileTensor]] = {}
    for tensor in file_tensors(config):
        name, _, kind = tensor.parameter.rpartition(".")
        if kind == "weight" and name.startswith("layers.") and not name.endswith("norm"):
            parts.setdefault(name, []).append(tensor)
    return parts


def _module(name: str, config: DecoderConfig) -> str:
    """Return transformers' name of the module whose weight has a name in files of its family."""
    module = name.removesuffix(".weight")
    if config.vision is None:
        return module
    prefix = VISION_FAMILIES[config.vision.family].text_prefix
    return TEXT_MODULES + module.removeprefix(prefix)


def _description(config: DecoderConfig, base: Path) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json."""
    adapters = config.adapters
    assert adapters is not None, "only adapters are described"
    modules = [
        tensor.name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        for tensor in adapter_tensors(config)
        if tensor.parameter.endswith(".lora_a")
    ]
    suffixes = sorted({name.rpartition(".")[2] for name in modules})
    every = [part.name for parts in _parts(config).values() for part in parts]
    of_suffixes = [name for name in every if name.split(".")[-2] in suffixes]
    # Maps of a tower may end like those of the layers, and PEFT would adapt them too.
    is_short = len(of_suffixes) == len(modules) and config.vision is None
    alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": adapters.rank,
        "lora_alpha": alpha,
        "use_rslora": adapters.has_root_scale,
        "target_modules": suffixes if is_short else modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _other_base(folder: Path, rule: str, *, key: str) -> UserError:
    return UserError(
        key,
        str(folder),
        rule=f"{ADAPTER_WEIGHTS}: {rule}",
        remedy="Use an adapter of this model, with the modules that its own description names.",
    )


def _opened(folder: Path, *, key: str) -> Any:
    """Open the file of an adapter's tensors."""
    try:
        return safe_open(folder / ADAPTER_WEIGHTS, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            key,
            str(folder),
            rule=f"{ADAPTER_WEIGHTS} cannot be read ({error})",
            remedy="Use a complete adapter folder.",
        ) from error


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
