# SPDX-License-Identifier: Apache-2.0
"""Recorded rollouts: which ones, what of them, and verl's dumps."""

import base64
import io
import json
import math
import random
from dataclasses import replace

import pytest
from PIL import Image

from tandem.metrics.jsonl import BEFORE_FIRST_STEP, read_records
from tandem.metrics.records import ROLLOUTS_FILE, RolloutRecorder, dump_samples, spread
from tandem.pictures import Picture
from tandem.types import (
    Completion,
    EpisodeEnd,
    EpisodeRecord,
    FinishReason,
    Group,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Span,
    ToolStatus,
    Trajectory,
)


def _groups(num_groups, num_samples):
    return [
        Group(
            prompt=Prompt(
                uid=uid,
                row=uid,
                token_ids=(1, 2),
                text=f"question {uid}",
                data_source="gsm8k",
                ground_truth=str(uid),
            ),
            samples=tuple(_sample(uid * num_samples + k) for k in range(num_samples)),
        )
        for uid in range(num_groups)
    ]


def _sample(sample_id):
    failed = sample_id == 1
    completion = Completion(
        sample_id=sample_id,
        token_ids=(10, 11),
        log_probs=(-0.123456789, -2.0),
        finish_reason=FinishReason.LENGTH,
        weights_version=4,
        switches=((1, 5),),
    )
    return Sample(
        trajectory=Trajectory.of_single_turn((1, 2), completion),
        text=f"answer {sample_id}",
        reward=RewardOutcome(
            status=RewardStatus.TIMEOUT if failed else RewardStatus.VALUE,
            score=math.nan if failed else 1.0,
            extra={} if failed else {"acc": 1.0},
            detail="no result within 5 s" if failed else "",
        ),
    )


def _recorder(folder, max_per_step, *, keep_through_step=BEFORE_FIRST_STEP):
    return RolloutRecorder(
        folder,
        max_per_step=max_per_step,
        token_texts=lambda ids: [f"<{token}>" for token in ids],
        keep_through_step=keep_through_step,
    )


def test_a_record_has_what_the_report_shows(tmp_path):
    recorder = _recorder(tmp_path, 10)
    recorder.write(3, _groups(1, 2), advantages=[0.7, 0.0])
    recorder.close()

    first, failed = read_records(tmp_path / ROLLOUTS_FILE)
    assert first == {
        "step": 3,
        "sample_id": 0,
        "weights_version": 4,
        "switches": [[1, 5]],
        "data_source": "gsm8k",
        "prompt": "question 0",
        "response": "answer 0",
        "ground_truth": "0",
        "score": 1.0,
        "status": "value",
        "detail": "",
        "extra": {"acc": 1.0},
        "advantage": 0.7,
        "finish_reason": "length",
        "tokens": ["<10>", "<11>"],
        "log_probs": [-0.12346, -2.0],
    }
    assert (failed["score"], failed["status"]) == (None, "timeout")


def test_a_record_has_small_copies_of_the_pictures_of_its_prompt(tmp_path):
    rng = random.Random(1)
    small = Picture(100, rows=1, columns=2, side=8, pixels=rng.randbytes(3 * 16 * 8))
    large = Picture(200, rows=10, columns=30, side=28, pixels=rng.randbytes(3 * 840 * 280))
    (group,) = _groups(1, 1)
    prompt = replace(group.prompt, pictures=(small, large))
    recorder = _recorder(tmp_path, 1)
    recorder.write(1, [replace(group, prompt=prompt)], advantages=[0.0])
    recorder.close()
    (record,) = read_records(tmp_path / ROLLOUTS_FILE)
    kinds, images = [], []
    for address in record["pictures"]:
        kind, content = address.split(";base64,")
        kinds.append(kind)
        images.append(Image.open(io.BytesIO(base64.b64decode(content))))
    assert kinds == ["data:image/png", "data:image/jpeg"]
    assert images[0].tobytes() == small.pixels
    assert images[1].size == (112, 37)


def test_a_record_of_several_turns_tells_given_tokens_and_versions(tmp_path):
    recorder = _recorder(tmp_path, 1)
    turns = [
        Completion(3, (10, 11), (-1.0, -2.0), FinishReason.STOP, 4, ((1, 5),)),
        Completion(3, (13,), (-3.0,), FinishReason.LENGTH, 6),
    ]
    first, second = (Span(turn.token_ids, turn) for turn in turns)
    trajectory = Trajectory(3, (Span((1, 2)), first, Span((12,)), second))
    (group,) = _groups(1, 1)
    sample = replace(group.samples[0], trajectory=trajectory)
    recorder.write(1, [replace(group, samples=(sample,))], advantages=[0.0])
    recorder.close()
    (record,) = read_records(tmp_path / ROLLOUTS_FILE)
    assert record["tokens"] == ["<10>", "<11>", "<12>", "<13>"]
    assert record["log_probs"] == [-1.0, -2.0, None, -3.0]
    assert (record["weights_version"], record["switches"]) == (4, [[1, 5], [3, 6]])
    assert record["finish_reason"] == "length"
    assert "spans" not in record, "no environment took part"


def test_a_record_of_an_episode_has_its_spans_with_roles_versions_and_seconds(tmp_path):
    recorder = _recorder(tmp_path, 1)
    turns = [
        Completion(3, (10, 11), (-1.0, -2.0), FinishReason.STOP, 4, ((1, 5),)),
        Completion(3, (13,), (-3.0,), FinishReason.STOP, 6),
        Completion(3, (15,), (-4.0,), FinishReason.STOP, 6),
    ]
    first, second, third = (Span(turn.token_ids, turn) for turn in turns)
    spans = (Span((1, 2)), first, Span((12,)), second, Span((14, 16)), third)
    roles = ("assistant", "tool", "tool", "assistant", "user", "assistant")
    episode = EpisodeRecord(
        EpisodeEnd.DONE,
        messages=tuple({"role": role, "content": ""} for role in roles),
        statuses=(ToolStatus.OK, ToolStatus.TIMEOUT),
        rewards=(0.5,),
        num_turns=6,
        waits_s=(1.5, 0.25),
    )
    (group,) = _groups(1, 1)
    sample = replace(group.samples[0], trajectory=Trajectory(3, spans, episode))
    recorder.write(1, [replace(group, samples=(sample,))], advantages=[0.0])
    recorder.close()
    (record,) = read_records(tmp_path / ROLLOUTS_FILE)
    drawn = {"role": "assistant", "drawn": True}
    assert record["spans"] == [
        {**drawn, "versions": [[4, 1], [5, 1]], "num_tokens": 2, "text": "<10><11>"},
        {"role": "tool", "drawn": False, "wait_s": 1.5, "num_tokens": 1, "text": "<12>"},
        {**drawn, "versions": [[6, 1]], "num_tokens": 1, "text": "<13>"},
        {"role": "user", "drawn": False, "wait_s": 0.25, "num_tokens": 2, "text": "<14><16>"},
        {**drawn, "versions": [[6, 1]], "num_tokens": 1, "text": "<15>"},
    ]
    assert record["episode"] == {
        "end": "done",
        "detail": "",
        "num_turns": 6,
        "calls": ["ok", "timeout"],
        "rewards": [0.5],
        "wait_s": 1.75,
        "forks": [],
    }


def test_the_first_span_of_a_branch_tells_what_it_follows(tmp_path):
    recorder = _recorder(tmp_path, 1)
    turns = [Completion(3, (n,), (-1.0,), FinishReason.STOP, 4) for n in (10, 12, 14)]
    first, second, third = (Span(turn.token_ids, turn) for turn in turns)
    spans = (Span((1, 2)), first, Span((11,)), second, Span((13,)), third)
    episode = EpisodeRecord(EpisodeEnd.DONE, forks=("rendered",))
    (group,) = _groups(1, 1)
    for parent, follows in ((1, 0), (0, -1)):
        forked = Trajectory(3, spans, episode, (-1, 0, 1, 2, parent, 4))
        sample = replace(group.samples[0], trajectory=forked)
        recorder.write(1, [replace(group, samples=(sample,))], advantages=[0.0])
        record = read_records(tmp_path / ROLLOUTS_FILE)[-1]
        told = [span.get("follows") for span in record["spans"]]
        assert told == [None, None, None, follows, None]
    recorder.close()


def test_a_bounded_number_is_recorded_and_resume_repeats_it(tmp_path):
    groups = _groups(8, 4)
    for folder, runs in (("whole", [(1, 2, 3)]), ("resumed", [(1, 2, 3), (2, 3)])):
        for run in runs:
            recorder = _recorder(tmp_path / folder, 5, keep_through_step=run[0] - 1)
            for step in run:
                recorder.write(step, groups, advantages=[0.0] * 32)
            recorder.close()

    whole = tmp_path / "whole" / ROLLOUTS_FILE
    assert whole.read_bytes() == (tmp_path / "resumed" / ROLLOUTS_FILE).read_bytes()
    assert [record["step"] for record in read_records(whole)] == [1] * 5 + [2] * 5 + [3] * 5


def test_advantages_must_match(tmp_path):
    recorder = _recorder(tmp_path, 5)
    with pytest.raises(ValueError, match="2 samples"):
        recorder.write(1, _groups(1, 2), advantages=[0.0])
    recorder.close()


@pytest.mark.parametrize(
    ("count", "limit", "offset", "expected"),
    [
        (3, 5, 1, [0, 1, 2]),
        (8, 2, 0, [0, 4]),
        (8, 2, 3, [3, 7]),
        (8, 2, 4, [0, 4]),
        (10, 4, 1, [1, 3, 6, 8]),
        (10, 0, 0, []),
        (0, 4, 0, []),
    ],
)
def test_spread_chooses_numbers_at_equal_distances(count, limit, offset, expected):
    assert spread(count, limit, offset=offset) == expected


def test_spread_stays_inside_and_never_repeats():
    for count in range(1, 40):
        for limit in range(1, 12):
            for offset in range(7):
                chosen = spread(count, limit, offset=offset)
                assert len(set(chosen)) == len(chosen) == min(count, limit)
                assert 0 <= min(chosen) <= max(chosen) < count


def test_dump_has_verls_fields(tmp_path):
    path = dump_samples(tmp_path / "dumps", 7, groups=_groups(1, 2))

    assert path.name == "7.jsonl"
    first, failed = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {
        "input": "question 0",
        "output": "answer 0",
        "gts": "0",
        "score": 1.0,
        "step": 7,
        "acc": 1.0,
    }
    assert failed["score"] is None
