# SPDX-License-Identifier: Apache-2.0
"""Routes of a rollout, and their replay by the trainer (MO7, MO8, MO23)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from tandem.data.packing import TrainSequence, pack
from tandem.engines.steps import score
from tandem.models.routing import expert_layers
from tandem.pipeline.batch import sequence_of
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.types import GenerationRequest, Prompt, SamplingParams, Span, Trajectory
from tests.fakes.draining import drain_by_sample
from tests.fakes.scoring import score_batch
from tests.unit.models.tiny_models import EXPERTS, open_fp32, write_hf

PROMPTS = ((3, 5, 7), (11,), (20, 21, 22, 23, 24, 25))
SAMPLING = SamplingParams(1.0, 1.0, -1, max_new_tokens=9)
CONFIG = NativeRolloutConfig(
    seed=1,
    eos_ids=(0,),
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_cache_bytes=1 << 24,
    records_routes=True,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a model whose first layer is dense. Do not change it."""
    folder = tmp_path_factory.mktemp("model")
    write_hf(EXPERTS["dots1"](), folder)
    return open_fp32(folder)


def requests():
    return [GenerationRequest((2 * i, 2 * i + 1), ids, SAMPLING) for i, ids in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def sequences(model):
    """Return two samples of each prompt, generated four rows at a time."""
    engine = NativeRolloutEngine(model.decoder, CONFIG)
    engine.add(requests())
    found = drain_by_sample(engine)
    return [
        TrainSequence(i // 2, PROMPTS[i // 2], found[i].token_ids, routes=found[i].routes)
        for i in sorted(found)
    ]


def scored(model, batch):
    return score_batch(model, batch, temperature=1.0, with_entropy=False).score_R


def gradients(model, batch):
    model.module.zero_grad()
    scored(model, batch).sum().backward()
    return {name: x.grad for name, x in model.module.named_parameters() if x.grad is not None}


def test_mo7_a_row_belongs_to_each_token_that_was_fed(model, sequences):
    layers = expert_layers(model.decoder.config.experts, model.decoder.config.num_layers)
    assert layers == (1,)
    for sequence in sequences:
        num_fed = len(sequence.prompt_ids) + len(sequence.response_ids) - 1
        assert sequence.routes.shape == (num_fed, 1, 3)
        assert sequence.routes.dtype == np.uint8


def test_mo7_replayed_routes_are_those_that_routers_choose(model, sequences):
    batch = pack(sequences)
    free = replace(batch, routes_TLK=None)
    assert len(batch.routes_TLK) == len(batch.token_ids_T)
    with torch.no_grad():
        assert torch.equal(scored(model, batch), scored(model, free))
        metrics = model.router_metrics()
        assert "actor/router/replay_overlap" not in metrics
        scored(model, batch)
    assert model.router_metrics()["actor/router/replay_overlap"] == 1


def test_mo7_routes_of_several_turns_are_those_of_the_turns_that_fed_the_tokens(model):
    """Draw three turns with given tokens between and behind them; replaying changes nothing."""
    engine = NativeRolloutEngine(model.decoder, CONFIG)
    prompt = Prompt(0, 0, PROMPTS[0], "", "", None)
    spans, given = [Span(PROMPTS[0])], ((30, 31), (40,), (41, 42))
    for tokens in given:
        ids = tuple(chain.from_iterable(span.token_ids for span in spans))
        first = len(ids) - len(PROMPTS[0])
        sampling = replace(SAMPLING, max_new_tokens=4)
        engine.add([GenerationRequest((7,), ids, sampling, first_index=first, continues=True)])
        completion = drain_by_sample(engine)[7]
        spans += [Span(completion.token_ids, completion), Span(tokens)]
    sequence = sequence_of(prompt, Trajectory(7, tuple(spans)))
    assert len(sequence.routes) == len(PROMPTS[0]) + len(sequence.response_ids) - 1
    batch = pack([sequence])
    with torch.no_grad():
        replayed, free = scored(model, batch), scored(model, replace(batch, routes_TLK=None))
    drawn = torch.tensor(sequence.loss_mask)
    assert drawn.sum() == sum(len(span.token_ids) for span in spans[1::2])
    # The given tokens behind the last turn repeat a row. They carry no loss, but their experts then
    # have other numbers of tokens, and a product may round by that number.
    torch.testing.assert_close(replayed, free, rtol=0, atol=1e-5)
    lost = replace(spans[3].completion, routes=None)
    spans[3] = Span(lost.token_ids, lost)
    assert sequence_of(prompt, Trajectory(7, tuple(spans))).routes is None


def test_mo7_wrong_routes_change_log_probs_and_the_router_has_a_gradient(model, sequences):
    batch = pack(sequences)
    wrong = replace(batch, routes_TLK=(batch.routes_TLK + 1) % 8)
    with torch.no_grad():
        assert (scored(model, wrong) - scored(model, batch)).abs().max() > 1e-3
    assert gradients(model, wrong)["layers.1.experts.router"].abs().max() > 0


def test_mo8_the_pass_for_old_log_probs_records_what_an_update_replays(model, sequences):
    """R2: the routers choose in the recording pass, and replaying their choices changes nothing."""
    batch = replace(pack(sequences), routes_TLK=None)
    recording = score(model, replace(batch, with_routes=True), temperature=1.0)
    assert recording.routes_TLK.dtype == torch.uint8
    assert recording.routes_TLK.shape == (len(batch.token_ids_T), 1, 3)
    assert torch.equal(recording.score_R, score(model, batch, temperature=1.0).score_R)
    assert score(model, batch, temperature=1.0).routes_TLK is None
    again = score(model, replace(batch, routes_TLK=recording.routes_TLK), temperature=1.0)
    assert torch.equal(again.score_R, recording.score_R)
    assert model.router_metrics()["actor/router/replay_overlap"] == 1


def test_mo7_recomputation_and_shared_prompts_change_no_gradient(model, sequences):
    batch = pack(sequences)
    wrong = replace(batch, routes_TLK=(batch.routes_TLK + 1) % 8)
    kept = gradients(model, wrong)
    for granularity in ("pointwise", "full"):
        model.set_gradient_checkpointing(True, granularity)
        again = gradients(model, wrong)
        assert all(torch.equal(again[name], x) for name, x in kept.items())
    model.set_gradient_checkpointing(False)
    apart = [replace(sequence, prompt_key=i) for i, sequence in enumerate(sequences)]
    alone = gradients(model, pack(apart))
    shared = gradients(model, batch)
    for name, x in shared.items():
        torch.testing.assert_close(alone[name], x, rtol=0, atol=1e-5 * float(x.abs().max()))


def test_mo5_ties_go_to_the_same_experts_in_rollout_and_trainer(tmp_path):
    """All logits are equal in every token; one row or four rows are fed, and then whole prompts."""
    write_hf(EXPERTS["dots1"](), tmp_path)
    tied = open_fp32(tmp_path)
    with torch.no_grad():
        for name in ("router", "correction"):
            getattr(tied.decoder.layers[1].experts, name).zero_()
    engine = NativeRolloutEngine(tied.decoder, CONFIG)
    engine.add(requests())
    found = drain_by_sample(engine)
    batch = pack(
        [
            TrainSequence(i, PROMPTS[i // 2], found[i].token_ids, routes=found[i].routes)
            for i in sorted(found)
        ]
    )
    free = replace(batch, routes_TLK=None, with_routes=True)
    assert torch.equal(score(tied, free, temperature=1.0).routes_TLK, batch.routes_TLK)


def test_a_batch_replays_only_if_all_its_sequences_have_routes(sequences):
    assert pack([*sequences[:1], replace(sequences[1], routes=None)]).routes_TLK is None


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_mo23_a_row_keeps_the_route_under_which_the_next_token_was_drawn(keeps_cache, tmp_path):
    """Change the router in the middle of responses: rows that were fed before stay as they were."""
    write_hf(EXPERTS["dots1"](), tmp_path)
    decoder = open_fp32(tmp_path).decoder
    sampling = replace(SAMPLING, ignore_eos=True)
    config = replace(CONFIG, keeps_cache=keeps_cache)

    def routes_of(change_after: int | None) -> dict:
        engine = NativeRolloutEngine(decoder, config)
        engine.add([GenerationRequest((0,), PROMPTS[0], sampling)])
        done = engine.advance(change_after)
        if change_after is not None:
            assert not done
            with torch.no_grad():
                decoder.layers[1].experts.correction.copy_(torch.arange(8) * 10.0)
            engine.set_weights_version(1)
            done = engine.advance()
        return done[0].routes

    before, after = routes_of(None), routes_of(5)
    num_kept = len(PROMPTS[0]) + 5  # the prompt, and one token in each step
    assert np.array_equal(before[:num_kept], after[:num_kept])
    assert all(set(row) == {5, 6, 7} for row in after[num_kept:, 0].tolist())
