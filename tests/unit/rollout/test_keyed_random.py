# SPDX-License-Identifier: Apache-2.0
"""The keyed random numbers: known values, independence of grouping, uniformity."""

from __future__ import annotations

import torch

from tandem.rollout.keyed_random import splitmix64, stream_keys, uniforms


def test_splitmix64_gives_the_published_sequence() -> None:
    increment = 0x9E3779B97F4A7C15 - (1 << 64)
    states = torch.tensor([1234567, 1234567 + increment])
    expected = [6457827717110365317, 3203168211198807973]
    assert splitmix64(states).tolist() == expected


def test_numbers_depend_on_seed_sample_and_position_alone() -> None:
    positions = torch.arange(40).expand(3, 40)
    all_BJ = uniforms(stream_keys(7, [5, 1 << 60, 9]), positions)
    alone_BJ = uniforms(stream_keys(7, [1 << 60]), positions[:1, 10:20])
    torch.testing.assert_close(all_BJ[1:2, 10:20], alone_BJ, rtol=0, atol=0)
    assert not torch.equal(all_BJ, uniforms(stream_keys(8, [5, 1 << 60, 9]), positions))
    assert not torch.equal(all_BJ[0], all_BJ[2])


def test_numbers_are_uniform_and_uncorrelated() -> None:
    ids, positions = range(2000), torch.arange(50).expand(2000, 50)
    u_BJ = uniforms(stream_keys(0, ids), positions)
    assert float(u_BJ.min()) >= 0 and float(u_BJ.max()) < 1
    counts = torch.histc(u_BJ, bins=100, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert 50 < chi_square < 160  # 99 degrees of freedom
    centred_BJ = u_BJ - 0.5
    for neighbour_BJ in (centred_BJ.roll(1, 0), centred_BJ.roll(1, 1)):
        correlation = float((centred_BJ * neighbour_BJ).mean() * 12)
        assert abs(correlation) < 4 / 100_000**0.5


def test_extreme_seeds_are_accepted() -> None:
    positions = torch.zeros(1, 1, dtype=torch.int64)
    values = [float(uniforms(stream_keys(s, [0]), positions)) for s in (-1, 0, 1 << 64, 1 << 70)]
    assert values[1] == values[2] == values[3] != values[0]
