# SPDX-License-Identifier: Apache-2.0
"""Reading and writing a decoder's weights as Hugging Face safetensors folders, tensor by tensor.

Reading and writing both follow the list ``file_tensors``: a round trip is exact. Reading can fill
any slices of the decoder's tensors; names and shapes are checked first. The caller makes a written
folder atomic.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tandem.config.derived.adapters import ADAPTER_CONFIG, base_of
from tandem.config.derived.model_types import require_types
from tandem.config.parse.json_content import read_object
from tandem.errors import UserError
from tandem.models.adapted import AdaptedLinear, is_adapter
from tandem.models.decoder import Decoder, DecoderConfig, draw_parameter, parameter_shapes
from tandem.models.experts import is_fixed, is_of_all_experts
from tandem.models.file_tensors import (
    FUSED_SUFFIX,
    FileTensor,
    file_tensors,
    is_ignored,
    is_kept,
    name_in_family,
)
from tandem.types import HeldSlice, SliceSpec

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
KEY = "actor_rollout_ref.model.path"
"""The usual configuration key of a folder, for messages."""

MAX_SHARD_BYTES = 5 * 10**9

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""The files of a model folder that training does not change."""

TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The names of weights in torch's own format, which only transformers' modelling code reads."""
_LFS_POINTER = b"version https://git-lfs"

_FLOATS = ("F64", "F32", "F16", "BF16")
"""The types of numbers that weights may have, by safetensors' names."""
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""The suffix of tensors in old files that config.json determines."""


def weight_files(folder: Path, *, key: str = KEY) -> list[Path]:
    """Return the safetensors files of a folder, from its index if it has one.

    Raises:
        UserError: there are no safetensors weights, the index cannot be read, or a shard is
            missing.
    """
    if (folder / INDEX_FILE).is_file():
        try:
            index = read_object(folder / INDEX_FILE)
        except ValueError as error:
            raise _error(folder, f"{INDEX_FILE} {error}", key=key) from error
        named = index.get("weight_map")
        names = set(map(str, named.values())) if isinstance(named, dict) else set[str]()
        if not names:
            raise _error(folder, f"{INDEX_FILE} has no weight_map from tensors to files", key=key)
    else:
        names = {WEIGHTS_FILE}
    files = [folder / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    torch_files = [name for name in TORCH_FILES if (folder / name).is_file()]
    if missing and torch_files:
        rule = f"the folder has no {missing[0]}, only weights in torch's format ({torch_files[0]})"
        raise _error(
            folder,
            rule,
            key=key,
            remedy='Convert them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('NEW_FOLDER')\", and copy the "
            "tokenizer files into NEW_FOLDER.",
        )
    if missing:
        raise _error(folder, f"the folder has no {missing[0]}", key=key)
    return files


def check_weights(config: DecoderConfig, folder: Path, *, key: str = KEY) -> None:
    """Compare names and shapes of a folder's tensors with the decoder's; read no weights.

    Raises:
        UserError: see ``load_weights``.
    """
    _checked_tensors(config, folder, files=weight_files(folder, key=key), key=key)


def allocate(
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    base_dtype: torch.dtype | None = None,
) -> None:
    """Allocate uninitialised weights for a decoder on the meta device.

    Weights that are elsewhere already are kept.

    Args:
        dtype: the precision of trained weights.
        base_dtype: the precision of the frozen weights of a decoder with adapters; None: ``dtype``.
    """
    # Not ``to_empty``, which imports sympy and takes half a second.
    for module in decoder.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.is_meta:
                continue
            own = dtype if weight.requires_grad else base_dtype or dtype
            own = weight.dtype if is_fixed(f".{name}") else own
            empty = torch.empty(weight.shape, dtype=own, device=device)
            kept = nn.Parameter(empty, requires_grad=weight.requires_grad)
            module.register_parameter(name, kept)


def file_views(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each file tensor and the view of its rows in our parameter."""
    parameters = dict(decoder.named_parameters())
    for source in file_tensors(decoder.config):
        yield source.name, _values(parameters, source)


def sums_with_adapters(decoder: Decoder) -> dict[str, Callable[[], Tensor]]:
    """Return, by name, the functions that add adapters to the file tensors of adapted maps.

    Each computes one tensor: see ``AdaptedLinear.sum_of``.
    """
    maps = {
        f"{name}.weight": part
        for name, part in decoder.named_modules()
        if isinstance(part, AdaptedLinear)
    }
    return {
        source.name: partial(
            maps[source.parameter].sum_of, slice(source.start, source.start + source.rows)
        )
        for source in file_tensors(decoder.config)
        if source.parameter in maps
    }


def load_weights(decoder: Decoder, folder: Path, *, key: str = KEY) -> None:
    """Copy a folder's weights into ``decoder``, cast to its dtype and moved to its device.

    Raises:
        UserError: a tensor is missing or unexpected, or has a different shape.
    """
    slices = [_whole(name, parameter) for name, parameter in decoder.named_parameters()]
    load_slices(decoder.config, folder, slices=slices, key=key)


def load_slices(
    config: DecoderConfig, folder: Path, *, slices: Iterable[HeldSlice], key: str = KEY
) -> None:
    """Read only ``slices`` of the decoder of ``config`` from a folder.

    Raises:
        UserError: see ``load_weights``.
    """
    wanted = slices_by_name(slices)
    files = weight_files(folder, key=key)
    sources = _checked_tensors(config, folder, files=files, key=key)
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = {name_in_family(name, config): name for name in tensors.keys()}  # noqa: SIM118
            for source in (sources[name] for name in sources.keys() & names.keys()):
                values = tensors.get_slice(names[source.name])
                read_slices(values, source, slices=wanted[source.parameter])


def draw_slices(
    config: DecoderConfig,
    slices: Iterable[HeldSlice],
    *,
    seed: int,
    names: Collection[str] | None = None,
) -> None:
    """Fill slices with the random weights of the decoder of ``config``, one tensor at a time.

    The values are drawn in fp32 on the CPU and do not depend on the slices. Each expert has random
    numbers of its own, so that only experts of the slices are drawn.

    Args:
        names: the only parameters that consume random numbers; None for all.
    """
    wanted = slices_by_name(slices)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in parameter_shapes(config).items():
        if is_adapter(name) or (names is not None and name not in names):
            continue
        if is_of_all_experts(name):
            _draw_experts(config, name, slices=wanted[name], seed=seed)
            continue
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        draw_parameter(name, whole, config=config, generator=generator)
        for held in wanted[name]:
            held.tensor.copy_(whole[_region(held.spec.offset, held.spec.size)])


def save_hf_folder(
    decoder: Decoder,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights as a safetensors file, or as shards of ``max_shard_bytes`` with an index.

    Args:
        folder: an existing folder. The caller writes config.json and tokenizer files.
        dtype: the precision of the file; None keeps the decoder's.

    Raises:
        OSError: the disk is full or not writable.
    """
    parameters = dict(decoder.named_parameters())
    shards = _plan_shards(decoder, dtype, max_shard_bytes=max_shard_bytes)
    weight_map, total_bytes = {}, 0
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS_FILE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {x.name: _file_copy(_values(parameters, x), _dtype_of(x, dtype)) for x in shard}
        write_tensors(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(index, folder / INDEX_FILE)


def convert_folder(
    source: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    change: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Copy a model folder with its weights in another precision, file by file.

    Args:
        folder: the folder to write, created if it does not exist.
        dtype: torch's name of a precision, such as ``bfloat16``; None keeps each tensor's own.
        change: ``(name, tensor) -> tensor`` in at least fp32, applied before the cast; None keeps
            the values.

    Raises:
        UserError: ``source`` is not a complete model folder.
        OSError: the disk is full or not writable.
    """
    files = weight_files(source)
    hf_config = read_config(source)
    folder.mkdir(parents=True, exist_ok=True)
    target = None if dtype is None else getattr(torch, dtype)
    total_bytes = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found = {x: tensors.get_tensor(x) for x in tensors.keys()}  # noqa: SIM118
        copies = {
            name: _file_copy(
                change(name, x) if change else x, x.dtype if is_kept(name) else target or x.dtype
            )
            for name, x in found.items()
        }
        write_tensors(copies, folder / file.name)
        total_bytes += sum(tensor.nbytes for tensor in copies.values())
    if (source / INDEX_FILE).is_file():
        index = json.loads((source / INDEX_FILE).read_text(encoding="utf-8"))
        _write_json({**index, "metadata": {"total_size": total_bytes}}, folder / INDEX_FILE)
    write_config(hf_config, folder, dtype=target)
    copy_companions(source, folder)


def read_config(folder: Path, *, key: str = KEY) -> dict[str, Any]:
    """Read config.json.

    Raises:
        UserError: it is missing, has no model_type, or a value of another type than its key.
    """
    file = folder / "config.json"
    if not file.is_file() and (folder / ADAPTER_CONFIG).is_file():
        rule = f"it is an adapter such as LoRA ({ADAPTER_CONFIG}), not a whole model"
        base = base_of(folder) or "its base model"
        remedy = (
            f"Set {key} to {base}, and {key.removesuffix('path')}lora_adapter_path to this folder."
        )
        raise _error(folder, rule, key=key, remedy=remedy)
    if not file.is_file():
        raise _error(folder, "the folder has no config.json", key=key)
    try:
        hf_config = read_object(file)
    except ValueError as error:
        raise _error(folder, f"config.json {error}", key=key) from error
    require_types(hf_config)
    if hf_config.get("model_type") is None:
        raise _error(folder, "config.json must have a model_type", key=key)
    return hf_config


def write_config(hf_config: Mapping[str, Any], folder: Path, *, dtype: torch.dtype | None) -> None:
    """Write config.json with the dtype of the written weights."""
    content = dict(hf_config)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
        content[key] = str(dtype).removeprefix("torch.")
    _write_json(content, folder / "config.json")


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the files of a model other than config and weights."""
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _whole(name: str, parameter: Tensor) -> HeldSlice:
    shape = tuple(parameter.shape)
    spec = SliceSpec(name, parameter.dtype, shape, (0,) * len(shape), shape)
    return HeldSlice(spec, parameter.detach())


def slices_by_name(slices: Iterable[HeldSlice]) -> defaultdict[str, list[HeldSlice]]:
    """Return slices by the name of their parameter."""
    named: defaultdict[str, list[HeldSlice]] = defaultdict(list)
    for held in slices:
        named[held.spec.name].append(held)
    return named


def read_slices(tensor: Any, source: FileTensor, *, slices: list[HeldSlice]) -> None:
    """Copy a file tensor into slices of its parameter; read only what they need.

    Args:
        tensor: a tensor, or a slice of a file that safetensors opened.
    """
    for held in slices:
        offset, size, target = held.spec.offset, held.spec.size, held.tensor
        if source.expert is not None:
            place = source.expert - offset[0]
            if not 0 <= place < size[0]:
                continue
            offset, size, target = offset[1:], size[1:], target[place]
        (first, *columns), (rows, *widths) = offset, size
        start = max(first, source.start)
        stop = min(first + rows, source.start + source.rows)
        if start < stop:
            region = _region((start - source.start, *columns), (stop - start, *widths))
            # The device casts: a copy to another device and dtype would cast on the host.
            values = tensor[region].to(target.device)
            target[start - first : stop - first].copy_(values)


def _region(offset: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + count) for start, count in zip(offset, size, strict=True))


def _draw_experts(config: DecoderConfig, name: str, *, slices: list[HeldSlice], seed: int) -> None:
    """Fill slices of a parameter of all experts."""
    for held in slices:
        (first, *offset), (number, *size) = held.spec.offset, held.spec.size
        for place in range(number):
            digest = hashlib.sha256(f"{seed} {name} {first + place}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            whole = torch.empty(held.spec.shape[1:], dtype=torch.float32, device="cpu")
            draw_parameter(name, whole, config=config, generator=generator)
            held.tensor[place].copy_(whole[_region(tuple(offset), tuple(size))])


def _values(parameters: dict[str, torch.nn.Parameter], tensor: FileTensor) -> Tensor:
    return tensor.of(parameters[tensor.parameter].detach())


def _dtype_of(tensor: FileTensor, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the precision to write a tensor in; None keeps its own."""
    return None if is_fixed(tensor.parameter) else dtype


def _checked_tensors(
    config: DecoderConfig, folder: Path, *, files: list[Path], key: str
) -> dict[str, FileTensor]:
    """Compare the tensors of files with the decoder's; return the expected ones by name.

    Raises:
        UserError: see ``load_weights``.
    """
    found = _found_in(files, config=config, key=key)
    are_fused = any(name.endswith(FUSED_SUFFIX) for name in found)
    sources = {source.name: source for source in file_tensors(config, are_fused=are_fused)}
    whole = parameter_shapes(config)
    for name, source in sources.items():
        columns = whole[source.parameter][1 if source.expert is None else 2 :]
        if name not in found:
            raise _error(folder, f"tensor {name!r} is missing from the weights", key=key)
        if found[name].shape != (shape := [source.rows, *columns]):
            rule = f"tensor {name!r} has shape {found[name].shape}, not {shape}"
            raise _error(folder, rule, key=key)
        if found[name].dtype not in _FLOATS:
            rule = f"tensor {name!r} has numbers of type {found[name].dtype}, which are not read"
            raise _error(folder, rule, key=key, remedy="Use weights in bf16, fp16 or fp32.")
    for name in found:
        is_known = name in sources or name == "lm_head.weight" or is_ignored(name, config)
        if not is_known and not name.endswith(_DERIVED_SUFFIX):
            raise _error(folder, f"unexpected tensor {name!r} in the weights", key=key)
    return sources


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor of a file: its shape, and safetensors' name of its type of numbers."""

    shape: list[int]
    dtype: str


def _found_in(files: list[Path], *, config: DecoderConfig, key: str) -> dict[str, _Found]:
    """Return the tensors of files, by their names in files of the family."""
    found: dict[str, _Found] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                pieces = {x: tensors.get_slice(x) for x in tensors.keys()}  # noqa: SIM118
                found |= {
                    name_in_family(name, config): _Found(piece.get_shape(), piece.get_dtype())
                    for name, piece in pieces.items()
                }
        except SafetensorError as error:
            raise _unreadable(file, error, key=key) from error
    return found


def _plan_shards(
    decoder: Decoder, dtype: torch.dtype | None, *, max_shard_bytes: int
) -> list[list[FileTensor]]:
    """Divide the tensors in order into shards of at most ``max_shard_bytes``."""
    parameters = dict(decoder.named_parameters())
    shards: list[list[FileTensor]] = [[]]
    room = max_shard_bytes
    for tensor in file_tensors(decoder.config):
        values = _values(parameters, tensor)
        size = values.numel() * (_dtype_of(tensor, dtype) or values.dtype).itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def _file_copy(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    # A slice of a fused tensor shares its storage, which safetensors refuses to write.
    return values.to("cpu", dtype or values.dtype, copy=True).contiguous()


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one file of weights. Raise OSError if the disk is full or not writable."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, f"cannot write weights: {error}", str(path)) from error


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _unreadable(file: Path, error: Exception, *, key: str) -> UserError:
    with file.open("rb") as content:
        is_pointer = content.read(len(_LFS_POINTER)) == _LFS_POINTER
    if not is_pointer:
        return _error(file.parent, f"{file.name} cannot be read ({error})", key=key)
    rule = f"{file.name} is a pointer of Git LFS, not the weights themselves"
    remedy = "Run git lfs pull in the folder, or download the model: hf download NAME."
    return _error(file.parent, rule, key=key, remedy=remedy)


_WHOLE_FOLDER = (
    "Use a complete Hugging Face folder with safetensors weights that match its config.json."
)


def _error(folder: Path, rule: str, *, key: str, remedy: str = _WHOLE_FOLDER) -> UserError:
    return UserError(key, str(folder), rule=rule, remedy=remedy)
