# SPDX-License-Identifier: Apache-2.0
"""Routing replay in the pipeline: the policy replays recorded experts, other models never do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.config.schema.run import RunConfig
from tandem.data.packing import TrainSequence
from tandem.errors import UserError
from tandem.pipeline.batch import Batch


def require_routes(config: RunConfig, batch: Batch) -> None:
    """Raise UserError if a run replays routes of rollouts, and a sample lacks those of a token."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode != "R3":
        return
    samples = [sample for group in batch.groups for sample in group.samples]
    for sample, sequence in zip(samples, batch.sequences, strict=True):
        num_fed = len(sequence.prompt_ids) + max(0, len(sequence.response_ids) - 1)
        found = 0 if sequence.routes is None else len(sequence.routes)
        if found != num_fed or sequence.branches:
            raise UserError(
                "actor_rollout_ref.actor.router_replay.mode",
                mode,
                rule=f"sample {sample.trajectory.sample_id} has recorded experts for {found} of "
                f"its {num_fed} tokens; conversations that forked and rollout engines of your own "
                "have none",
                remedy="Set router_replay.mode=R2 or disabled, and "
                "enable_rollout_routing_replay=False.",
            )


def without_routes(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return sequences for a model whose own routers choose."""
    return [replace(sequence, routes=None) for sequence in sequences]
