# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/extend: their files and commands, as they stand there, in small runs."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tandem.platforms.record import Platform
from tests.fakes.commands import Conditions, Ended, check_refusal, run_command
from tests.fakes.tiny_run import Material, metrics_of, read_lines, train_arguments

PAGES = Path(__file__).parents[2] / "docs/extend"
BLOCK = re.compile(r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (?P<name>\w+\.py)\n")
COMMAND = ("tandem", "train", "recipe.yaml")
SHORT = ("trainer.total_training_steps=2", "data.val_files=[]", "trainer.save_freq=-1")
TWO_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
RECORDED = ("trainer.rollout_data_dir=dump",)
TWO_WORKERS = "trainer.n_gpus_per_node=2"


def blocks(page: str, kind: str) -> list[str]:
    """Return the texts of the page's code blocks of one kind."""
    text = (PAGES / page).read_text("utf-8")
    return [match["text"] for match in BLOCK.finditer(text) if match["kind"] == kind]


def write_files(page: str, folder: Path) -> None:
    """Write every Python block that begins with the name of its file."""
    for text in blocks(page, "python"):
        if match := FILE.match(text):
            (folder / match["name"]).write_text(text, "utf-8")


def overrides(page: str) -> list[list[str]]:
    """Return the arguments of every command of the page that trains, without the recipe."""
    commands = [shlex.split(text.replace("\\\n", " ")) for text in blocks(page, "bash")]
    return [words[3:] for words in commands if tuple(words[:3]) == COMMAND]


def train(material: Material, folder: Path, arguments: Sequence[str]) -> Ended:
    """Run ``tandem train`` for two steps in ``folder``, which is the working directory."""
    return run_command(train_arguments(material, folder / "run", *SHORT, *arguments), folder=folder)


def metrics_after(
    page: str, material: Material, folder: Path, *more: str
) -> dict[int, dict[str, float]]:
    """Write the files of a page, run its only command, and return the metrics."""
    write_files(page, folder)
    (arguments,) = overrides(page)
    ended = train(material, folder, [*arguments, *more])
    assert ended.code == 0, ended.stderr
    return metrics_of(folder / "run")


def test_advantage_estimator(material: Material, tmp_path: Path) -> None:
    metrics = metrics_after("advantage_estimator.md", material, tmp_path)
    for row in metrics.values():
        largest = max(abs(row["critic/advantages/max"]), abs(row["critic/advantages/min"]))
        assert largest == pytest.approx(1)


def test_estimators_with_wrong_results_are_refused(material: Material, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def estimate(inputs, settings): return inputs.group_N\n")
    ended = train(material, tmp_path, ["algorithm.adv_estimator=wrong:estimate"])
    check_refusal(ended, "algorithm.adv_estimator='wrong:estimate'", "returned Tensor")


def test_policy_loss(material: Material, tmp_path: Path) -> None:
    metrics = metrics_after("policy_loss.md", material, tmp_path, TWO_UPDATES)
    assert all(row["actor/pg_clipfrac"] == 0 for row in metrics.values())
    assert metrics[1]["actor/pg_loss"] != 0


def test_policy_loss_in_worker_processes(material: Material, tmp_path: Path) -> None:
    metrics = metrics_after("policy_loss.md", material, tmp_path, TWO_UPDATES, TWO_WORKERS)
    assert metrics[1]["actor/pg_loss"] != 0


def test_losses_with_wrong_results_are_refused(material: Material, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def loss(terms, clip): return terms.logp_R\n")
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    check_refusal(
        train(material, tmp_path, [f"{key}=wrong:loss"]), f"{key}='wrong:loss'", "returned Tensor"
    )


def test_reward(material: Material, tmp_path: Path) -> None:
    metrics = metrics_after("reward.md", material, tmp_path)
    assert all(row["reward/length/mean"] > 0 for row in metrics.values())


def test_rollout_engine(material: Material, tmp_path: Path) -> None:
    """The page's engine has a copy of the weights, which must be those of the trainer."""
    metrics = metrics_after("rollout_engine.md", material, tmp_path, TWO_UPDATES)
    for row in metrics.values():
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["rollout/engine/num_decoded_tokens"] > 0


def test_dataset_resumes_with_the_same_rows_and_with_no_others(
    material: Material, tmp_path: Path
) -> None:
    more = ("trainer.save_freq=1", "data.shuffle=False", *RECORDED)
    metrics = metrics_after("dataset.md", material, tmp_path, *more)
    assert set(metrics) == {1, 2}
    (arguments,) = overrides("dataset.md")
    resumed = train(material, tmp_path, [*arguments, *more, "trainer.total_training_steps=3"])
    assert resumed.code == 0, resumed.stderr
    prompts = {
        step: {row["input"] for row in read_lines(tmp_path / f"dump/{step}.jsonl")}
        for step in (1, 2, 3)
    }
    assert all("=" in text for texts in prompts.values() for text in texts)
    file = tmp_path / "my_rows.py"
    file.write_text(file.read_text().replace("randrange(10)", "randrange(9)"))
    ended = train(material, tmp_path, [*arguments, *more, "trainer.total_training_steps=4"])
    check_refusal(ended, "data.train_files", "fingerprint")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def Sums(tokenizer): return []", "cannot be called with data_files and config"),
        ("def Sums(data_files, config): return [3]", "made row 0, which is not a mapping"),
        ("def Sums(data_files, config): return []", "made no rows"),
        ("def Sums(data_files, config): return [{}]", "row 0 has no prompt"),
    ],
)
def test_datasets_that_cannot_work_are_refused(
    material: Material, tmp_path: Path, code: str, fault: str
) -> None:
    (tmp_path / "rows.py").write_text(code)
    ended = train(material, tmp_path, ["data.custom_cls.path=rows:Sums"])
    check_refusal(ended, fault)


def test_metric(material: Material, tmp_path: Path) -> None:
    write_files("metrics.md", tmp_path)
    ended = train(material, tmp_path, overrides("metrics.md")[0])
    assert ended.code == 0, ended.stderr
    rows = metrics_of(tmp_path / "run").values()
    assert all(0 < row["my/agreement"] <= 1 and row["my/tokens"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("return 5", "returned int, not a mapping"),
        ("return {'my/x': 'y'}", "returned my/x='y', which is not a number"),
        ("return {'actor/loss': 1.0}", "returned actor/loss, which is the name of another metric"),
    ],
)
def test_metrics_with_wrong_results_are_refused(
    material: Material, tmp_path: Path, code: str, fault: str
) -> None:
    (tmp_path / "wrong.py").write_text(f"def metric(batch): {code}\n")
    check_refusal(
        train(material, tmp_path, ["trainer.metrics=[wrong:metric]"]),
        "trainer.metrics='wrong:metric'",
        fault,
    )


def test_metric_sink(material: Material, tmp_path: Path) -> None:
    write_files("metrics.md", tmp_path)
    ended = train(material, tmp_path, overrides("metrics.md")[1])
    assert ended.code == 0, ended.stderr
    metrics = metrics_of(tmp_path / "run")
    lines = (tmp_path / "run/scores.csv").read_text().splitlines()
    assert lines == [f"{step},{row['critic/score/mean']}" for step, row in metrics.items()]


def test_platform(material: Material, tmp_path: Path, doubles: Callable[..., Platform]) -> None:
    """The page's platform is a double's, whose package stands where the page says."""
    doubles("musa")  # builds the extension of all doubles
    page, site = "platform.md", tmp_path / "site"
    info = site / "acme_platform-1.0.dist-info"
    info.mkdir(parents=True)
    write_files(page, site)
    (declared,) = blocks(page, "toml")
    (group, entries), *_ = tomllib.loads(declared)["project"]["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-platform\nVersion: 1.0\n")
    package = site / "torch_acme"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tandem.testing.doubles import become\n\nbecome('acme', num_devices=1)\n"
    )
    (arguments,) = overrides(page)
    ended = run_command(
        train_arguments(material, tmp_path / "run", *SHORT, *arguments),
        folder=tmp_path,
        conditions=Conditions(environment={"PYTHONPATH": str(site)}),
    )
    assert ended.code == 0, ended.stderr
    rows = metrics_of(tmp_path / "run").values()
    assert all(row["perf/max_memory_allocated_gb"] > 0 for row in rows)


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_every_page_is_run_here(page: str) -> None:
    source = Path(__file__).read_text("utf-8")
    if overrides(page):
        assert f'"{page}"' in source, f"no test runs the command of docs/extend/{page}"
