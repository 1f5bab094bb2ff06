# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``tandem sweep``: runs and their names, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli.sweep import parse
from tandem.errors import UserError
from tests.fakes.configured import IN_TURNS

MODEL = "actor_rollout_ref.model"
LR = "actor_rollout_ref.actor.optim.lr"
ADAPTERS = (f"{MODEL}.path=base", f"{MODEL}.lora_rank=8", "data.val_files=[]", "trainer.device=cpu")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are below an empty folder."""
    monkeypatch.chdir(tmp_path)


def test_each_combination_of_values_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = (f"{LR}=1e-4,3e-4", "trainer.default_local_dir=out", "+data.seed=1,2")
    runs = parse([*ADAPTERS, *words, "trainer.logger=[console,tensorboard]"])
    assert [run.name for run in runs] == [
        f"lr_{lr}+seed_{seed}" for lr in ("1e-4", "3e-4") for seed in (1, 2)
    ]
    rates = [run.config.actor_rollout_ref.actor.optim.lr for run in runs]
    assert rates == [1e-4, 1e-4, 3e-4, 3e-4]
    assert [run.config.data.seed for run in runs] == [1, 2, 1, 2]
    folders = [str(run.config.trainer.run_folder) for run in runs]
    assert folders[0] == "out/lr_1e-4+seed_1" and len(set(folders)) == 4
    assert runs[0].config.trainer.logger == ("tensorboard",)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(set(told)), "each notice is printed once"


def test_commas_in_brackets_and_quotes_belong_to_a_value() -> None:
    words = [f"{MODEL}.target_modules=[q_proj,v_proj],'.*(q|k)_proj',all-linear"]
    runs = parse([*ADAPTERS, *words])
    rules = [run.config.actor_rollout_ref.model.target_modules for run in runs]
    assert [run.name for run in runs] == [
        "target_modules_q_proj_v_proj",
        "target_modules_._q_k__proj",
        "target_modules_all-linear",
    ]
    assert rules == [("q_proj", "v_proj"), ".*(q|k)_proj", "all-linear"]


def test_keys_with_the_same_last_part_are_named_in_full() -> None:
    runs = parse([*ADAPTERS, "data.seed=1,2", "actor_rollout_ref.rollout.seed=3,4"])
    assert runs[0].name == "data.seed_1+actor_rollout_ref.rollout.seed_3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((f"{LR}=1e-4",), r"^tandem sweep: no key has several values\. Write one as key=a,b,c"),
        ((f"{LR}=1e-4,1e-4",), "lr_1e-4: two runs have this name"),
        ((f"{LR}=1e-4,2e-4", f"{LR}=1"), f"{LR}: has several values, and is given again"),
        (("trainer.default_local_dir=a,b",), "trainer.default_local_dir: is the folder of all"),
        ((f"{MODEL}.path=a,b",), f"{MODEL}.path='a,b': the runs of a sweep share one base"),
        ((f"{MODEL}.lora_rank=0,8",), "lora_rank=0: the runs of a sweep train adapters over"),
        (
            ("data.seed=1,2", "trainer.n_gpus_per_node=2"),
            "trainer.n_gpus_per_node=2: a sweep runs in one process. Leave it out, or start each",
        ),
        (
            ("data.seed=1,2", *IN_TURNS),
            "trainer.max_lag=1: a sweep does not train asynchronously",
        ),
        (
            ("trainer.seed=1,2", "actor_rollout_ref.actor.load_weight=False"),
            "trainer.seed='1,2': the runs of a sweep share one base, which this key makes",
        ),
        (("data.seed=1,2", "trainer.max_restarts=1"), "trainer.max_restarts=1: a sweep starts"),
        (("data.seed=1,2", "algorithm.adv_estimator=gae"), "='gae': a sweep has no critics"),
        (("data.seed=1,2", "actor_rollout_ref.rollout.name=hf"), "with the native engine"),
        (("data.seed=1,2", f"{LR}x=3"), "optim.lrx"),
    ],
)
def test_what_cannot_be_a_sweep_is_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse([*ADAPTERS, *words])
    assert "\n" not in str(caught.value)
