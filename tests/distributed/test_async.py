# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs of several processes, as a user starts them: acceptance tests 4, 8, 10, 11 and
22. What needs many timings is tested under the virtual clock (``tests/sim``).
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.data.tokenizer import TextCodec, load_codec
from tandem.metrics.trace import TRACE_FILE, read_trace
from tandem.quickstart.word_problems import WORD_PROBLEMS
from tests.chaos.processes import MARK, none_left
from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    repeatable,
    train_arguments,
    write_prompts,
)

LAG = 2
NUM_BATCHES = 10
"""Of the training data."""

SLOW = (
    "data.max_response_length=80",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.max_num_seqs=5",
)
"""Generation takes longer than training, and a response more than one bounded advance, so that
weights change within responses."""

SETTINGS = (
    "trainer.device=cpu",
    "trainer.total_training_steps=null",
    "trainer.total_epochs=1",
    "trainer.save_freq=1",
    "trainer.test_freq=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
ASYNCHRONOUS = ("trainer.async_pipeline=True", f"trainer.generate_ahead_steps={LAG}")
ROUNDS = (*ASYNCHRONOUS, "trainer.deterministic_async=True")
HALVES = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.hybrid_engine=False")
APART = (
    "trainer.n_gpus_per_node=3",
    "trainer.separated_node_tasks=[[logp,actor-train],ref_logp,generate]",
    "trainer.separated_node_ratios=[0.34,0.33,0.33]",
)
WITH_ROLLOUT = (
    "trainer.n_gpus_per_node=3",
    "trainer.separated_node_tasks=[[logp,actor-train],[ref_logp,generate]]",
    "trainer.separated_node_ratios=[0.34,0.66]",
)
IN_TURNS = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[logp,actor-train,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "asynchronous": (*SETTINGS, *SLOW, *ASYNCHRONOUS, *APART, "trainer.save_freq=3"),
    "staged": (
        *(*SETTINGS, *SLOW, *ASYNCHRONOUS, *HALVES),
        "actor_rollout_ref.rollout.enable_param_async=True",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
    ),
    "turns": (*SETTINGS, *SLOW, *ASYNCHRONOUS, *IN_TURNS),
    "turns of two": (*SETTINGS, *SLOW, *ASYNCHRONOUS, *IN_TURNS, "trainer.n_gpus_per_node=2"),
    "turns, cache kept": (
        *(*SETTINGS, *SLOW, *ASYNCHRONOUS, *IN_TURNS),
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.partial_rollout=keep_cache",
    ),
    "in turn": (*SETTINGS, *HALVES),
    "no lag": (*SETTINGS, *HALVES, "trainer.async_pipeline=True"),
    "rounds": (*SETTINGS, *ROUNDS, *HALVES),
    "rounds, apart": (*SETTINGS, *ROUNDS, *APART),
    "rounds, with rollout": (*SETTINGS, *ROUNDS, *WITH_ROLLOUT),
}
DEEP = ("staged", "turns of two", "turns, cache kept")
WITH_A_LAG = (
    "asynchronous",
    "turns",
    *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP),
)
Run = Callable[[str], Path]


def train(
    material: Material, folder: Path, *overrides: str, cluster: Conditions | None = None
) -> Path:
    """The folder of a run that ended well, and left no process behind if it had its own cluster."""
    mark = uuid.uuid4().hex
    conditions = cluster or Conditions(environment={MARK: mark})
    arguments = train_arguments(material, folder / "run", *overrides)
    ended = run_command(arguments, folder=folder, conditions=conditions)
    assert ended.code == 0, ended.stderr
    assert cluster or none_left(mark)
    return folder / "run"


@pytest.fixture(scope="module")
def finished(
    material: Material, cluster: Conditions, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """The folder of one of ``RUNS``, made when it is first asked for."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("async")
        own = name in ("no lag", "turns")
        return train(material, folder, *RUNS[name], cluster=None if own else cluster)

    return run


def assert_same(one: Path, other: Path) -> None:
    """Metrics and weights are the same bit by bit."""
    assert repeatable(metrics_of(one)) == repeatable(metrics_of(other))
    last = f"global_step_{NUM_BATCHES}/actor"
    files = sorted((one / last).glob("*.distcp"))
    assert files
    for file in files:
        assert (other / last / file.name).read_bytes() == file.read_bytes()


def test_04_no_lag_is_the_synchronous_run_bit_by_bit(finished: Run) -> None:
    assert_same(finished("in turn"), finished("no lag"))


@pytest.mark.deep
def test_each_generating_process_is_seen_by_itself(material: Material, tmp_path: Path) -> None:
    run = train(
        material,
        tmp_path,
        *ASYNCHRONOUS,
        "trainer.device=cpu",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.n_gpus_per_node=3",
        "trainer.separated_node_tasks=[[logp,actor-train],generate]",
        "trainer.separated_node_ratios=[0.34,0.66]",
    )
    events = read_trace(run / TRACE_FILE)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    busy_s: Counter[str] = Counter()
    for event in events:
        if event["ph"] == "X" and event["name"] == "generate":
            busy_s[tracks[event["tid"]]] += event["dur"] / 1e6
    assert busy_s.keys() == {"generate/0", "generate/1"}
    logged_s = sum(row["pipeline/busy_s/generate"] for row in metrics_of(run).values())
    assert logged_s == pytest.approx(busy_s.total() / 2, rel=0.2)


@pytest.mark.parametrize("run", WITH_A_LAG)
def test_05_there_is_a_lag_and_it_is_bounded(finished: Run, run: str) -> None:
    rows = metrics_of(finished(run))
    lags = [rows[step]["training/lag/max"] for step in range(1, NUM_BATCHES + 1)]
    assert lags[0] == 0 < max(lags) <= LAG
    in_use = versions_in_use(finished(run))
    assert (in_use[0], in_use[-1]) == (0, NUM_BATCHES)
    assert all(0 < after - before <= LAG + 1 for before, after in pairwise(in_use))


def versions_in_use(run: Path) -> list[int]:
    """One after the other."""
    events = read_trace(run / TRACE_FILE)
    return [e["args"]["version"] for e in events if e["name"] == "version in use"]


@pytest.mark.parametrize("run", WITH_A_LAG)
def test_08_every_token_names_the_version_that_drew_it(
    finished: Run, material: Material, run: str
) -> None:
    """Tokens of version 0 have the log-probs of the initial weights, and no others have."""
    model = AutoModelForCausalLM.from_pretrained(material.policy)
    codec = load_codec(
        str(material.policy), template_settings={}, chat_template=None, trust_remote_code=False
    )
    ids = unambiguous_ids(codec)
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for record in read_lines(finished(run) / "rollouts.jsonl"):
        for is_initial, gap in initial_gaps(model, codec, ids=ids, record=record):
            gaps[is_initial].append(gap)
    assert len(gaps[True]) > 10 and max(gaps[True]) < 2e-3
    assert len(gaps[False]) > 20 and sum(gap > 2e-3 for gap in gaps[False]) > 0.9 * len(gaps[False])
    switched = [r for r in read_lines(finished(run) / "rollouts.jsonl") if r["switches"]]
    assert switched, "no weights came into use within a response"


def unambiguous_ids(codec: TextCodec) -> dict[str, int]:
    """Token ids by text, where only one token has it."""
    texts = [codec.decode([[token]], skip_special=False)[0] for token in range(400)]
    counts = Counter(texts)
    return {text: token for token, text in enumerate(texts) if counts[text] == 1}


@torch.no_grad()
def initial_gaps(
    model: Any, codec: TextCodec, *, ids: Mapping[str, int], record: dict[str, Any]
) -> list[tuple[bool, float]]:
    """Of tokens before the first whose id is not known from its text: whether version 0 drew them,
    and how far their log-probs are from those of the initial weights.
    """
    known = [ids.get(text) for text in record["tokens"]]
    length = next((i for i, token in enumerate(known) if token is None), len(known))
    (prompt,) = codec.encode([record["prompt"]])
    tokens = [*prompt, *(token for token in known[:length] if token is not None)]
    logits = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    switches = record["switches"]
    until = switches[0][0] if switches else len(known)
    gaps = []
    for i in range(length):
        expected = logits[len(prompt) + i - 1, tokens[len(prompt) + i]].item()
        is_initial = record["weights_version"] == 0 and i < until
        gaps.append((is_initial, abs(expected - record["log_probs"][i])))
    return gaps


def test_10_reference_scores_of_the_next_batch_are_computed_during_an_update(
    finished: Run,
) -> None:
    """Or during the pass for old log-probs before it, if they are there already: the trainer works
    on another batch in any case, as it begins with a batch when that has been scored.
    """
    run = finished("rounds, apart")
    scoring, working = spans(run, "ref_logp"), spans(run, "logp") + spans(run, "actor-train")
    overlaps = [a for a in scoring if any(min(a[1], b[1]) > max(a[0], b[0]) for b in working)]
    assert len(overlaps) >= NUM_BATCHES // 2


@pytest.mark.deep
def test_10_and_22_devices_of_its_own_change_nothing_of_what_the_reference_says(
    finished: Run,
) -> None:
    """Also: rounds can be repeated bit by bit, on another number of devices."""
    assert_same(finished("rounds"), finished("rounds, apart"))
    lags = [row.get("training/lag/max") for row in metrics_of(finished("rounds")).values()]
    assert lags[1:] == [0, 1, *[LAG] * (NUM_BATCHES - 2)]


@pytest.mark.deep
def test_10_two_devices_that_generate_and_hold_the_reference_say_the_same(finished: Run) -> None:
    """Up to rounding: they divide the sequences."""
    alone, shared = (metrics_of(finished(name)) for name in ("rounds", "rounds, with rollout"))
    for step, row in alone.items():
        learning = {n: x for n, x in row.items() if n.startswith(("actor/", "critic/"))}
        assert learning == pytest.approx({n: shared[step][n] for n in learning}, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["turns", pytest.param("turns of two", marks=pytest.mark.deep)])
def test_in_turns_nothing_is_generated_while_the_trainer_trains(finished: Run, name: str) -> None:
    run = finished(name)
    tracks = ["generate/0", "generate/1"][: 2 if name == "turns of two" else 1]
    updates = spans(run, "actor-train")
    assert len(updates) >= NUM_BATCHES
    for track in tracks:
        generating = spans(run, track)
        assert generating
        for begin, end in generating:
            assert all(min(end, until) <= max(begin, since) for since, until in updates)


def spans(run: Path, track: str) -> list[tuple[float, float]]:
    """Begin and end of the work on a track, microseconds."""
    events = read_trace(run / TRACE_FILE)
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X"
        and names[e["tid"]] == track
        and e["name"] in ("logp", "ref_logp", "update", "generate")
    ]


def test_11_and_13_the_data_end_the_run_with_a_checkpoint_and_a_validation(finished: Run) -> None:
    run = finished("asynchronous")
    rows = metrics_of(run)
    assert sorted(rows) == list(range(NUM_BATCHES + 1))
    assert validated(rows) == [0, 4, 8, 10]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(NUM_BATCHES)
    uids = [record["sample_id"] // 4 for record in read_lines(run / "rollouts.jsonl")]
    assert sorted(set(uids)) == list(range(4 * NUM_BATCHES))
    assert versions_in_use(run)[-1] == NUM_BATCHES


@pytest.mark.parametrize("num_batches", [1, 9, 11, 14])
def test_11_the_data_end_the_run_however_many_they_are(
    material: Material, tmp_path: Path, num_batches: int
) -> None:
    file = write_prompts(tmp_path / "data.parquet", WORD_PROBLEMS.draw(4 * num_batches, seed=3))
    keys = (
        *ASYNCHRONOUS,
        *IN_TURNS,
        f"data.train_files={file}",
        "trainer.device=cpu",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "trainer.test_freq=100",
        "trainer.save_freq=100",
        "trainer.val_before_train=False",
    )
    run = train(material, tmp_path, *keys)
    rows = metrics_of(run)
    assert list(rows) == list(range(1, num_batches + 1))
    assert validated(rows) == [num_batches]
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(num_batches)
    uids = [record["sample_id"] // 4 for record in read_lines(run / "rollouts.jsonl")]
    assert sorted(set(uids)) == list(range(4 * num_batches))
    assert max(row["training/lag/max"] for row in rows.values()) <= LAG


def validated(rows: Mapping[int, Mapping[str, float]]) -> list[int]:
    """The steps in whose rows a validation stands. It may end after the step that follows it."""
    return sorted(step for step, row in rows.items() if any(n.startswith("val-") for n in row))


def test_22_a_run_that_was_killed_after_a_step_goes_on_with_every_other_prompt_once(
    finished: Run, material: Material, cluster: Conditions, tmp_path: Path
) -> None:
    whole, step = finished("asynchronous"), 3
    resumed = train(
        material,
        tmp_path,
        *RUNS["asynchronous"],
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={whole / f'global_step_{step}'}",
        cluster=cluster,
    )
    rows = metrics_of(resumed)
    assert [s for s in rows if s > step] == list(range(step + 1, NUM_BATCHES + 1))
    assert all(rows[s]["training/lag/max"] <= LAG for s in range(step + 1, NUM_BATCHES + 1))
    assert rows[step + 1]["training/lag/max"] == 0
    before = [r for r in read_lines(whole / "rollouts.jsonl") if r["step"] <= step]
    after = [r for r in read_lines(resumed / "rollouts.jsonl") if r["step"] > step]
    trained, retrained = ({r["sample_id"] // 4 for r in part} for part in (before, after))
    assert not trained & retrained
    assert sorted(trained | retrained) == list(range(4 * NUM_BATCHES))
