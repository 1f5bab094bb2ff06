# SPDX-License-Identifier: Apache-2.0
"""The modes of runs that the chaos job disturbs: their arguments, and which processes they have.

Every run trains each of its 24 prompts once, in six steps of four prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.quickstart import materials as quickstart
from tandem.quickstart.calculator import CALCULATOR
from tests.fakes.tiny_run import Material, train_arguments, write_material

NUM_STEPS = 6
BATCH = 4
SAMPLES = 4
DUMPS = "dumps"
"""The folder, within that of a run, to which it writes all samples of each step."""

_ALIKE = (
    "data.val_files=[]",
    "trainer.device=cpu",
    f"data.train_batch_size={BATCH}",
    f"data.train_max_samples={NUM_STEPS * BATCH}",
    "trainer.total_epochs=1",
    f"trainer.total_training_steps={NUM_STEPS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "trainer.save_freq=2",
)
_SPLIT = (
    "trainer.n_gpus_per_node=2",
    "trainer.separated_node_tasks=[[logp,ref_logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
    "trainer.deterministic_async=True",
)
_IN_TURNS = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)


def _ahead(steps: int) -> tuple[str, ...]:
    return ("trainer.async_pipeline=True", f"trainer.generate_ahead_steps={steps}")


@dataclass(frozen=True)
class Mode:
    """A mode of runs.

    Attributes:
        kinds: the kinds of its processes, as ``victims`` names them.
        is_repeatable: whether the final weights are the same in every run.
        keys: what distinguishes it.
        has_tools: whether the policy may call a calculator.
    """

    kinds: tuple[str, ...]
    is_repeatable: bool
    keys: tuple[str, ...] = ()
    has_tools: bool = False


_ALONE = ("driver", "reward")
_CLUSTER = ("raylet", "gcs")
MODES = {
    "synchronous": Mode(_ALONE, True),
    "asynchronous, g=1": Mode(
        (*_ALONE, "trainer", "rollout", *_CLUSTER), True, (*_SPLIT, *_ahead(1))
    ),
    "asynchronous, g=4": Mode(_ALONE, False, (*_IN_TURNS, *_ahead(4))),
    "two processes": Mode((*_ALONE, "trainer", *_CLUSTER), True, ("trainer.n_gpus_per_node=2",)),
    "agents": Mode((*_ALONE, "tool"), True, has_tools=True),
}


@dataclass(frozen=True)
class Materials:
    """Models and prompts of all modes."""

    plain: Material
    calculator: quickstart.Materials

    def arguments(self, mode: Mode, run: Path) -> list[str]:
        """Return the command of a run of a mode into the folder ``run``."""
        keys = [*_ALIKE, f"trainer.rollout_data_dir={run / DUMPS}", *mode.keys]
        if not mode.has_tools:
            return train_arguments(self.plain, run, *keys)
        tools = CALCULATOR.tools
        assert tools is not None, "the calculator is a tool"
        return [
            "train",
            str(Path(quickstart.__file__).parent / "grpo.yaml"),
            f"actor_rollout_ref.model.path={self.calculator.model}",
            f"data.train_files={self.calculator.train}",
            f"trainer.default_local_dir={run}",
            *tools.grpo_keys,
            *tools.tool_keys,
            "data.max_response_length=24",
            *keys,
        ]


def write_materials(folder: Path, *, patch: Callable[[object, str, int], None]) -> Materials:
    """Write models and prompts.

    Args:
        patch: sets an attribute, of which the caller restores the old value.
    """
    for name in ("NUM_DEMONSTRATIONS", "NUM_TEST", "NUM_UNSEEN"):
        patch(quickstart, name, 16)
    patch(quickstart, "NUM_TRAIN", 2 * NUM_STEPS * BATCH)
    patch(quickstart, "NUM_TOKENIZER_TEXTS", 200)
    calculator = quickstart.prepare(folder / "calculator", seed=0, task=CALCULATOR)
    return Materials(write_material(folder / "plain"), calculator)
