# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in another process: the same, in memory that may be written."""

from __future__ import annotations

import pickle

import torch

from tandem.data.packing import TrainSequence, pack_microbatches
from tandem.data.wire import SentBatches
from tandem.types import LossColumns

SEQUENCES = (TrainSequence(0, (10, 11), (20, 21)), TrainSequence(0, (10, 11), (30, 31, 32, 33)))


def test_batches_arrive_in_another_process_as_they_were_sent() -> None:
    columns = LossColumns(torch.arange(6.0), weights_R=torch.ones(6))
    sent = pack_microbatches(SEQUENCES, [[1], [0]], columns=columns)
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(SentBatches(sent), protocol=5, buffer_callback=buffers.append)
    sealed = [bytes(buffer.raw()) for buffer in buffers]
    arrived = pickle.loads(message, buffers=sealed)
    for ours, theirs in zip(arrived, sent, strict=True):
        ours.token_ids_T.add_(0)
        assert repr(ours) == repr(theirs)
