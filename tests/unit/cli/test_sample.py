# SPDX-License-Identifier: Apache-2.0
"""``tandem sample``: the newest model of a run answers as transformers says it does."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.checkpoint.store import CheckpointStore
from tandem.cli.main import main
from tandem.cli.sample import parse
from tandem.cli.sample_here import run
from tandem.config.check.continuation import settings_json
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.models.weights import WEIGHTS_FILE
from tests.fakes.tiny_adapters import ALL, open_adapted, spread_b
from tests.fakes.tiny_policy import write_tiny_gpt2, write_tiny_policy

ASKED = "Sam has 4 eggs."
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints, whose settings sample at temperature 0.5 from 3 tokens."""
    folder = tmp_path_factory.mktemp("sample") / "run"
    keys = (
        "actor_rollout_ref.rollout.temperature=0.5",
        "actor_rollout_ref.rollout.top_k=3",
        f"data.max_response_length={NUM_TOKENS}",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
        "data.train_files=[some.parquet]",
        "actor_rollout_ref.model.path=some",
    )
    settings = settings_json(load_config(RunConfig, keys).config)
    for step in (1, 2):
        with CheckpointStore(folder, config=settings).writing(step, {}) as partial:
            write_talkative(partial / "actor", seed=step)
    return folder


def write_talkative(folder: Path, *, seed: int) -> Path:
    """Write a policy whose layers outweigh its tied embedding, which would repeat a token."""
    write_tiny_policy(folder, seed=seed)
    tensors = load_file(folder / WEIGHTS_FILE)
    larger = {name: x * 20 if "_proj.weight" in name else x for name, x in tensors.items()}
    save_file(larger, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def reference(folder: Path, *, raw: bool = False) -> str:
    """Return the greedy answer by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = ASKED
    if not raw:
        chat = [{"role": "user", "content": ASKED}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=raw, return_tensors="pt").input_ids
    drawn = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(drawn, skip_special_tokens=True)


def answer(*words: str) -> int:
    return run(parse([words[0], ASKED, "--device", "cpu", *words[1:]]))


def test_the_newest_model_of_a_run_answers(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(str(run_folder), "--greedy") == 0
    shown, older = capsys.readouterr(), run_folder / "global_step_1/actor"
    assert shown.out == reference(run_folder / "global_step_2/actor") + "\n"
    assert shown.out != reference(older) + "\n"
    assert shown.err == (
        f"loading {run_folder}/global_step_2/actor\n"
        f"note: cut off after {NUM_TOKENS} tokens (--max-tokens)\n"
    )


@pytest.mark.parametrize(
    "named", [("", "--step", "1"), ("global_step_1",), ("global_step_1/actor",)]
)
def test_another_model_may_be_named(
    named: tuple[str, ...], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    length = ("--max-tokens", str(NUM_TOKENS))
    answer(str(run_folder / named[0]), *named[1:], "--greedy", *length)
    assert capsys.readouterr().out == reference(run_folder / "global_step_1/actor") + "\n"


def test_a_raw_prompt_has_no_template(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(str(run_folder), "--greedy", "--raw")
    wanted = reference(run_folder / "global_step_2/actor", raw=True)
    assert wanted != reference(run_folder / "global_step_2/actor")
    assert capsys.readouterr().out == wanted + "\n"


def test_several_responses_have_numbers_and_depend_on_the_seed(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: list[str] = []
    for seed in ("3", "3", "4"):
        answer(str(run_folder), "-n", "3", "--seed", seed, "--temperature", "2.0")
        texts.append(capsys.readouterr().out)
    parts = texts[0].split("--- ")
    assert [part.partition("\n")[0] for part in parts] == ["", "1 of 3", "2 of 3", "3 of 3"]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_is_that_of_the_run(run_folder: Path) -> None:
    request = parse([str(run_folder), ASKED])
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 3)
    assert request.sampling.max_new_tokens == NUM_TOKENS
    assert request.template_settings == {"enable_thinking": False}
    named = parse([str(run_folder), ASKED, "--temperature", "0.7", "--max-tokens", "9"])
    assert (named.sampling.temperature, named.sampling.max_new_tokens) == (0.7, 9)


def test_the_code_of_a_model_runs_only_if_the_user_trusts_it(
    run_folder: Path, tmp_path: Path
) -> None:
    """The settings beside a checkpoint come with it, so they cannot vouch for it."""
    run_copy, mark = tmp_path / "run", tmp_path / "was here"
    shutil.copytree(run_folder / "global_step_2", run_copy / "global_step_2")
    (run_copy / "global_step_2/manifest.json").unlink()
    settings_file = run_copy / "global_step_2/config.json"
    settings = json.loads(settings_file.read_text())
    settings["actor_rollout_ref"]["model"]["trust_remote_code"] = True
    settings_file.write_text(json.dumps(settings))
    model = run_copy / "global_step_2/actor"
    (model / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Own: pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text())
        auto = {"AutoTokenizer": ["own.Own", None], "AutoModelForCausalLM": "own.Own"}
        content |= {"model_type": "of its own", "auto_map": auto, "tokenizer_class": "Own"}
        (model / name).write_text(json.dumps(content))
    request = parse([str(run_copy), "hi", "--step", "2"])
    with pytest.raises(UserError, match=r"Set --trust-remote-code if you trust the code"):
        run(request)
    assert not mark.exists() and not request.trusts_remote_code
    with suppress(Exception):  # its code is nonsense
        run(parse([str(run_copy), "hi", "--step", "2", "--trust-remote-code"]))
    assert mark.exists()


def test_a_model_of_transformers_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_gpt2(tmp_path / "gpt2")
    answer(str(folder), "--greedy", "--max-tokens", str(NUM_TOKENS))
    assert capsys.readouterr().out == reference(folder) + "\n"


def test_adapters_answer_with_their_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_talkative(tmp_path / "base", seed=3)
    adapted = open_adapted(base, ALL)
    spread_b(adapted)
    with CheckpointStore(tmp_path / "run").writing(1, {}) as partial:
        (partial / "actor").mkdir()
        adapted.save(partial / "actor")
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    answer(str(tmp_path / "run"), "--greedy", "--max-tokens", str(NUM_TOKENS))
    wanted = reference(tmp_path / "merged")
    assert wanted != reference(base), "the adapters change the answer"
    assert capsys.readouterr().out == wanted + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", ""), "PROMPT='': is empty"),
        (("RUN", "\udcff\ud800"), "PROMPT=.*: is not valid UTF-8"),
        (("RUN", "x", "--seed", "-1"), "--seed=-1: must be at least 0"),
        (("RUN", " \n"), "is empty"),
        (("RUN", "hi", "-n", "0"), "-n=0: must be at least 1"),
        (("RUN", "hi", "--greedy", "-n", "2"), "-n=2: greedy responses .* are all the same"),
        (("RUN", "hi", "--temperature", "0"), "must be above 0. Use --greedy"),
        (("RUN", "hi", "--temperature", "nan"), "must be above 0"),
        (("RUN", "hi", "--temperature", "1", "--greedy"), "does not go with --greedy"),
        (("RUN", "hi", "--max-tokens", "0"), "--max-tokens=0: must be at least 1"),
        (("RUN", "hi", "--step", "7"), "has no global_step_7. It has: global_step_1, "),
        (("RUN/global_step_1", "hi", "--step", "1"), "is a single checkpoint"),
        (("RUN/global_step_3", "hi"), "not a checkpoint"),
        (("RUN/nowhere", "hi"), "no such folder"),
        (("RUN/..", "hi"), "is not a run, but has some. Add one of these: run"),
        (("EMPTY", "hi"), "has no checkpoint"),
        (("RUN", "eggs " * 300), "it has .* tokens, and the model reads at most 256"),
        (("RUN", "hi", "--device", "gpu"), "--device='gpu': there is no such platform"),
        (("RUN", "hi", "--base", "elsewhere"), "--base='elsewhere': .* has all weights"),
        (("EMPTY/model", "hi"), "config.json: num_attention_heads=None"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    words: tuple[str, ...], message: str, run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "qwen2"}))
    where = words[0].replace("RUN", str(run_folder)).replace("EMPTY", str(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        run(parse([where, *words[1:]]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["5", "[]", "null", "[" * 5000, '"model_type"'])
def test_a_folder_whose_config_is_no_object_is_no_model(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="RUN=.*: has no checkpoint"):
        parse([str(tmp_path), ASKED])
