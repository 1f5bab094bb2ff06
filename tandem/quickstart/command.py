# SPDX-License-Identifier: Apache-2.0
"""``tandem quickstart``: from a random model to a report, in minutes on two cores.

It makes problems, a tokenizer and a random model of 0.16 M parameters, fine-tunes the model on
demonstrations of mixed quality, trains it with GRPO, and evaluates it on held-out problems. Each
step does what a public command does, on ordinary files, which stay in the folder. The closing words
go to standard error, and the last line of standard output is one JSON object. With ``--lora`` GRPO
trains adapters, and all weights stay as the demonstrations left them; with ``--experts`` the model
is a mixture of experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from tandem.checkpoint.store import CheckpointStore
from tandem.config.derived.pools import place_run
from tandem.config.derived.schedule import schedule_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.driver import sft, train
from tandem.driver.execution import Ended
from tandem.driver.launch import local_site
from tandem.driver.notices import configure_logging
from tandem.driver.run import run_prepared
from tandem.errors import UserError
from tandem.pipeline.progress import RunSummary
from tandem.quickstart.closing import Accuracies, describe_end
from tandem.quickstart.materials import (
    NUM_TEST,
    NUM_TRAIN,
    TASKS,
    TEST_SEED,
    Materials,
    prepare,
)
from tandem.quickstart.pictures import GRPO_KEYS, SFT_KEYS, prepare_pictures
from tandem.quickstart.seeing_model import FAMILIES
from tandem.quickstart.task import ToolUse
from tandem.report.report import write_report
from tandem.report.run_folder import REPORT_FILE, SUMMARY_FILE, read_run

_HERE = Path(__file__).parent
_WITHOUT = "unseen_numbers_without_tool"
_GRPO = str(_HERE / "grpo.yaml")
_KEYS_OF_FILES = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "trainer.default_local_dir",
)
_LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=32",
    # Three times the rate of all weights: a rank of 8 is not small in a model of this size.
    "actor_rollout_ref.actor.optim.lr=0.001",
    # At a constant rate the reward still falls back by a tenth now and then.
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
    "trainer.total_training_steps=180",
)


class _Interrupted(Exception):
    """A signal stopped one of the steps."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run(arguments: Sequence[str]) -> int:
    """Run all steps; return 0, or 128 plus the number of the signal that stopped one."""
    options = _parser().parse_intermixed_args(arguments)
    configure_logging()
    # Two threads on a contended core make a model of this size many times slower than one.
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    folder: Path = options.folder
    recipe = (*(_LORA if options.lora else ()), *(GRPO_KEYS if options.vision else ()))
    overrides = (*recipe, *options.overrides)
    _check_overrides(overrides)
    made = "pictures" if options.vision else TASKS[options.task].name
    _say(f"1/4 making {made}, a tokenizer and a random model")
    materials = _materials(options)
    try:
        accuracies = _train(
            materials,
            folder,
            tools=TASKS[options.task].tools,
            sft_keys=SFT_KEYS if options.vision else (),
            seed=options.seed,
            overrides=overrides,
        )
    except _Interrupted as stop:
        return stop.exit_code
    seconds, run_folder = time.perf_counter() - start_s, folder / "grpo"
    without = {} if accuracies.without_tool is None else {_WITHOUT: accuracies.without_tool}
    summary = {
        "accuracy_before": accuracies.before,
        "accuracy_after": accuracies.after,
        "unseen_numbers_before": accuracies.unseen_before,
        "unseen_numbers_after": accuracies.unseen_after,
        **without,
        "seed": options.seed,
        "parameters": materials.num_parameters,
        "seconds": round(seconds, 1),
    }
    (run_folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2))
    model, report = _trained_model(run_folder), write_report(run_folder, run_folder / REPORT_FILE)
    _say(
        describe_end(
            accuracies,
            run_folder=run_folder,
            model=model,
            report=report,
            seconds=seconds,
            question=None if options.vision else _short_question(options.task),
        )
    )
    print(json.dumps({**summary, "report": str(report), "model": str(model)}))
    return 0


def _train(
    materials: Materials,
    folder: Path,
    *,
    tools: ToolUse | None,
    sft_keys: Sequence[str],
    seed: int,
    overrides: Sequence[str],
) -> Accuracies:
    """Train the model in ``folder``, on demonstrations and then with GRPO, and evaluate it."""
    _say(f"2/4 supervised warm-up of {materials.num_parameters:,} parameters")
    keys = sft_keys if tools is None else tools.sft_keys
    warm = warm_start(materials, folder / "sft", seed=seed, keys=keys)
    if tools is not None:
        overrides = (*tools.grpo_keys, *tools.tool_keys, *overrides)
    _say("3/4 reinforcement learning with GRPO")
    places = ("data", "actor_rollout_ref.rollout", "trainer")  # the last one draws adapters
    seeds = tuple(f"{place}.seed={seed}" for place in places)
    grpo = _grpo_config(
        materials,
        warm,
        test=materials.test,
        folder=folder / "grpo",
        overrides=(*seeds, *overrides),
    )
    prepared = train.prepare(grpo)
    _finished(run_prepared(local_site(grpo), prepared))
    _say(f"4/4 evaluation on unseen combinations of {materials.parts}")
    adapted = prepared.model.decoder_config
    has_adapters = adapted is not None and adapted.adapters is not None
    trained = _trained_model(folder / "grpo")
    start = _start_from(trained) if has_adapters else ()
    trained = warm if has_adapters else trained
    of_episodes = _kept_keys(overrides)
    evaluate = partial(_accuracy_on_unseen, materials)
    before = evaluate(warm, folder=folder / "unseen_before", overrides=of_episodes)
    of_episodes = (*of_episodes, *start)
    after = evaluate(trained, folder=folder / "unseen_after", overrides=of_episodes)
    without: float | None = None
    if tools is not None:
        keys = (*of_episodes, *tools.broken_keys)
        broken = folder / "unseen_without_tool"
        without = evaluate(trained, folder=broken, overrides=keys)
    columns = read_run(folder / "grpo").columns
    (values,) = (
        column for name, column in columns.items() if name.startswith(_accuracy(materials))
    )
    return Accuracies(values[0][1], values[-1][1], before, after, without)


def _start_from(adapter: Path) -> tuple[str, ...]:
    """Return the keys of a run that starts from an adapter."""
    return (f"actor_rollout_ref.model.lora_adapter_path={adapter}",)


def warm_start(materials: Materials, folder: Path, *, seed: int, keys: Sequence[str] = ()) -> Path:
    """Train the random model on demonstrations in ``folder``; return the trained model's folder."""
    keys = (
        *keys,
        f"model.path={materials.model}",
        f"data.train_files={materials.demonstrations}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={folder}",
    )
    config = load_config(SftConfig, [str(_HERE / "sft.yaml"), *keys]).config
    _finished(run_prepared(local_site(config), sft.prepare(config)))
    return _trained_model(folder)


def _grpo_config(
    materials: Materials, model: Path, *, test: Path, folder: Path, overrides: Sequence[str]
) -> RunConfig:
    keys = (
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={materials.train}",
        f"data.val_files={test}",
        f"trainer.default_local_dir={folder}",
    )
    return load_config(RunConfig, [_GRPO, *keys, *overrides]).config


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise UserError if the overrides are wrong, need several devices, or leave no result."""
    given = {word.partition("=")[0].lstrip("+~"): word.partition("=")[2] for word in overrides}
    for key in filter(given.__contains__, _KEYS_OF_FILES):
        raise UserError(
            key,
            given[key],
            rule="the quickstart makes this itself",
            remedy="Leave it out; --folder chooses the folder of all files.",
        )
    placeholders = ("actor_rollout_ref.model.path=.", "data.train_files=.", "data.val_files=.")
    config = load_config(RunConfig, [_GRPO, *placeholders, *overrides]).config
    trainer = config.trainer
    if not place_run(config).is_one_process or trainer.nnodes > 1:
        raise UserError(
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}, trainer.nnodes",
            trainer.nnodes,
            rule="the quickstart trains in one process",
            remedy="Leave them out, or use tandem train with the files that the quickstart makes.",
        )
    schedule = schedule_run(config, NUM_TRAIN)
    needed = (
        ("trainer.val_only", trainer.val_only, not trainer.val_only),
        ("trainer.val_before_train", trainer.val_before_train, schedule.validates_before_training),
        ("trainer.test_freq", trainer.test_freq, schedule.test_freq > 0),
        ("trainer.save_freq", trainer.save_freq, schedule.saves_at_end),
    )
    for key, value, is_fine in needed:
        if not is_fine:
            raise UserError(
                key,
                value,
                rule="the quickstart needs a trained model, and its accuracy before and after",
                remedy="Leave it out.",
            )


def _materials(options: argparse.Namespace) -> Materials:
    """Write the files of the chosen task. Raise UserError if options do not go together."""
    folder = options.folder / "materials"
    if not options.vision:
        if options.black_pictures or options.family != FAMILIES[0]:
            name = "--black-pictures" if options.black_pictures else "--family"
            raise UserError(name, rule="is about pictures", remedy="Add --vision.")
        if options.experts and options.lora:
            rule = "adapters of experts are not built"
            raise UserError("--lora", rule=rule, remedy="Leave out --lora or --experts.")
        return prepare(
            folder,
            seed=options.seed,
            task=TASKS[options.task],
            with_experts=options.experts,
        )
    if options.lora or options.experts or options.task != "words":
        name = "--lora" if options.lora else "--experts" if options.experts else "--task"
        raise UserError(name, rule="is not built for pictures", remedy="Leave out --vision.")
    return prepare_pictures(
        folder, seed=options.seed, family=options.family, is_black=options.black_pictures
    )


def _accuracy(materials: Materials) -> str:
    """Return the name of the metric, which the number of samples of a problem completes."""
    return f"val-core/{materials.data_source}/acc/mean@"


def _kept_keys(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that validations depend on."""
    sections = (
        "data.max_",
        "data.truncation",
        "custom_reward_function",
        "actor_rollout_ref.rollout.multi_turn",
    )
    return tuple(key for key in overrides if key.startswith(sections))


def _accuracy_on_unseen(
    materials: Materials, model: Path, *, folder: Path, overrides: Sequence[str]
) -> float:
    overrides = (*overrides, "trainer.val_only=True", "trainer.logger=[]")
    config = _grpo_config(
        materials, model, test=materials.test_unseen, folder=folder, overrides=overrides
    )
    validation = _finished(run_prepared(local_site(config), train.prepare(config))).validation
    return validation[f"{_accuracy(materials)}1"]


def _finished(ended: Ended[RunSummary]) -> RunSummary:
    if ended.exit_code != 0:
        raise _Interrupted(ended.exit_code)
    return ended.result


def _trained_model(run_folder: Path) -> Path:
    """Return the model folder of the latest checkpoint."""
    checkpoint = CheckpointStore(run_folder).latest()
    assert checkpoint is not None, f"{run_folder} was trained"
    return checkpoint.folder / "actor"


def _short_question(task: str) -> str:
    """Return the shortest held-out question."""
    return min(
        (problem.question for problem in TASKS[task].draw(NUM_TEST, seed=TEST_SEED)), key=len
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem quickstart",
        description="Train a small model by supervised fine-tuning and GRPO, and report on it.",
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/quickstart"), help="folder for all files"
    )
    parser.add_argument(
        "--task", choices=list(TASKS), default="words", help="kind of problems (default: words)"
    )
    parser.add_argument(
        "--lora", action="store_true", help="train adapters of rank 8 instead of all weights"
    )
    parser.add_argument(
        "--experts", action="store_true", help="train a mixture of 8 experts, 2 for each token"
    )
    parser.add_argument(
        "--vision", action="store_true", help="questions about pictures, for a model that sees"
    )
    parser.add_argument(
        "--family", choices=FAMILIES, default=FAMILIES[0], help="kind of model (with --vision)"
    )
    parser.add_argument(
        "--black-pictures", action="store_true", help="show nothing: the model can only guess"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and sampling")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of the GRPO configuration"
    )
    return parser
