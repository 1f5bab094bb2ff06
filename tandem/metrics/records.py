# SPDX-License-Identifier: Apache-2.0
"""Rollouts on disk: a few of each step for the report, and verl's dumps of all of them.

``rollouts.jsonl`` has one object per recorded sample, with its tokens as text and their log-probs;
an episode of several turns has its spans as well, and a prompt with pictures their thumbnails.
The samples of a step are chosen evenly over the batch without randomness: a resumed run records the
same ones. The dumps (``trainer.rollout_data_dir``, ``trainer.validation_data_dir``) are
``<step>.jsonl`` with verl's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.metrics.jsonl import JsonLinesFile, encode
from tandem.metrics.thumbnails import thumbnail
from tandem.types import EpisodeRecord, Group, Prompt, RewardStatus, Sample, Trajectory

ROLLOUTS_FILE = "rollouts.jsonl"
_MAX_PICTURES = 4
"""The thumbnails of a recorded sample, of the first pictures of its prompt."""


class RolloutRecorder:
    """A recorder that appends some rollouts of each training step to ``rollouts.jsonl``."""

    def __init__(
        self,
        run_folder: Path,
        *,
        max_per_step: int,
        token_texts: Callable[[Sequence[int]], list[str]],
        keep_through_step: int,
    ) -> None:
        """Open the file and remove the records of steps after ``keep_through_step``.

        Args:
            max_per_step: the maximum number of recorded samples per step.
            token_texts: a function that returns the text of each token id, special tokens included.
        """
        self._max_per_step = max_per_step
        self._token_texts = token_texts
        path = run_folder / ROLLOUTS_FILE
        self._file = JsonLinesFile(path, keep_through_step=keep_through_step)

    def write(self, step: int, groups: Sequence[Group], *, advantages: Sequence[float]) -> None:
        """Record some samples of a step. Raise OSError if the disk is full.

        Args:
            advantages: the advantage of each sample in the order of ``groups`` (the mean over its
                tokens if they differ).
        """
        samples = [(group.prompt, sample) for group in groups for sample in group.samples]
        if len(advantages) != len(samples):
            raise ValueError(
                f"advantages has {len(advantages)} entries: it must have one for each of the "
                f"{len(samples)} samples. Pass them in the order of the groups."
            )
        for index in spread(len(samples), self._max_per_step, offset=step):
            prompt, sample = samples[index]
            record = self._record(prompt, sample, step=step, advantage=advantages[index])
            self._file.append(record)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def _record(
        self, prompt: Prompt, sample: Sample, *, step: int, advantage: float
    ) -> dict[str, Any]:
        trajectory = sample.trajectory
        completions = trajectory.completions
        tokens = self._token_texts(trajectory.response_ids)
        record = {
            "step": step,
            "sample_id": trajectory.sample_id,
            "weights_version": completions[0].weights_version,
            "switches": _switches(trajectory),
            "data_source": prompt.data_source,
            "prompt": prompt.text,
            "response": sample.text,
            "ground_truth": prompt.ground_truth,
            "score": _score(sample),
            "status": sample.reward.status.value,
            "detail": sample.reward.detail,
            "extra": {**sample.reward.extra, **sample.reward.texts},
            "advantage": advantage,
            "finish_reason": completions[-1].finish_reason.value,
            "tokens": tokens,
            "log_probs": _log_probs(trajectory),
        }
        if prompt.pictures:
            record["pictures"] = [
                thumbnail(x.pixels, width=x.columns * x.side, height=x.rows * x.side)
                for x in prompt.pictures[:_MAX_PICTURES]
            ]
        if trajectory.episode is None:
            return record
        return record | {
            "episode": _course(trajectory.episode),
            "spans": _spans(trajectory, trajectory.episode, tokens=tokens),
        }


def _switches(trajectory: Trajectory) -> list[list[int]]:
    """Return [index into the response, version] of each change of the drawing version."""
    switches: list[list[int]] = []
    index, current = 0, trajectory.completions[0].weights_version
    for span in trajectory.response_spans:
        runs = () if span.completion is None else span.completion.version_runs
        begin = index
        for version, length in runs:
            if version != current:
                switches.append([begin, version])
            begin, current = begin + length, version
        index += len(span.token_ids)
    return switches


def _course(episode: EpisodeRecord) -> dict[str, Any]:
    return {
        "end": episode.end.value,
        "detail": episode.detail,
        "num_turns": episode.num_turns,
        "calls": [status.value for status in episode.statuses],
        "rewards": list(episode.rewards),
        "wait_s": _rounded(sum(episode.waits_s)),
        "forks": list(episode.forks),
    }


def _spans(
    trajectory: Trajectory, episode: EpisodeRecord, *, tokens: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the spans of the response in order; their tokens follow one another in ``tokens``.

    A drawn span has the versions that drew it, with the number of tokens of each. A given one has
    the role of its first message and the seconds that the policy waited for it. A span that does
    not follow the one before it begins a branch, and has the index of the one that it follows; -1
    is the prompt.
    """
    roles = _roles_of_answers(episode)
    spans: list[dict[str, Any]] = []
    num_drawn, begin = 0, 0
    num_before = len(trajectory.spans) - len(trajectory.response_spans)
    for number, span in enumerate(trajectory.response_spans):
        end = begin + len(span.token_ids)
        fields: dict[str, Any] = {"role": "assistant", "drawn": span.completion is not None}
        if span.completion is not None:
            num_drawn += 1
            fields["versions"] = [list(run) for run in span.completion.version_runs]
        else:
            answer = num_drawn - 1
            fields["role"] = roles[answer] if answer < len(roles) else "given"
            if answer < len(episode.waits_s):
                fields["wait_s"] = _rounded(episode.waits_s[answer])
        parent = trajectory.parents[num_before + number] if trajectory.parents else None
        if parent is not None and parent != num_before + number - 1:
            fields["follows"] = max(parent - num_before, -1)
        spans.append({**fields, "num_tokens": end - begin, "text": "".join(tokens[begin:end])})
        begin = end
    return spans


def _roles_of_answers(episode: EpisodeRecord) -> list[str]:
    """Return the role of the first message after each turn of the policy."""
    messages = [str(message["role"]) for message in episode.messages]
    pairs = zip(messages, messages[1:], strict=False)
    return [after for turn, after in pairs if turn == "assistant" and after != "assistant"]


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _log_probs(trajectory: Trajectory) -> list[float | None]:
    """Return the log-prob of each response token; None for given tokens."""
    values: list[float | None] = []
    for span in trajectory.response_spans:
        if span.completion is None:
            values += [None] * len(span.token_ids)
        else:
            values += [float(f"{value:.5g}") for value in span.completion.log_probs]
    return values


def spread(count: int, limit: int, *, offset: int) -> list[int]:
    """Choose at most ``limit`` of ``count`` indices, evenly spaced; ``offset`` rotates them."""
    if limit <= 0 or count == 0:
        return []
    if count <= limit:
        return list(range(count))
    stride = count / limit
    shift = offset % int(stride)
    return [int(position * stride) + shift for position in range(limit)]


def dump_samples(folder: Path, step: int, *, groups: Sequence[Group]) -> Path:
    """Write all samples of a step as verl does, replacing an earlier dump of that step.

    Each line has ``input``, ``output``, ``gts``, ``score``, ``step`` and the other values of the
    reward; the score of a failed reward is null. Raise OSError if the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    lines = [
        encode(_dump_record(group.prompt, sample, step=step)) + "\n"
        for group in groups
        for sample in group.samples
    ]
    path.write_text("".join(lines), encoding="ascii")
    return path


def _dump_record(prompt: Prompt, sample: Sample, *, step: int) -> Mapping[str, Any]:
    record = {
        "input": prompt.text,
        "output": sample.text,
        "gts": prompt.ground_truth,
        "score": _score(sample),
        "step": step,
    }
    extra: dict[str, Any] = {**sample.reward.extra, **sample.reward.texts}
    if sample.reward.prediction is not None:
        extra["pred"] = sample.reward.prediction
    return record | {name: value for name, value in extra.items() if name not in record}


def _score(sample: Sample) -> float | None:
    return sample.reward.score if sample.reward.status is RewardStatus.VALUE else None
