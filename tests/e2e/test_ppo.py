# SPDX-License-Identifier: Apache-2.0
"""PPO with a critic (``algorithm.adv_estimator=gae``) in one process: it learns, it resumes bit by
bit, and what is wrong with the critic is said before anything begins.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes import learnable
from tests.fakes.commands import Ended, check_refusal, run_command
from tests.fakes.tiny_policy import write_tiny_gpt2
from tests.fakes.tiny_reward_model import write_small_vocabulary
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

PPO = ("algorithm.adv_estimator=gae", "data.val_files=[]")
SECTIONS = ("values", "update_critic", "update_actor")
LEARNING = (
    "algorithm.lam=0.9",
    "critic.optim.lr=0.003",
    "critic.ppo_epochs=4",
    "actor_rollout_ref.actor.optim.lr=0.003",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "data.train_batch_size=8",
    "trainer.total_training_steps=72",
    f"custom_reward_function.path={learnable.__file__}",
    "custom_reward_function.name=sevens",
)


def run_ppo(material: Material, run: Path, *overrides: str) -> Ended:
    """Train with a critic into ``run``."""
    return run_command(train_arguments(material, run, *PPO, *overrides), folder=run.parent)


def metrics_after(material: Material, run: Path, *overrides: str) -> dict[int, dict[str, float]]:
    """The metrics of a run that must end well."""
    ended = run_ppo(material, run, *overrides)
    assert ended.code == 0, ended.stderr
    return metrics_of(run)


def mean(rows: Mapping[int, Mapping[str, float]], name: str, first: int, *, last: int) -> float:
    """Of a metric over the steps ``first .. last``."""
    return statistics.fmean(rows[step][name] for step in range(first, last + 1))


def test_policy_and_critic_learn(material: Material, tmp_path: Path) -> None:
    rows = metrics_after(material, tmp_path / "run", *LEARNING)
    assert mean(rows, "critic/score/mean", 1, last=8) < 0.05
    assert mean(rows, "critic/score/mean", 65, last=72) > 0.7
    # The returns rise from 0 to almost 1, and the values with them.
    assert mean(rows, "critic/vf_explained_var", 49, last=72) > 0.05
    assert abs(rows[72]["critic/values/mean"] - rows[72]["critic/returns/mean"]) < 0.05
    assert mean(rows, "critic/vf_loss", 69, last=72) < 0.01


def test_a_resumed_run_is_the_same_bit_by_bit(material: Material, tmp_path: Path) -> None:
    keys = (
        "trainer.save_freq=2",
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "critic.shuffle=True",
        "critic.optim.lr_warmup_steps=3",
    )
    whole = metrics_after(material, tmp_path / "whole", *keys)
    first = metrics_after(material, tmp_path / "run", *keys, "trainer.total_training_steps=2")
    again = metrics_after(material, tmp_path / "run", *keys)
    assert list(first) == [1, 2] and list(again) == list(whole) == [1, 2, 3, 4]
    assert repeatable(again) == repeatable(whole)
    for role in ("actor", "critic"):
        paths = [tmp_path / run / "global_step_4" / role for run in ("whole", "run")]
        one, other = (load_file(path / "model.safetensors") for path in paths)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        moments = [torch.load(path / "optimizer.pt")["optimizer"]["AdamW"] for path in paths]
        assert all(
            torch.equal(x, y)
            for kind in moments[0]
            for x, y in zip(moments[0][kind], moments[1][kind], strict=True)
        )


def test_a_critic_is_exported_and_another_run_begins_with_it(
    material: Material, tmp_path: Path
) -> None:
    steps = ("trainer.total_training_steps=1", "trainer.save_freq=1")
    metrics_after(material, tmp_path / "run", *steps, "critic.optim.lr=0.01")
    arguments = ["export", str(tmp_path / "run"), "--critic", "--output", str(tmp_path / "critic")]
    assert run_command(arguments, folder=tmp_path).code == 0
    exported = load_file(tmp_path / "critic/model.safetensors")
    assert exported["score.weight"].shape[0] == 1 and float(exported["score.bias"]) != 0
    config = json.loads((tmp_path / "critic/config.json").read_text())
    assert config["architectures"][0].endswith("ForTokenClassification")

    path = f"critic.model.path={tmp_path / 'critic'}"
    metrics_after(material, tmp_path / "other", *steps, path, "critic.optim.lr=0")
    kept = load_file(tmp_path / "other/global_step_1/critic/model.safetensors")
    assert all(torch.equal(kept[name], exported[name]) for name in exported)


def test_the_critic_learns_while_the_actor_waits_for_it(material: Material, tmp_path: Path) -> None:
    rows = metrics_after(material, tmp_path / "run", "trainer.critic_warmup=3")
    assert [step for step, row in rows.items() if "actor/grad_norm" in row] == [3, 4]
    assert [step for step, row in rows.items() if row["critic/grad_norm"] > 0] == [1, 2, 3, 4]


def test_names_of_metrics_are_verls(material: Material, tmp_path: Path) -> None:
    (row,) = metrics_after(material, tmp_path / "run", "trainer.total_training_steps=1").values()
    names = {
        *(f"critic/values/{kind}" for kind in ("mean", "max", "min")),
        *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")),
        *(f"timing_{unit}/{name}" for unit in ("s", "per_token_ms") for name in SECTIONS),
        "critic/vf_explained_var",
    }
    assert not names - row.keys()
    assert row["critic/lr"] == 1e-5


def test_a_critic_without_a_use_for_its_values_is_trained_on_request(
    material: Material, tmp_path: Path
) -> None:
    keys = ("algorithm.adv_estimator=grpo", "critic.enable=True")
    rows = metrics_after(material, tmp_path / "run", *keys, "trainer.total_training_steps=1")
    assert rows[1]["critic/grad_norm"] > 0


def test_a_critic_that_diverges_ends_the_run(material: Material, tmp_path: Path) -> None:
    keys = ("critic.optim.weight_decay=1e30", "trainer.total_training_steps=20")
    ended = run_ppo(material, tmp_path / "run", *keys)
    assert ended.code == 2
    assert ended.errors[0].startswith("error: critic.optim.lr=")
    assert "loss or gradient was not finite" in ended.errors[0]
    assert "the critic's divergence" in ended.errors[0]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("critic.enable=False", ("critic.enable=False", "adv_estimator='gae'", "Set")),
        ("critic.optim.lr=fast", ("critic.optim.lr='fast'", "number")),
        ("critic.optim.rate=1", ("critic.optim.rate", "critic.optim.")),
        ("critic.cliprange_value=0", ("critic.cliprange_value=0", "Set")),
        ("critic.loss_agg_mode=mean", ("critic.loss_agg_mode='mean'", "token-mean")),
        ("critic.ppo_mini_batch_size=3", ("critic.ppo_mini_batch_size=3", "divide", "Set")),
        ("critic.ppo_max_token_len_per_gpu=50", ("critic.ppo_max_token_len_per_gpu=50", "Set")),
        (
            "critic.forward_max_token_len_per_gpu=50",
            ("critic.forward_max_token_len_per_gpu=50", "108", "Set"),
        ),
        (
            "critic.ulysses_sequence_parallel_size=2",
            ("critic.model.fsdp_config.ulysses_sequence_parallel_size=2", "Set"),
        ),
        (
            "critic.model.path=no/where/else",
            ("critic.model.path='no/where/else'", "no such folder"),
        ),
        ("critic.model.lora_rank=4", ("critic.model.lora_rank=4", "not built yet")),
    ],
)
def test_keys_of_the_critic_that_cannot_be(
    material: Material, tmp_path: Path, override: str, says: tuple[str, ...]
) -> None:
    check_refusal(run_ppo(material, tmp_path / "run", override), *says)
    assert not (tmp_path / "run").exists()


def test_models_that_cannot_be_a_critic(material: Material, tmp_path: Path) -> None:
    gpt2 = write_tiny_gpt2(tmp_path / "gpt2")
    ended = run_ppo(material, tmp_path / "run", f"critic.model.path={gpt2}")
    check_refusal(ended, f"critic.model.path='{gpt2}'", "'gpt2' cannot be a critic", "Use")
    small = write_small_vocabulary(material.policy, tmp_path / "small", num_tokens=20)
    config = json.loads((small / "config.json").read_text())
    ended = run_ppo(material, tmp_path / "run", f"critic.model.path={small}")
    check_refusal(ended, f"critic.model.path='{small}'", "20 tokens", "vocab_size", "Use")
    (small / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    ended = run_ppo(material, tmp_path / "run", f"critic.model.path={small}")
    check_refusal(ended, f"critic.model.path='{small}'", "shape", "Use")
    assert not list((tmp_path / "run").glob("global_step_*"))


def test_a_checkpoint_without_a_critic_is_not_resumed_with_one(
    material: Material, tmp_path: Path
) -> None:
    keys = ("algorithm.adv_estimator=grpo", "trainer.save_freq=2", "trainer.total_training_steps=2")
    metrics_after(material, tmp_path / "run", *keys)
    checkpoint = tmp_path / "run/global_step_2"
    meant = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    ended = run_ppo(material, tmp_path / "run", "trainer.save_freq=2", *meant)
    check_refusal(ended, "needs a critic", "global_step_2 has none", "trainer.resume_mode=disable")
