# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that several ranks write into one folder, through torch.distributed.checkpoint.

Everything is stored as boxes of whole tensors under the names of the whole decoder, so that any
number of ranks, or one process without a process group, can read it. Beside them lie a record of
what was trained, and config and tokenizer of the model. Atomicity is the caller's.
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
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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
from tandem.engines.optim import PolicyOptimizer
from tandem.models.decoder import Decoder, parameter_shapes
from tandem.models.families import decoder_config
from tandem.models.language_model import NativeModel
from tandem.models.parallel import Boxes, slices_of_rows, tensor_boxes
from tandem.models.weights import read_config
from tandem.types import HeldSlice, SliceSpec

_CAUSE_LENGTH = 400
"""Of a message of torch's or the system's at most; there is room for a path in it."""

Stored = dict[str, list[HeldSlice]]
"""By key of the checkpoint, what this rank has of it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a checkpoint holds, in ``SHARDED_FILE``.

    Attributes:
        model: fingerprint.
        dtype: of the weights, torch's name of it.
        moments: names of each optimizer's, none before its first step.
    """

    model: str
    dtype: str
    moments: dict[str, list[str]]
    schedule_step: int


def store(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    optimizer: PolicyOptimizer,
    boxes: Mapping[str, Boxes],
    model: str,
    schedule_step: int,
) -> None:
    """Write this rank's part of a checkpoint into an existing folder; collective if there is a
    process group.

    Args:
        weights: this rank's parts, which ``boxes`` describes.
        model: its fingerprint.

    Raises:
        OSError: some rank could not write, because the disk is full, say, or the folder is not
            there for it; on all ranks.
    """
    stored = _stored(weights, optimizer, boxes=boxes)
    try:
        with _quiet():
            save({}, storage_writer=FileSystemWriter(folder), planner=_Save(stored, folder))
    except CheckpointException as error:
        raise _write_error(error) from error
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        dtype = next(iter(weights.values())).dtype
        moments = {kind: list(state) for kind, state in optimizer.state_dict().items()}
        record = Record(model, str(dtype).removeprefix("torch."), moments, schedule_step)
        (folder / SHARDED_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n")


def restore(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    optimizer: PolicyOptimizer,
    boxes: Mapping[str, Boxes],
    model: str,
) -> int:
    """Read what ``store`` wrote, on any number of ranks, into ``weights`` and the optimizer.

    Returns:
        the schedule's step.

    Raises:
        UserError: it belongs to another model or optimizer, or is incomplete.
    """
    record = read_record(folder)
    require_model(folder, model, saved=record.model)
    optimizer.require_same(record.moments)
    if any(record.moments.values()):
        optimizer.allocate(weights)
    else:
        optimizer.load_state_dict({kind: {} for kind in record.moments})
    _read(folder, _stored(weights, optimizer, boxes=boxes))
    optimizer.spread_scalars()
    return record.schedule_step


def read_record(folder: Path) -> Record:
    """Raises UserError if it is missing or damaged."""
    try:
        return Record(**json.loads((folder / SHARDED_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise incomplete(folder, f"{SHARDED_FILE} cannot be read ({error})") from error


def export_sharded(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """Write the weights of a checkpoint as a Hugging Face model folder, in one process.

    Args:
        folder: made if it does not exist.
        dtype: torch's name of it, such as ``bfloat16``; None keeps that of the checkpoint.

    Raises:
        UserError: the checkpoint is incomplete.
        OSError: the disk is full or not writable.
    """
    stored = getattr(torch, read_record(source).dtype)
    hf_config = read_config(source, key="checkpoint")
    config = decoder_config(hf_config)
    if config is None:
        raise incomplete(source, f"model_type {hf_config['model_type']!r} is not known")
    weights = {
        name: torch.empty(shape, dtype=stored) for name, shape in parameter_shapes(config).items()
    }
    boxes = tensor_boxes(config, rank=0, size=1, dtype=stored)
    _read(source, {name: slices_of_rows(boxes[name], part) for name, part in weights.items()})
    with torch.device("meta"):
        decoder = Decoder(config)
    folder.mkdir(parents=True, exist_ok=True)
    model = NativeModel(decoder, hf_config=hf_config, source=source).unsharded(weights)
    model.save(folder, None if dtype is None else getattr(torch, dtype))


def _stored(
    weights: Mapping[str, Tensor], optimizer: PolicyOptimizer, *, boxes: Mapping[str, Boxes]
) -> Stored:
    stored = {name: slices_of_rows(boxes[name], part) for name, part in weights.items()}
    for kind, moments in optimizer.state_dict().items():
        for moment, parts in moments.items():
            members = zip(optimizer.members[kind], parts, strict=True)
            stored |= _of_moment(f"{kind}/{moment}", members, boxes=boxes)
    return stored


def _of_moment(
    moment: str, members: Iterable[tuple[str, Tensor]], *, boxes: Mapping[str, Boxes]
) -> Stored:
    stored: Stored = {}
    for name, part in members:
        if part.dim():
            stored[f"{moment}/{name}"] = slices_of_rows(boxes[name], part)
        else:  # the same for all parameters
            spec = SliceSpec(moment, part.dtype, shape=(), offset=(), size=())
            stored.setdefault(moment, [HeldSlice(spec, part)])
    return stored


def _read(folder: Path, stored: Stored) -> None:
    try:
        with _quiet():
            load({}, storage_reader=FileSystemReader(folder), planner=_Load(stored), no_dist=True)
    except (CheckpointException, OSError, EOFError, UnpicklingError) as error:
        raise incomplete(folder, f"it cannot be read ({_first_cause(error)})") from error


def _quiet() -> AbstractContextManager[None]:
    """torch warns where processes read or write for themselves, which is what is meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


class _Save(DefaultSavePlanner):
    """Plans to write ``Stored`` instead of a state dict; what several ranks hold, one writes."""

    def __init__(self, stored: Stored, folder: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self._stored = stored
        self._folder = folder
        self._tensors = _by_index(stored)

    def create_local_plan(self) -> SavePlan:
        # torch's writer would make it, on a disk that no other node sees.
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"{self._folder} is not there: the folder must be on a file system that all nodes "
                "share"
            )
        items = [_write_item(key, held) for key, slices in self._stored.items() for held in slices]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


class _Load(DefaultLoadPlanner):
    """Plans to read into ``Stored``."""

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
    """What is to be raised for it: an OSError if all that went wrong was writing files."""
    causes = [cause for cause, _ in error.failures.values()]
    # RuntimeError is how torch's writer reports a disk that is full.
    if all(isinstance(cause, OSError | RuntimeError) for cause in causes):
        return OSError(f"a rank cannot write its part: {_first_cause(error)}")
    return error


def _first_cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(str(error).split())[:_CAUSE_LENGTH] or type(error).__name__
