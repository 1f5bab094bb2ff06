# SPDX-License-Identifier: Apache-2.0
"""Batches of trajectories: columns cover the drawn tokens, given tokens are context only."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tandem.config.parse.overrides import load_config
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.run import RunConfig
from tandem.data.packing import pack
from tandem.data.span_tree import rows_of
from tandem.engines.single import SingleDeviceEngine
from tandem.models.folder import open_model
from tandem.pipeline.batch import Batch, lay_out
from tandem.pipeline.context import Engines
from tandem.pipeline.experience import Experience, assign_credit
from tandem.pipeline.loop import initial_kl_controller
from tandem.pipeline.microbatches import MemoryFit
from tandem.pipeline.phases import policy_loss, score_with_policy, update_policy
from tandem.pipeline.step_metrics import batch_metrics, token_lag_metrics
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    LossInputs,
    LossScale,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Span,
    Trajectory,
    UpdateReport,
)
from tests.fakes.pipeline import ImmediateRuntime, partial_context

KEYS = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.temperature=0.7",
)
REJECTION = (
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
)
CALL, ANSWER = (8, 9), (13, 14, 15)
TOOL = (10, 11, 12)


def drawn(ids: Sequence[int], version: int, switches: tuple[tuple[int, int], ...] = ()) -> Span:
    log_probs = [-token / 100 for token in ids]
    completion = Completion(0, tuple(ids), log_probs, FinishReason.STOP, version, switches)
    return Span(completion.token_ids, completion)


def sample(sample_id: int, score: float, *spans: Span) -> Sample:
    return Sample(Trajectory(sample_id, spans), "", RewardOutcome(RewardStatus.VALUE, score))


def groups() -> list[Group]:
    """Return a call with its result beside a plain answer, and an episode with its own prompt."""
    prompts = [Prompt(7, 0, (5, 6, 7), "", "", ""), Prompt(8, 1, (20,), "", "", "")]
    called = sample(
        14, 1.0, Span((5, 6, 7)), drawn(CALL, 3), Span(TOOL), drawn(ANSWER, 3, ((1, 4),))
    )
    plain = sample(15, 0.0, Span((5, 6, 7)), drawn((16, 17), 4))
    opened = sample(
        16, 0.0, Span((20,)), Span((21,)), drawn((22,), 5), Span((23,)), drawn((24, 25), 5)
    )
    other = sample(17, 1.0, Span((20,)), drawn((26, 27), 5), Span((28,)))
    return [Group(prompts[0], (called, plain)), Group(prompts[1], (opened, other))]


def forked_groups() -> list[Group]:
    """Return the groups with a history that was rewritten before the answer of the first sample."""
    first, second = groups()
    called, plain = first.samples
    prompt, call, result, answer = called.trajectory.spans
    spans = (prompt, call, result, Span((9, *TOOL)), answer)
    fork = Trajectory(14, spans, parents=(-1, 0, 1, 0, 3))
    return [replace(first, samples=(replace(called, trajectory=fork), plain)), second]


DRAWN_IDS = (*CALL, *ANSWER, 16, 17, 22, 24, 25, 26, 27)
LENGTHS = [5, 2, 3, 2]


def experience_of(batch: Batch, *arguments: str) -> Experience:
    config = load_config(RunConfig, [*KEYS, *arguments]).config
    return assign_credit(batch, config=config, controller=initial_kl_controller(config))


def test_m4_columns_cover_the_drawn_tokens_in_order() -> None:
    batch = lay_out(groups(), version=5)
    assert batch.sequence_R.tolist() == [
        n for n, length in enumerate(LENGTHS) for _ in range(length)
    ]
    assert batch.rollout_logp_R.tolist() == pytest.approx([-token / 100 for token in DRAWN_IDS])
    assert batch.lag_R.tolist() == [2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert batch.group_N.tolist() == [7, 7, 8, 8]
    assert [sequence.num_loss_tokens for sequence in batch.sequences] == LENGTHS
    assert pack(batch.sequences).target_R.tolist() == list(DRAWN_IDS)
    called, plain, opened, other = batch.sequences
    assert called.loss_mask == (True, True, False, False, False, True, True, True)
    assert plain.loss_mask is None
    assert called.prompt_key == plain.prompt_key == 7 and other.prompt_key == 8
    assert (opened.prompt_key, tuple(opened.prompt_ids)) == (-17, (20, 21))


def test_advantages_and_statistics_count_drawn_tokens() -> None:
    batch = lay_out(groups(), version=5)
    experience = experience_of(batch)
    half = 2**-0.5
    by_sequence = [half, -half, -half, half]
    expected = [a for a, length in zip(by_sequence, LENGTHS, strict=True) for _ in range(length)]
    assert experience.advantages_R.tolist() == pytest.approx(expected, abs=1e-5)
    assert batch.mean_tokens(experience.advantages_R).tolist() == pytest.approx(
        by_sequence, abs=1e-5
    )
    found = token_lag_metrics(batch)
    assert found["training/lag/mean"] == pytest.approx(10 / 12)
    assert (found["training/lag/max"], found["training/lag/share/lag_1"]) == (2.0, 0.25)


def test_rejection_masks_drawn_tokens_beside_given_ones() -> None:
    batch = lay_out(groups(), version=5)
    old_logp_R = batch.rollout_logp_R.clone()
    old_logp_R[torch.tensor([1, 8])] -= 3
    made = experience_of(replace(batch, old_logp_R=old_logp_R), *REJECTION)
    called, plain, opened, other = made.sequences
    assert called.loss_mask == (True, False, False, False, False, True, True, True)
    assert (plain.loss_mask, other.loss_mask) == ((True, True), (True, True, False))
    assert opened.loss_mask == (True, False, False, True)
    kept_ids = [token for token in DRAWN_IDS if token not in (CALL[1], 24)]
    packed = pack(made.sequences, made.columns)
    assert packed.target_R.tolist() == kept_ids


def test_m4_given_tokens_get_no_gradient() -> None:
    batch = lay_out(groups()[:1])
    experience = experience_of(batch)
    config = load_config(RunConfig, [*KEYS]).config
    packed = pack(experience.sequences, experience.columns)
    logp_T = torch.full(packed.token_ids_T.shape, -1.0, requires_grad=True)
    inputs = LossInputs(
        score_R=logp_T[packed.source_R],
        entropy_R=torch.zeros(len(packed.source_R)),
        sequence_R=packed.sequence_R,
        num_sequences=packed.num_sequences,
        columns=packed.columns,
        scale=LossScale(num_tokens=7, num_sequences=2),
    )
    policy_loss(config)(inputs).loss.backward()
    assert logp_T.grad is not None
    # The prompt, then [8, 9, 10, 11, 12, 13, 14] and [16], each of which predicts the next token;
    # the prompt's last token predicts the first token of both responses.
    assert packed.token_ids_T.tolist() == [5, 6, 7, *CALL, *TOOL, 13, 14, 16]
    has_gradient = [position for position, g in enumerate(logp_T.grad.tolist()) if g != 0]
    assert has_gradient == [3, 7, 8, 9, 10], "position 2 has two opposite advantages"


def test_m5_a_fork_is_a_branch_of_its_sample_and_no_sample_of_its_own() -> None:
    straight, forked = lay_out(groups(), version=5), lay_out(forked_groups(), version=5)
    assert torch.equal(forked.sequence_R, straight.sequence_R)
    assert torch.equal(forked.rollout_logp_R, straight.rollout_logp_R)
    assert torch.equal(forked.lag_R, straight.lag_R)
    assert torch.equal(forked.group_N, straight.group_N)
    called = forked.sequences[0]
    (branch,) = called.branches
    assert (list(called.response_ids), called.loss_mask) == (
        [*CALL, *TOOL],
        (True,) * 2 + (False,) * 3,
    )
    assert (list(branch.prompt_ids), branch.loss_mask) == ([5, 6, 7, 9, *TOOL], None)
    assert list(branch.response_ids) == list(ANSWER)
    advantages = [experience_of(batch).advantages_R for batch in (straight, forked)]
    assert torch.equal(*advantages), "the baseline counts samples"
    packed = pack(forked.sequences)
    assert packed.target_R.tolist() == list(DRAWN_IDS) and packed.num_sequences == 4
    starts = packed.segments.prefix_start_S[packed.segments.prefix_length_S > 0].tolist()
    assert starts[:2] == [0, 0], "a branch does not part the responses of a shared prompt"


def test_m5_rejection_reaches_the_tokens_of_a_branch() -> None:
    batch = lay_out(forked_groups(), version=5)
    old_logp_R = batch.rollout_logp_R.clone()
    old_logp_R[torch.tensor([1, 3])] -= 3
    made = experience_of(replace(batch, old_logp_R=old_logp_R), *REJECTION)
    assert made.sequences[0].loss_mask == (True, False, False, False, False)
    assert made.sequences[0].branches[0].loss_mask == (True, False, True)
    kept_ids = [token for token in DRAWN_IDS if token not in (CALL[1], ANSWER[1])]
    assert pack(made.sequences, made.columns).target_R.tolist() == kept_ids


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_m5_means_over_sequences_do_not_see_a_fork(aggregation: str) -> None:
    """With equal log-probs, the loss of a sample is that of its tokens in a line."""
    config = load_config(
        RunConfig, [*KEYS, f"actor_rollout_ref.actor.loss_agg_mode={aggregation}"]
    ).config
    losses: list[float] = []
    for made in (groups(), forked_groups()):
        experience = experience_of(lay_out(made, version=5))
        packed = pack(experience.sequences, experience.columns)
        inputs = LossInputs(
            score_R=packed.target_R * -0.1,
            entropy_R=torch.zeros(len(packed.source_R)),
            sequence_R=packed.sequence_R,
            num_sequences=packed.num_sequences,
            columns=replace(experience.columns, old_logp_R=packed.target_R * -0.11),
            scale=LossScale(num_tokens=12, num_sequences=4),
        )
        losses.append(policy_loss(config)(inputs).loss.item())
    assert losses[0] == losses[1] != 0


def learn(
    folder: Path, made: list[Group], *arguments: str
) -> tuple[dict[str, Tensor], list[UpdateReport], Tensor]:
    """Return gradients and reports of one optimizer step, and the log-probs before it."""
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.module.named_parameters():

        def keep(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()

        parameter.register_post_accumulate_grad_hook(keep)
    engine = SingleDeviceEngine(model, OptimConfig(), total_training_steps=1)
    config = load_config(RunConfig, [*KEYS, *arguments]).config
    given: dict[str, Any] = {
        "config": config,
        "runtime": ImmediateRuntime(),
        "engines": Engines(engine, engine, None, engine),  # type: ignore[arg-type]
        "memory": MemoryFit(),
    }
    context = partial_context(**given)
    batch = lay_out(made, version=5)
    two_steps = load_config(RunConfig, [*KEYS, "actor_rollout_ref.actor.ppo_epochs=2"]).config
    scores = asyncio.run(score_with_policy(replace(context, config=two_steps), batch))
    old_logp_R = scores.old_logp_R
    assert old_logp_R is not None
    experience = assign_credit(batch, config=config, controller=initial_kl_controller(config))
    described = batch_metrics(context, experience, kl_coefficient=0.0)
    num_rewritten = 4 if any(one.trajectory.parents for one in made[0].samples) else 0
    assert described["response_length/mean"] == (8 + 2 + 4 + 3 + num_rewritten) / 4
    return gradients, asyncio.run(update_policy(context, experience)), old_logp_R


def unpacked(folder: Path, made: list[Group]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of the definition, one row at a time, and the log-probs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    half = 2**-0.5 / (1 + 1e-6 / 2**-0.5)
    log_probs: list[Tensor] = []
    losses: list[Tensor] = []
    samples = [one for group in made for one in group.samples]
    rows = [
        (row, advantage)
        for one, advantage in zip(samples, (half, -half, -half, half), strict=True)
        for row in rows_of(one.trajectory)
    ]
    for row, advantage in rows:
        spans = row.spans
        ids = torch.tensor([token for span in spans for token in span.token_ids])
        flags = [span.completion is not None for span in spans for _ in span.token_ids]
        logits = model(input_ids=ids[None]).logits[0] / 0.7
        logp_T = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        drawn_R = logp_T[torch.tensor(flags)[1:]]
        log_probs.append(drawn_R.detach())
        losses.append(-advantage * drawn_R.sum())
    (torch.stack(losses).sum() / len(DRAWN_IDS)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, torch.cat(
        log_probs
    )


@pytest.mark.parametrize(
    ("make", "size"), [(groups, 1), (groups, 3), (groups, 4), (forked_groups, 3)]
)
def test_m4_m5_a_step_is_that_of_each_row_alone_with_its_mask(
    tiny_policy_folder: Path, make: Callable[[], list[Group]], size: int
) -> None:
    limit = f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}"
    gradients, reports, logp_R = learn(tiny_policy_folder, make(), limit)
    expected, expected_logp_R = unpacked(tiny_policy_folder, make())
    torch.testing.assert_close(logp_R, expected_logp_R, rtol=0, atol=2e-6)
    assert len(reports) == 1 and not reports[0].skipped

    def theirs(layer: int, *names: str) -> Tensor:
        found = [expected[f"model.layers.{layer}.{name}"] for name in names]
        return torch.cat(found)

    pairs = {"embedding.weight": expected["model.embed_tokens.weight"]}
    for layer in range(2):
        ours = f"layers.{layer}"
        projections = [f"self_attn.{letter}_proj" for letter in "qkv"]
        for kind in ("weight", "bias"):
            pairs[f"{ours}.qkv.{kind}"] = theirs(layer, *(f"{p}.{kind}" for p in projections))
        pairs[f"{ours}.o.weight"] = theirs(layer, "self_attn.o_proj.weight")
        pairs[f"{ours}.down.weight"] = theirs(layer, "mlp.down_proj.weight")
    for name, gradient in pairs.items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_numbers_beside_the_score_are_columns_with_nan_where_a_sample_has_none() -> None:
    first, second = groups()
    shaped = RewardOutcome(RewardStatus.VALUE, 0.5, {"score": 1.0, "format": 0.25})
    rewards = (shaped, RewardOutcome(RewardStatus.VALUE, 0.75, {"acc": 0.0}))
    samples = tuple(
        replace(one, reward=reward) for one, reward in zip(first.samples, rewards, strict=True)
    )
    failed = RewardOutcome(RewardStatus.ERROR, math.nan)
    others = tuple(replace(one, reward=failed) for one in second.samples)
    columns = lay_out([replace(first, samples=samples), replace(second, samples=others)]).parts_N
    found = {name: column_N.nan_to_num(-1.0).tolist() for name, column_N in columns.items()}
    missing = [-1.0] * len(others)
    assert found == {
        "score": [1.0, 0.75, *missing],
        "format": [0.25, -1.0, *missing],
        "acc": [-1.0, 0.0, *missing],
    }
