# SPDX-License-Identifier: Apache-2.0
"""The dense engine generates with pictures as transformers does, and as the trainer scores."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tandem.data.packing import TrainSequence, pack
from tandem.models.folder import check_folder, freeze_tower, open_model, open_part
from tandem.models.parallel import WHOLE
from tandem.models.vision import VisionTower
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import GenerationRequest, SamplingParams
from tests.fakes.scoring import score_batch
from tests.fakes.tiny_vision import FAMILIES, VOCAB, draw_prompt, theirs, write_seeing

GREEDY = SamplingParams(0.0, 1.0, -1, 64, ignore_eos=True)
SHORT = replace(GREEDY, max_new_tokens=24)
SAMPLED = replace(GREEDY, temperature=1.0, max_new_tokens=12)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = write_seeing(request.param, folder)
    ours = open_model(str(folder), dtype=torch.float32, device="cpu")
    return SimpleNamespace(theirs=model, ours=ours, folder=folder)


def new_engine(decoder, *, rows=64):
    config = NativeRolloutConfig(
        seed=1,
        eos_ids=(VOCAB - 1,),
        max_num_seqs=rows,
        max_num_batched_tokens=60,
        max_cache_bytes=1 << 26,
    )
    return NativeRolloutEngine(decoder, config)


def finish(engine, steps=None):
    done = []
    while engine._scheduler.has_work:
        done += engine.advance(steps)
    return {completion.sample_id: completion for completion in done}


def make_prompts():
    rng = random.Random(3)
    sizes = ([(3, 2), (2, 5)], [], [(4, 4)])
    prompts, first_id = [], VOCAB
    for one in sizes:
        prompts.append(draw_prompt(rng, one, first_id=first_id))
        first_id += sum(rows * columns for rows, columns in one)
    return prompts


def test_VL6_greedy_tokens_are_those_of_transformers(case):  # noqa: N802
    """VL6: 64 tokens, whose log-probs differ by at most 1e-4."""
    engine = new_engine(case.ours.decoder)
    prompts = make_prompts()
    engine.add(
        [
            GenerationRequest((i,), tuple(ids), GREEDY, pictures=pictures)
            for i, (ids, pictures) in enumerate(prompts)
        ]
    )
    done = finish(engine)
    tower = case.ours.decoder.tower
    for i, (ids, pictures) in enumerate(prompts):
        patches = None
        if pictures:
            patches = torch.cat([tower._patches(x, torch.device("cpu")) for x in pictures])
        given = theirs(case.theirs, ids, pictures, patches=patches)
        given.pop("position_ids"), given.pop("delta")
        kinds = (given["input_ids"] == 5).long()
        made = case.theirs.generate(
            **given,
            mm_token_type_ids=kinds,
            attention_mask=torch.ones_like(kinds),
            do_sample=False,
            max_new_tokens=64,
            min_new_tokens=64,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = made.sequences[0, len(ids) :]
        assert tokens.tolist() == list(done[i].token_ids)
        log_probs = torch.log_softmax(torch.cat(made.logits), -1)[torch.arange(64), tokens]
        assert np.abs(log_probs.numpy() - done[i].log_probs).max() < 1e-4


def test_VL7_log_probs_are_those_of_the_trainer_also_after_new_weights(case):  # noqa: N802
    """VL7: samples that wait for rows see the pictures, and rows that are computed again."""
    engine = new_engine(case.ours.decoder, rows=4)
    prompts = make_prompts()
    requests = [
        GenerationRequest(tuple(range(10 * i, 10 * i + 3)), tuple(ids), SAMPLED, pictures=pictures)
        for i, (ids, pictures) in enumerate(prompts)
    ]
    engine.add(requests)
    done = {c.sample_id: c for c in engine.advance(4)}
    engine.set_weights_version(1)  # the weights are the same: so are the log-probs
    done |= finish(engine, 3)
    assert len(done) == 9
    sequences = [
        TrainSequence(i, r.prompt_ids, done[sample].token_ids, pictures=r.pictures)
        for i, r in enumerate(requests)
        for sample in r.sample_ids
    ]
    with torch.no_grad():
        score = score_batch(case.ours, pack(sequences), temperature=1.0, with_entropy=False)
    drawn = np.concatenate([done[s].log_probs for r in requests for s in r.sample_ids])
    assert np.abs(score.score_R.numpy() - drawn).max() < 1e-5


def test_VL10_a_frozen_tower_looks_once_and_has_no_gradient(case, monkeypatch):  # noqa: N802
    """VL10: generation and two passes of training look at each picture once."""
    looked = []
    look = VisionTower.look

    def counted(tower, pictures, **how):
        looked.extend(picture.first_id for picture in pictures)
        return look(tower, pictures, **how)

    monkeypatch.setattr(VisionTower, "look", counted)
    folder = freeze_tower(check_folder(str(case.folder)))
    frozen = open_part(folder, WHOLE, dtype=torch.float32, device="cpu")
    prompts = [prompt for prompt in make_prompts() if prompt[1]]
    engine = new_engine(frozen.decoder)
    engine.add(
        [GenerationRequest((i,), tuple(p), SHORT, pictures=x) for i, (p, x) in enumerate(prompts)]
    )
    done = finish(engine)
    sequences = [
        TrainSequence(i, tuple(p), done[i].token_ids, pictures=x)
        for i, (p, x) in enumerate(prompts)
    ]
    for _ in range(2):
        score = score_batch(frozen, pack(sequences), temperature=1.0, with_entropy=False).score_R
        score.sum().backward()
    assert sorted(looked) == sorted(x.first_id for _, pictures in prompts for x in pictures)
    assert all(x.grad is None for x in frozen.decoder.tower.parameters())
    assert frozen.decoder.layers[0].qkv.weight.grad is not None
    trained = score_batch(case.ours, pack(sequences), temperature=1.0, with_entropy=False).score_R
    assert (trained - score).abs().max() < 1e-6  # the order of sums in the tower differs
