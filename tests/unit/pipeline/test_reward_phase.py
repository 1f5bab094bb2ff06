# SPDX-License-Identifier: Apache-2.0
"""The reward model's scores: those of transformers at the last token, and what becomes of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from tandem.api import Engines, Scores
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.engines.single import ReferenceModel
from tandem.errors import UserError
from tandem.models.folder import check_reward_folder, open_part
from tandem.models.parallel import WHOLE
from tandem.pipeline.failures import GENERATION_FAILED, PENDING
from tandem.pipeline.microbatches import MemoryFit
from tandem.pipeline.reward_phase import score_with_reward_model
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    PackedBatch,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Trajectory,
)
from tests.fakes.pipeline import ImmediateRuntime, partial_context
from tests.unit.models.tiny_models import NATIVE

KINDS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


class LastTokens:
    """A reward model whose score is the id of the token read last; keeps what it was given."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self, unfinite: Sequence[int] = ()) -> None:
        self.batches: list[PackedBatch] = []
        self.unfinite = unfinite

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        self.batches += batches
        found = [batch.token_ids_T[batch.source_R] for batch in batches]
        broken = torch.tensor(self.unfinite, dtype=torch.int64)
        return [Scores(torch.where(torch.isin(x, broken), math.nan, x.float())) for x in found]


class Letters:
    """A tokenizer of one token a letter, and a template of brackets."""

    def encode_answered(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], answers: Sequence[str]
    ) -> list[list[int]]:
        contents = (chat[0]["content"] for chat in chats)
        return [[*map(ord, f"<{x}|{y}>")] for x, y in zip(contents, answers, strict=True)]


def sample(token_ids: Sequence[int], reward: RewardOutcome = PENDING, text: str = "") -> Sample:
    completion = Completion(0, token_ids, (-0.5,) * len(token_ids), FinishReason.STOP, 0)
    return Sample(Trajectory.of_single_turn((), completion), text, reward)


def group(
    uid: int, prompt_ids: Sequence[int], *samples: Sample, baseline: Sample | None = None
) -> Group:
    messages = [{"role": "user", "content": f"question {uid}"}]
    prompt = Prompt(uid, uid, tuple(prompt_ids), "", "source", None, messages=messages)
    answers = [_after(prompt, one) for one in samples]
    return Group(prompt, tuple(answers), None if baseline is None else _after(prompt, baseline))


def _after(prompt: Prompt, answer: Sample) -> Sample:
    (completion,) = answer.trajectory.completions
    trajectory = Trajectory.of_single_turn(prompt.token_ids, completion)
    return replace(answer, trajectory=trajectory)


def scored(model: Any, groups: Sequence[Group], *arguments: str, **rest: Any) -> list[Group]:
    given: dict[str, Any] = {
        "config": load_config(RunConfig, ["reward_model.enable=True", *arguments]).config,
        "runtime": ImmediateRuntime(),
        "engines": Engines(model, model, None, model, reward_model=model),
        "memory": MemoryFit(),
        **rest,
    }
    parts = partial_context(**given)
    return asyncio.run(score_with_reward_model(parts, groups))


def scores_of(groups: Sequence[Group]) -> list[list[float]]:
    return [[x.reward.score for x in entry.samples] for entry in groups]


def write_classifier(config: PretrainedConfig, folder: Path, *, kind: str) -> torch.nn.Module:
    config.num_labels = 1
    config.pad_token_id = 0  # not among the tokens: transformers looks for the last other one
    model = KINDS[kind].from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", sorted(NATIVE))
def test_scores_are_those_of_transformers_at_the_last_token(
    family: str, kind: str, tmp_path: Path
) -> None:
    theirs = write_classifier(NATIVE[family](), tmp_path, kind=kind)
    folder = check_reward_folder(str(tmp_path), key="reward_model.model.path")
    ours = ReferenceModel(open_part(folder, WHOLE, dtype=torch.float32, device="cpu"))
    rows = {(3, 5, 7, 9): [(2, 4, 6), (8,), (1, 66, 1, 2)], (11, 13): [(10, 12, 14, 16, 18)]}
    groups = [group(len(p), p, *(sample(r) for r in responses)) for p, responses in rows.items()]
    by_tokens = "reward_model.forward_max_token_len_per_gpu=9"
    for limit in (by_tokens, "reward_model.micro_batch_size_per_gpu=3"):
        found = scores_of(scored(ours, groups, limit))
        for (prompt, responses), scores in zip(rows.items(), found, strict=True):
            for response, score in zip(responses, scores, strict=True):
                with torch.no_grad():
                    logits = theirs(input_ids=torch.tensor([prompt + response])).logits
                assert score == pytest.approx(float(logits.flatten()[-1]), abs=1e-5)
        assert len({round(score, 4) for row in found for score in row}) == 4


def test_one_more_token_than_the_limit_is_no_error_and_prompts_are_shared() -> None:
    model = LastTokens()
    groups = [group(1, (9, 9, 9), sample((1, 2)), sample((3,))), group(2, (8,), sample((4, 5)))]
    limit = "reward_model.forward_max_token_len_per_gpu=5"
    assert scores_of(scored(model, groups, limit)) == [[2.0, 3.0], [5.0]]
    fed = [batch.token_ids_T.tolist() for batch in model.batches]
    assert sorted(fed) == [[8, 4, 5], [9, 9, 9, 1, 2], [9, 9, 9, 3]]
    (whole,) = _fed_whole(groups)
    assert whole == [9, 9, 9, 1, 2, 3, 8, 4, 5]


def _fed_whole(groups: Sequence[Group]) -> list[list[int]]:
    model = LastTokens()
    scored(model, groups)
    return [batch.token_ids_T.tolist() for batch in model.batches]


def test_what_cannot_be_scored_is_a_failure_and_not_a_number() -> None:
    groups = [group(1, (9,), sample((1, 2)), sample((6,), GENERATION_FAILED), sample((), PENDING))]
    (entry,) = scored(LastTokens(unfinite=(2,)), groups)
    broken, failed, empty = (x.reward for x in entry.samples)
    assert (broken.status, broken.detail) == (
        RewardStatus.ERROR,
        "the reward model's score is nan",
    )
    assert math.isnan(broken.score) and failed is GENERATION_FAILED
    assert empty.score == 9.0, "it is read up to the end of the prompt"


def test_a_model_without_a_finite_score_ends_the_run() -> None:
    path = "reward_model.model.path=judge"
    with pytest.raises(
        UserError, match=r"^reward_model\.model\.path='judge': none of its 1 scores"
    ):
        scored(LastTokens(unfinite=(2,)), [group(1, (9,), sample((2,)))], path)


def test_greedy_baselines_are_scored_too() -> None:
    (entry,) = scored(LastTokens(), [group(1, (9,), sample((1, 2)), baseline=sample((7,)))])
    assert scores_of([entry]) == [[2.0]]
    assert entry.baseline is not None and entry.baseline.reward.score == 7.0


def test_long_responses_cost_what_the_reward_manager_says() -> None:
    keys = (
        "data.max_response_length=4",
        "reward_model.reward_manager=dapo",
        "reward_model.reward_kwargs.overlong_buffer_cfg={enable:True,len:2,penalty_factor:0.5}",
    )
    groups = [group(1, (9,), sample((1, 5)), sample((1, 1, 5)), sample((1, 1, 1, 5)))]
    assert scores_of(scored(LastTokens(), groups, *keys)) == [[5.0, 4.75, 4.5]]


def test_conversations_are_read_in_the_models_own_tokens() -> None:
    model = LastTokens()
    groups = [
        group(1, (9,), sample((1,), text="yes"), sample((2,), text="yet")),
        group(2, (9,), sample((3,), text="no")),
    ]
    scores = scored(model, groups, conversations=Letters())
    assert scores_of(scores) == [[float(ord(">"))] * 2, [float(ord(">"))]]
    (batch,) = model.batches
    fed = "".join(map(chr, batch.token_ids_T.tolist()))
    assert fed == "<question 1|yes>t><question 2|no>", "what answers share is computed once"
    longer = scored(
        model,
        groups,
        "reward_model.forward_max_token_len_per_gpu=3",
        conversations=Letters(),
    )
    assert scores_of(longer) == scores_of(scores)
