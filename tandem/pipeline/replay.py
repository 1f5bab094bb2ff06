# SPDX-License-Identifier: Apache-2.0
"""Routing replay in the pipeline: the policy replays recorded experts, other models never do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tandem.config.schema.run import RunConfig
from tandem.data.packing import TrainSequence
from tandem.errors import UserError
from tandem.pipeline.batch import Batch

_MODE = "actor_rollout_ref.actor.router_replay.mode"
_RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def sequences_to_replay(config: RunConfig, batch: Batch) -> Sequence[TrainSequence]:
    """Return the sequences of the policy, with the routes that the run replays.

    Raises:
        UserError: the run replays routes of rollouts, and a sample that carries loss lacks those of
            a token.
    """
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode != "R3":
        return batch.sequences
    samples = [sample for group in batch.groups for sample in group.samples]
    for sample, sequence in zip(samples, batch.sequences, strict=True):
        if not sequence.num_loss_tokens:
            continue
        num_fed = _num_fed(sequence)
        found = 0 if sequence.routes is None else len(sequence.routes)
        if found != num_fed or sequence.branches:
            raise UserError(
                _MODE,
                mode,
                rule=f"sample {sample.trajectory.sample_id} has recorded experts for {found} of "
                f"its {num_fed} tokens; conversations that forked and rollout engines of your own "
                "have none",
                remedy=f"Set {_MODE}=R2 or disabled, and {_RECORDS}=False.",
            )
    return _with_routes_of_empty(batch.sequences)


def _with_routes_of_empty(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Give routes to sequences without loss, because a micro-batch needs those of all its tokens.

    A shared prompt has the routes of the sequences that share it. Nothing depends on the others,
    which repeat any token's.
    """
    routed = [(x, x.routes) for x in sequences if x.num_loss_tokens and x.routes is not None]
    if not routed:
        return list(sequences)
    any_routes = routed[0][1][:1]
    of_prompt = {x.prompt_key: routes[: len(x.prompt_ids)] for x, routes in reversed(routed)}

    def routes_of_empty(x: TrainSequence) -> np.ndarray:
        known = of_prompt.get(x.prompt_key, any_routes[:0])
        return np.concatenate((known, any_routes.repeat(_num_fed(x) - len(known), 0)))

    return [
        x if x.num_loss_tokens else replace(x, branches=(), routes=routes_of_empty(x))
        for x in sequences
    ]


def _num_fed(sequence: TrainSequence) -> int:
    return len(sequence.prompt_ids) + max(0, len(sequence.response_ids) - 1)


def without_routes(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return sequences for a model whose own routers choose."""
    return [replace(sequence, routes=None) for sequence in sequences]
