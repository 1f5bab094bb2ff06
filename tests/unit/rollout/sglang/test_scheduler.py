# SPDX-License-Identifier: Apache-2.0
"""tandem's part of SGLang's scheduler: draws by key, and the account of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn

from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.sampler import DrawRule, draw_tokens
from tandem.rollout.sglang.scheduler import ACCOUNT_BYTES, FIRST, LAST, draw, load_weights

RULES = ((1.0, -1, 1.0), (0.7, 20, 0.8), (0.0, -1, 1.0))


def test_each_row_draws_by_its_rule_its_key_and_its_position() -> None:
    logits_BV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 3
    keys_B = stream_keys(5, range(6))
    rows = [
        {"key": key, "start": 4 + row, "rule": RULES[row % 3], "forced": []}
        for row, key in enumerate(keys_B.tolist())
    ]
    # Row r has a prompt of 4 + r tokens; the next token is its fourth.
    token_B, logp_B = draw(logits_BV, rows, position_B=torch.arange(6) + 4 + 2)
    for row in range(6):
        uniform_B = uniforms(keys_B[row : row + 1], torch.tensor([[3]]))[:, 0]
        expected = draw_tokens(logits_BV[row : row + 1], uniform_B, rule=DrawRule(*RULES[row % 3]))
        assert token_B[row] == expected.token_B[0]
        assert logp_B[row] == expected.logp_B[0]


def test_a_forced_token_has_its_unscaled_log_prob() -> None:
    logits_BV = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    rows = [
        {"key": 1, "start": 3, "rule": RULES[2], "forced": [7, 8, 9]},
        {"key": 2, "start": 3, "rule": RULES[0], "forced": []},
    ]
    token_B, logp_B = draw(logits_BV, rows, position_B=torch.tensor([3, 3]))
    assert token_B[0] == 8
    assert logp_B[0] == torch.log_softmax(logits_BV[0], -1)[8]


class _Fused(nn.Module):
    """A model that fuses two tensors of a checkpoint and ignores names that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(4, 2))
        self.norm = nn.Parameter(torch.ones(2))

    def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "first":
                self.fused.data[:2].copy_(tensor)
            elif name == "second":
                self.fused.data[2:].copy_(tensor)
            elif name == "norm":
                self.norm.data.copy_(tensor)


@pytest.fixture
def world() -> Iterator[None]:
    """A world of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _account(model: nn.Module, *tensors: tuple[str, Tensor]) -> dict[str, list[str]]:
    account = torch.zeros(1, ACCOUNT_BYTES, dtype=torch.uint8)
    load_weights(model, [(FIRST, torch.zeros(1)), *tensors])
    load_weights(model, [(LAST, account)])
    return json.loads(account.numpy().tobytes())


@pytest.mark.usefixtures("world")
def test_what_was_not_written_whole_is_in_the_account() -> None:
    first, second, norm = (
        ("first", torch.ones(2, 2)),
        ("second", torch.ones(2, 2)),
        ("norm", torch.ones(2)),
    )
    model = _Fused()
    assert _account(model, first, second) == {"errors": [], "unwritten": ["norm"]}
    assert _account(model, first, norm, ("secnd", torch.ones(2, 2)))["unwritten"] == ["fused"]
    assert _account(model, first, second, norm) == {"errors": [], "unwritten": []}
    (error,) = _account(model, ("first", torch.ones(3, 2)))["errors"]
    assert error.startswith("first: RuntimeError: The size of tensor a (2)")
