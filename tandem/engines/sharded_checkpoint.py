# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several ranks write into one folder, through torch.distributed.checkpoint.

Weights and moments are stored as regions of whole tensors under the names of the unsharded decoder.
Any number of ranks, or one process without a process group, can therefore read them. The caller
makes the checkpoint atomic.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tandem.engines.checkpoint import SHARDED_FILE, incomplete, require_model
from tandem.engines.metadata_reader import MetadataReader
from tandem.engines.optim import PolicyOptimizer
from tandem.models.adapted import is_adapter
from tandem.models.decoder import Decoder, DecoderConfig, parameter_shapes
from tandem.models.experts import is_fixed
from tandem.models.families import decoder_config
from tandem.models.hf import open_without_weights
from tandem.models.language_model import NativeModel
from tandem.models.parallel import Regions, slices_of_rows, tensor_regions
from tandem.models.weights import read_config
from tandem.types import HeldSlice, SliceSpec

_CAUSE_LENGTH = 400
"""The maximum length of a quoted message of torch or the system, enough for a path."""

Stored = dict[str, list[HeldSlice]]
"""This rank's slices by key of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Record:
    """The description of a checkpoint, stored in ``SHARDED_FILE``.

    Attributes:
        model: the fingerprint of the model.
        dtype: torch's name of the precision of the weights.
        moments: the names of each optimizer's moments; empty before its first step.
    """

    model: str
    dtype: str
    moments: dict[str, list[str]]
    schedule_step: int


def save_sharded(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    optimizer: PolicyOptimizer,
    regions: Mapping[str, Regions],
    model: str,
    schedule_step: int,
) -> None:
    """Write this rank's part of a checkpoint into an existing folder.

    Collective if there is a process group.

    Args:
        weights: the parts of this rank, which ``regions`` describes.
        model: the fingerprint of the model.

    Raises:
        OSError: a rank could not write, for example because its disk is full or the folder is
            missing there; raised on all ranks.
    """
    stored = _stored(weights, optimizer, regions=regions)
    try:
        with _without_warnings():
            save({}, storage_writer=FileSystemWriter(folder), planner=_Save(stored, folder))
    except CheckpointException as error:
        raise _write_error(error) from error
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        dtype = next(iter(weights.values())).dtype
        moments = {kind: list(state) for kind, state in optimizer.state_dict().items()}
        record = Record(model, str(dtype).removeprefix("torch."), moments, schedule_step)
        (folder / SHARDED_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n")


def load_sharded(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    optimizer: PolicyOptimizer,
    regions: Mapping[str, Regions],
    model: str,
) -> int:
    """Read a checkpoint of any number of ranks into ``weights`` and the optimizer.

    Returns:
        the step of the learning-rate schedule.

    Raises:
        UserError: the checkpoint belongs to another model or optimizer, or is incomplete.
    """
    record = read_record(folder)
    require_model(folder, model, saved=record.model)
    optimizer.require_same(record.moments)
    if any(record.moments.values()):
        optimizer.allocate(weights)
    else:
        optimizer.load_state_dict({kind: {} for kind in record.moments})
    _read(folder, _stored(weights, optimizer, regions=regions))
    optimizer.spread_scalars()
    return record.schedule_step


def read_record(folder: Path) -> Record:
    """Read the record of a checkpoint. Raise UserError if it is missing or damaged."""
    try:
        record = Record(**json.loads((folder / SHARDED_FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise incomplete(folder, f"{SHARDED_FILE} cannot be read ({error})") from error
    if not _is_sound(record):
        raise incomplete(folder, f"{SHARDED_FILE} cannot be read (tandem did not write it)")
    return record


def _is_sound(record: Record) -> bool:
    """Return whether the values of a record have their types."""
    if not isinstance(getattr(torch, str(record.dtype), None), torch.dtype):
        return False
    moments: object = record.moments  # of JSON, so of any type
    return isinstance(moments, dict) and isinstance(record.schedule_step, int)


def export_sharded(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Write the weights of a checkpoint as a Hugging Face model folder, in one process.

    Args:
        folder: the folder to write, created if it does not exist.
        dtype: torch's name of a precision, such as ``bfloat16``; None keeps the checkpoint's.

    Raises:
        UserError: the checkpoint is incomplete.
        OSError: the disk is full or not writable.
    """
    stored = getattr(torch, read_record(source).dtype)
    hf_config = read_config(source, key="checkpoint")
    config = decoder_config(hf_config)
    if config is None:
        _export_with_transformers(source, folder, stored=stored, dtype=dtype)
        return
    weights = {
        name: torch.empty(shape, dtype=torch.float32 if is_fixed(name) else stored)
        for name, shape in parameter_shapes(config).items()
    }
    regions = tensor_regions(config, rank=0, size=1, dtype=stored)
    _read(source, {name: slices_of_rows(regions[name], part) for name, part in weights.items()})
    with torch.device("meta"):
        decoder = Decoder(config)
    folder.mkdir(parents=True, exist_ok=True)
    model = NativeModel(decoder, hf_config=hf_config, source=source).unsharded(weights)
    model.save(folder, None if dtype is None else getattr(torch, dtype))


def _export_with_transformers(
    source: Path, folder: Path, *, stored: torch.dtype, dtype: str | None
) -> None:
    model = open_without_weights(
        source, dtype=stored, device=torch.device("cpu"), trust_remote_code=False
    )
    regions = tensor_regions(model.config, rank=0, size=1, dtype=stored)
    named = model.module.named_parameters()
    _read(source, {name: slices_of_rows(regions[name], weight) for name, weight in named})
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder, None if dtype is None else getattr(torch, dtype))


def read_adapters(source: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the whole adapters of a checkpoint, in one process.

    Raises:
        UserError: the checkpoint is incomplete.
    """
    dtype = getattr(torch, read_record(source).dtype)
    regions = tensor_regions(config, rank=0, size=1, dtype=dtype)
    adapters = {
        name: torch.empty(shape, dtype=dtype)
        for name, shape in parameter_shapes(config).items()
        if is_adapter(name)
    }
    _read(source, {name: slices_of_rows(regions[name], part) for name, part in adapters.items()})
    return adapters


def _stored(
    weights: Mapping[str, Tensor], optimizer: PolicyOptimizer, *, regions: Mapping[str, Regions]
) -> Stored:
    stored = {name: slices_of_rows(regions[name], part) for name, part in weights.items()}
    for kind, moments in optimizer.state_dict().items():
        for moment, parts in moments.items():
            members = zip(optimizer.members[kind], parts, strict=True)
            stored |= _stored_moment(f"{kind}/{moment}", members, regions=regions)
    return stored


def _stored_moment(
    moment: str, members: Iterable[tuple[str, Tensor]], *, regions: Mapping[str, Regions]
) -> Stored:
    stored: Stored = {}
    for name, part in members:
        if part.dim():
            stored[f"{moment}/{name}"] = slices_of_rows(regions[name], part)
        else:  # a scalar is the same for all parameters
            spec = SliceSpec(moment, part.dtype, shape=(), offset=(), size=())
            stored.setdefault(moment, [HeldSlice(spec, part)])
    return stored


def _read(folder: Path, stored: Stored) -> None:
    try:
        with _without_warnings():
            load({}, storage_reader=MetadataReader(folder), planner=_Load(stored), no_dist=True)
    except (CheckpointException, OSError, EOFError, UnpicklingError) as error:
        raise incomplete(folder, f"it cannot be read ({_first_cause(error)})") from error


def _without_warnings() -> AbstractContextManager[None]:
    # Torch warns about reading or writing without a process group, which is intended here.
    return warnings.catch_warnings(action="ignore", category=UserWarning)


class _Save(DefaultSavePlanner):
    """A plan to write ``Stored`` instead of a state dict, and each region once."""

    def __init__(self, stored: Stored, folder: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self._stored = stored
        self._folder = folder
        self._tensors = _by_index(stored)

    def create_local_plan(self) -> SavePlan:
        # Torch's writer would create the folder, on a disk that other nodes do not see.
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"{self._folder} does not exist on this node: the folder must be on a file system "
                "that all nodes share"
            )
        items = [_write_item(key, held) for key, slices in self._stored.items() for held in slices]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


class _Load(DefaultLoadPlanner):
    """A plan to read into ``Stored``."""

    def __init__(self, stored: Stored) -> None:
        super().__init__(flatten_state_dict=False)
        self._stored = stored
        self._tensors = _by_index(stored)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "a reader passes the metadata"
        items: list[ReadItem] = []
        for key, slices in self._stored.items():
            saved = self.metadata.state_dict_metadata.get(key)
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"it has no {key}")
            items += create_read_items_for_chunk_list(key, saved, [_chunk(x.spec) for x in slices])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._tensors[index]


def _by_index(stored: Stored) -> dict[MetadataIndex, Tensor]:
    return {
        MetadataIndex(key, held.spec.offset): held.tensor
        for key, slices in stored.items()
        for held in slices
    }


def _write_item(key: str, held: HeldSlice) -> WriteItem:
    data = TensorWriteData(
        _chunk(held.spec), TensorProperties(held.tensor.dtype), torch.Size(held.spec.shape)
    )
    return WriteItem(MetadataIndex(key, held.spec.offset), WriteItemType.SHARD, tensor_data=data)


def _chunk(spec: SliceSpec) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(spec.offset), torch.Size(spec.size))


def _write_error(error: CheckpointException) -> BaseException:
    """Return the exception to raise: an OSError if only writing files failed."""
    causes = [cause for cause, _ in error.failures.values()]
    # Torch's writer reports a full disk by a RuntimeError.
    if all(isinstance(cause, OSError | RuntimeError) for cause in causes):
        return OSError(f"a rank cannot write its part: {_first_cause(error)}")
    return error


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:_CAUSE_LENGTH] or type(error).__name__
