# SPDX-License-Identifier: Apache-2.0
"""The reader of sharded checkpoints that executes nothing.

torch writes the index of a sharded checkpoint (``.metadata``) as a pickle and reads it with
``pickle.load``, which runs any code that the file names. This reader makes only the records that
torch writes there. The tensors are read with ``weights_only`` by torch itself.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

METADATA_FILE = ".metadata"
_ALLOWED = {
    "torch": {"Size"} | {name for name, one in vars(torch).items() if type(one) is torch.dtype},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "StorageMeta", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""What the index may name, by module."""


class MetadataReader(FileSystemReader):
    """A reader of torch's files whose index cannot run code.

    ``read_metadata`` raises UnpicklingError if the index names anything else than torch's records.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (self._folder / METADATA_FILE).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{METADATA_FILE} is no index of a checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name not in _ALLOWED.get(module_name, ()):
            raise pickle.UnpicklingError(
                f"{METADATA_FILE} names {module_name}.{global_name}, which no checkpoint needs"
            )
        return super().find_class(module_name, global_name)
