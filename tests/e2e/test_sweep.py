# SPDX-License-Identifier: Apache-2.0
"""``tandem sweep``: each run has the results that it has alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fakes.commands import run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

MODEL, LR = "actor_rollout_ref.model", "actor_rollout_ref.actor.optim.lr"
KEYS = (
    f"{MODEL}.lora_alpha=16",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.device=cpu",
)
RUNS = {
    "lora_rank_4+lr_0.01": (f"{MODEL}.lora_rank=4", f"{LR}=0.01"),
    "lora_rank_4+lr_0.03": (f"{MODEL}.lora_rank=4", f"{LR}=0.03"),
    "lora_rank_2+lr_0.01": (f"{MODEL}.lora_rank=2", f"{LR}=0.01"),
    "lora_rank_2+lr_0.03": (f"{MODEL}.lora_rank=2", f"{LR}=0.03"),
}
ADAPTER = "global_step_4/actor/adapter_model.safetensors"


def arguments(material: Material, run: Path, *keys: str) -> list[str]:
    """Return the arguments without the rate, which the keys give."""
    words = train_arguments(material, run, *KEYS)
    return [word for word in words if not word.startswith(f"{LR}=")] + list(keys)


def test_each_run_of_a_sweep_is_the_run_alone(material: Material, tmp_path: Path) -> None:
    words = arguments(material, tmp_path / "all", f"{MODEL}.lora_rank=4,2", f"{LR}=0.01,0.03")
    ended = run_command(["sweep", *words[1:]], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count(": step 4 of 4; ") == len(RUNS)
    assert sum(" lora_rank_2+lr_0.03 step 4/4 " in x for x in ended.stdout.splitlines()) == 1
    for name in ("lora_rank_4+lr_0.03", "lora_rank_2+lr_0.01"):
        alone = run_command(arguments(material, tmp_path / name, *RUNS[name]), folder=tmp_path)
        assert alone.code == 0, alone.stderr
        found, expected = (metrics_of(x) for x in (tmp_path / "all" / name, tmp_path / name))
        # Joint products have other numbers of rows, whose sums are rounded in another order.
        for step, row in repeatable(expected).items():
            assert repeatable(found)[step] == pytest.approx(row, rel=1e-3, abs=1e-5), name
        mine, own = (load_file(x / ADAPTER) for x in (tmp_path / "all" / name, tmp_path / name))
        for tensor, values in own.items():
            assert float((mine[tensor] - values).abs().max()) < 1e-3, (name, tensor)
    names = [tmp_path / "all" / name for name in RUNS]
    last = [load_file(folder / ADAPTER) for folder in names]
    assert not all(last[0][name].equal(last[1][name]) for name in last[0]), "rates differ"


def test_a_run_that_cannot_start_starts_none(material: Material, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def good(data_source, **_):\n    return 1.0\n")
    words = arguments(
        material,
        tmp_path / "all",
        f"{MODEL}.lora_rank=4",
        f"{LR}=0.01",
        f"custom_reward_function.path={rewards}",
        "custom_reward_function.name=good,missing",
        "data.val_files=[]",
        "trainer.total_training_steps=2",
    )
    words = [word for word in words if word != "custom_reward_function.name=graded"]
    ended = run_command(["sweep", *words[1:]], folder=tmp_path)
    assert ended.code == 2 and "missing" in ended.errors[0]
    assert not (tmp_path / "all").exists(), "nothing was started"
