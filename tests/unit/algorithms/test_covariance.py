# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens by covariance, against loops over Python's floats."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.algorithms.covariance import mark_tokens
from tandem.algorithms.losses import PolicyTerms
from tandem.config.schema.actor import ActorConfig, PolicyLossConfig

SIZE = 300
SETTINGS = ActorConfig(
    clip_ratio_low=0.1,
    clip_ratio_high=0.15,
    policy_loss=PolicyLossConfig(
        clip_cov_ratio=0.02, clip_cov_lb=0.3, clip_cov_ub=1.5, kl_cov_ratio=0.05
    ),
)


def terms(*, rejects: bool) -> PolicyTerms:
    generator = torch.Generator().manual_seed(11)
    old_R = -3 * torch.rand(SIZE, generator=generator)
    return PolicyTerms(
        logp_R=old_R + 0.3 * torch.randn(SIZE, generator=generator),
        old_logp_R=old_R,
        advantages_R=torch.randn(SIZE, generator=generator),
        sequence_R=torch.arange(SIZE) // 10,
        num_sequences=SIZE // 10,
        kept_R=torch.rand(SIZE, generator=generator) < 0.7 if rejects else None,
    )


def kept_of(given: PolicyTerms) -> list[int]:
    flags = [True] * SIZE if given.kept_R is None else given.kept_R.tolist()
    return [i for i, flag in enumerate(flags) if flag]


def covariances(given: PolicyTerms) -> dict[int, float]:
    """By token, over the tokens that are kept."""
    kept, logp, advantage = kept_of(given), given.logp_R.tolist(), given.advantages_R.tolist()
    mean_logp = math.fsum(logp[i] for i in kept) / len(kept)
    mean_advantage = math.fsum(advantage[i] for i in kept) / len(kept)
    return {i: (advantage[i] - mean_advantage) * (logp[i] - mean_logp) for i in kept}


def marked(given: PolicyTerms, loss_mode: str, seed: int = 0) -> set[int]:
    random = np.random.default_rng(seed)
    flags = mark_tokens(given, SETTINGS, loss_mode=loss_mode, random=random)
    return set(flags.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("rejects", [False, True])
def test_kl_cov_marks_the_tokens_of_the_largest_covariance(rejects: bool) -> None:
    given = terms(rejects=rejects)
    covariance = covariances(given)
    ranked = sorted(covariance, key=lambda i: covariance[i], reverse=True)
    assert marked(given, "kl_cov") == set(ranked[: int(0.05 * len(ranked))])


@pytest.mark.parametrize("rejects", [False, True])
def test_clip_cov_marks_some_of_the_unclipped_tokens_within_its_bounds(rejects: bool) -> None:
    given = terms(rejects=rejects)
    eligible = set()
    for i, value in covariances(given).items():
        ratio = math.exp(given.logp_R[i].item() - given.old_logp_R[i].item())
        clipped = ratio > 1.15 if given.advantages_R[i] > 0 else ratio < 0.9
        if 0.3 < value < 1.5 and not clipped:
            eligible.add(i)
    count = int(0.02 * len(kept_of(given)))
    assert len(eligible) > count
    draws = [marked(given, "clip_cov", seed) for seed in range(60)]
    assert all(len(draw) == count and draw <= eligible for draw in draws)
    assert set().union(*draws) == eligible, "each of them is drawn some time"
    assert marked(given, "clip_cov", 7) == draws[7], "a seed repeats its draw"


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
def test_where_nothing_is_kept_nothing_is_marked(loss_mode: str) -> None:
    nothing = replace(terms(rejects=False), kept_R=torch.zeros(SIZE, dtype=torch.bool))
    assert marked(nothing, loss_mode) == set()
