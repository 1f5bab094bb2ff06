# SPDX-License-Identifier: Apache-2.0
"""The models and prompts of the chaos job; one model has learned to call a tool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.quickstart import materials as quickstart
from tandem.quickstart.calculator import CALCULATOR, Product
from tests.chaos.modes import BATCH, NUM_STEPS, TOOL_KEYS, Engines, Mode, keys_of
from tests.fakes.commands import run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, train_arguments, write_material

NUM_DEMONSTRATIONS = 512
LEARNING_STEPS = 160


@dataclass(frozen=True)
class Materials:
    """The models and prompts of all modes.

    Attributes:
        wide: a policy whose sizes the engines of others accept.
        caller: a policy that calls the calculator in most answers.
    """

    plain: Material
    wide: Path
    calculator: quickstart.Materials
    caller: Path
    engines: Engines

    def arguments(self, mode: Mode, run: Path) -> list[str]:
        """Return the command of a run of a mode into the folder ``run``."""
        keys = keys_of(mode, run, engines=self.engines)
        if not mode.has_tools:
            policy = () if not mode.engine else (f"actor_rollout_ref.model.path={self.wide}",)
            return train_arguments(self.plain, run, *policy, *keys)
        return [
            "train",
            str(Path(quickstart.__file__).parent / "grpo.yaml"),
            f"actor_rollout_ref.model.path={self.caller}",
            f"data.train_files={self.calculator.train}",
            f"trainer.default_local_dir={run}",
            *TOOL_KEYS,
            *keys,
        ]


def always_call(problem: Product) -> str:
    """Return the answer of a writer who calls the calculator, whatever the problem is."""
    return "calculator(12*34) = 408\n#### 408"


def write_materials(
    folder: Path,
    *,
    patch: Callable[[object, str, int], None],
    engines: Engines | None = None,
    with_tools: bool = True,
) -> Materials:
    """Write models and prompts, and teach a model to call the calculator (half a minute).

    Args:
        patch: sets an attribute, of which the caller restores the old value.
        engines: the engines of others that this machine has.
        with_tools: whether a mode needs the model that calls.

    Raises:
        RuntimeError: the model cannot be trained.
    """
    for name in ("NUM_TEST", "NUM_UNSEEN"):
        patch(quickstart, name, 16)
    patch(quickstart, "NUM_DEMONSTRATIONS", NUM_DEMONSTRATIONS)
    patch(quickstart, "NUM_TRAIN", 2 * NUM_STEPS * BATCH)
    patch(quickstart, "NUM_TOKENIZER_TEXTS", 200)
    task = replace(CALCULATOR, writers=((always_call, 1.0),))
    calculator = quickstart.prepare(folder / "calculator", seed=0, task=task)
    caller = teach_to_call(calculator, folder / "caller") if with_tools else calculator.model
    wide = write_tiny_policy(folder / "wide", size=replace(TINY, hidden=64))
    return Materials(
        write_material(folder / "plain"), wide, calculator, caller, engines or Engines()
    )


def teach_to_call(calculator: quickstart.Materials, folder: Path) -> Path:
    """Train a model on the demonstrations; return the folder with its weights."""
    arguments = [
        "sft",
        str(Path(quickstart.__file__).parent / "sft.yaml"),
        f"data.train_files={calculator.demonstrations}",
        f"model.partial_pretrain={calculator.model}",
        f"trainer.default_local_dir={folder / 'run'}",
        *CALCULATOR.tools.sft_keys,  # pyright: ignore[reportOptionalMemberAccess]
        "data.train_batch_size=32",
        "trainer.device=cpu",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={LEARNING_STEPS}",
    ]
    ended = run_command(arguments, folder=folder)
    if ended.code != 0:
        raise RuntimeError(f"the model was not trained: {ended.stderr}")
    return folder / "run" / f"global_step_{LEARNING_STEPS}" / "actor"
