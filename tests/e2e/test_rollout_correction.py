# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction in whole runs: where rollout and trainer agree it changes nothing, and what
it rejects is not learned from.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.commands import run_command
from tests.fakes.tiny_run import Material, metrics_of, train_arguments

KEY = "algorithm.rollout_correction"
ACTOR = "actor_rollout_ref.actor"
TWO_STEPS = ("data.val_files=[]", "trainer.total_training_steps=2", "trainer.save_freq=2")
Run = tuple[dict[int, dict[str, float]], dict[str, torch.Tensor]]


def trained(material: Material, folder: Path, *overrides: str) -> Run:
    """Metrics and trained weights after two steps."""
    arguments = train_arguments(material, folder / "run", *TWO_STEPS, *overrides)
    ended = run_command(arguments, folder=folder)
    assert ended.code == 0, ended.stderr
    (weights,) = (folder / "run").glob("global_step_*/actor/*model.safetensors")
    return metrics_of(folder / "run"), load_file(weights)


@pytest.fixture(scope="module")
def plain(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Without a correction."""
    return trained(material, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "keys",
    [
        (f"{KEY}.rollout_is=token",),
        (f"{KEY}.rollout_is=sequence", f"{KEY}.rollout_is_batch_normalize=True"),
        (f"{KEY}.rollout_rs=seq_mean_k3", f"{KEY}.rollout_rs_threshold=0.01"),
        (f"{KEY}.bypass_mode=True", f"{KEY}.loss_type=reinforce", f"{KEY}.rollout_is=token"),
    ],
)
def test_on_policy_every_correction_is_the_identity(
    material: Material, tmp_path: Path, plain: Run, keys: tuple[str, ...]
) -> None:
    metrics, weights = trained(material, tmp_path, *keys)
    for row in metrics.values():
        assert row["rollout_corr/kl"] == pytest.approx(0, abs=1e-5)
        assert row["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-5)
        assert row["rollout_corr/rollout_is_ratio_fraction_high"] == 0
        assert not [name for name in row if name.startswith("lag_sum")]
    assert not [name for row in plain[0].values() for name in row if "rollout_corr" in name]
    for name, weight in plain[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-3)


def test_what_is_rejected_is_not_learned_from(material: Material, tmp_path: Path) -> None:
    """Rounding alone is a divergence of more than 1e-30 in many tokens."""
    keys = (f"{KEY}.bypass_mode=True", f"{KEY}.rollout_rs=token_k2")
    all_rejected, _ = trained(
        material, tmp_path / "all", *keys, f"{KEY}.rollout_rs_threshold=1e-30"
    )
    none_rejected, _ = trained(
        material, tmp_path / "none", *keys, f"{KEY}.rollout_rs_threshold=100"
    )
    name = "rollout_corr/rollout_rs_masked_fraction"
    assert all_rejected[1][name] > 0.1
    assert none_rejected[1][name] == 0
    assert all_rejected[1]["actor/grad_norm"] < none_rejected[1]["actor/grad_norm"]
    empty, weights = trained(
        material,
        tmp_path / "empty",
        f"{KEY}.rollout_rs=seq_max_k2",
        f"{KEY}.rollout_rs_threshold=1e-30",
    )
    assert empty[1]["rollout_corr/rollout_rs_seq_masked_fraction"] > 0.5
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_generation_in_fp8_is_corrected(rank: int, material: Material, tmp_path: Path) -> None:
    """Whether adapters are generated with is tested in ``unit/rollout/paged``."""
    quantized = "actor_rollout_ref.rollout.quantization=fp8"
    adapted = f"actor_rollout_ref.model.lora_rank={rank}"
    metrics, _ = trained(material, tmp_path, quantized, adapted)
    for row in metrics.values():
        assert 0 < row["rollout_corr/k3_kl"] < 0.05
        assert 0.9 < row["rollout_corr/rollout_is_eff_sample_size"] < 1
