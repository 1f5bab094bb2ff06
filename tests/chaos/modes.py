# SPDX-License-Identifier: Apache-2.0
"""The modes of runs that the chaos job disturbs: their keys, and which processes they have.

Every run trains each of its 24 prompts once, in six steps of four prompts.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NUM_STEPS = 6
BATCH = 4
SAMPLES = 4
DUMPS = "dumps"
"""The folder, within that of a run, to which it writes all samples of each step."""
TIMEOUT_S = 40
"""The time limit of collectives. A worker may give no sign of life for half of it."""
MEETING_S = 60
"""The time in which the hosts of a run have to find each other."""
ANSWER_S = 10
"""The time limit of a reward, and of a call of a tool."""
MAX_ENGINE_RESTARTS = 3
TASKS = Path(__file__).parent / "slow_tasks.py"

_ROLLOUT = "actor_rollout_ref.rollout"
_ALIKE = (
    "data.val_files=[]",
    "trainer.device=cpu",
    f"data.train_batch_size={BATCH}",
    f"data.train_max_samples={NUM_STEPS * BATCH}",
    "trainer.total_epochs=1",
    f"trainer.total_training_steps={NUM_STEPS}",
    f"{_ROLLOUT}.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    "trainer.save_freq=2",
    "trainer.resume_mode=auto",
    f"custom_reward_function.path={TASKS}",
    "custom_reward_function.name=graded",
    "reward.num_workers=1",
    f"reward.timeout_s={ANSWER_S}",
)
_BY_TRAINER = "algorithm.rollout_correction.bypass_mode=False"
"""Old log-probs are computed by the trainer."""
_SEVERAL = (f"actor_rollout_ref.nccl_timeout={TIMEOUT_S}",)
_APART = "trainer.separated_node_tasks=[[logp,ref_logp,actor-train],[generate]]"
_SPLIT = (
    *_SEVERAL,
    "trainer.n_gpus_per_node=2",
    _APART,
    "trainer.separated_node_ratios=[0.5,0.5]",
    "trainer.deterministic_async=True",
)
_RESTARTS = f"{_ROLLOUT}.max_engine_restarts={MAX_ENGINE_RESTARTS}"
_REPLACED = (
    *_SEVERAL,
    "trainer.n_gpus_per_node=3",
    _APART,
    "trainer.separated_node_ratios=[0.34,0.66]",
    _RESTARTS,
    # Batch mates, which round log-probs of the rollout, depend on which workers are lost.
    _BY_TRAINER,
)
"""One rank trains and two generate, which are replaced."""
_IN_TURNS = (
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)
TOOL_KEYS = (
    "data.max_response_length=64",
    f"{_ROLLOUT}.multi_turn.enable=True",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns=3",
    f"{_ROLLOUT}.multi_turn.function_tool_path={TASKS}",
    f"{_ROLLOUT}.multi_turn.tool_timeout_s={ANSWER_S}",
    f"{_ROLLOUT}.agent.num_workers=2",
    # Batch mates, which round log-probs of the rollout, depend on the time that tools take.
    _BY_TRAINER,
)


def _ahead(steps: int) -> tuple[str, ...]:
    return ("trainer.async_pipeline=True", f"trainer.generate_ahead_steps={steps}")


@dataclass(frozen=True)
class Mode:
    """A mode of runs.

    Attributes:
        kinds: the kinds of its processes, as ``Attempt.find`` names them.
        is_repeatable: whether the final weights are the same in every run.
        resumes_alike: whether that holds for a run that was resumed from a checkpoint, too. The
            lag of an asynchronous run starts again after a resume.
        keys: what distinguishes it.
        has_tools: whether the policy calls a calculator.
        engine: the engine of others that generates; "": tandem's own.
        num_nodes: the number of hosts.
        replaces: whether a worker that generates is replaced, so that its end ends no run.
    """

    kinds: tuple[str, ...]
    is_repeatable: bool
    keys: tuple[str, ...] = ()
    has_tools: bool = False
    engine: Literal["", "vllm", "sglang"] = ""
    num_nodes: int = 1
    resumes_alike: bool = True
    replaces: bool = False


_ALONE = ("driver", "reward")
_CLUSTER = ("raylet", "gcs")
MODES = {
    "synchronous": Mode(_ALONE, True),
    "asynchronous, g=1": Mode(
        (*_ALONE, "trainer", "rollout", *_CLUSTER),
        True,
        (*_SPLIT, *_ahead(1)),
        resumes_alike=False,
    ),
    "asynchronous, g=4": Mode(_ALONE, False, (*_IN_TURNS, *_ahead(4))),
    "synchronous, replaced": Mode(
        (*_ALONE, "trainer", "rollout", "rollout", "rollout", *_CLUSTER),
        True,
        _REPLACED,
        replaces=True,
    ),
    "asynchronous, replaced": Mode(
        (*_ALONE, "trainer", "rollout", "rollout", "rollout", *_CLUSTER),
        True,
        (*_REPLACED, "trainer.deterministic_async=True", *_ahead(1)),
        resumes_alike=False,
        replaces=True,
    ),
    "two processes": Mode(
        (*_ALONE, "trainer", *_CLUSTER), True, (*_SEVERAL, "trainer.n_gpus_per_node=2")
    ),
    "two nodes": Mode(
        (*_ALONE, "member", "trainer", *_CLUSTER),
        True,
        (
            *_SEVERAL,
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=1",
            f"trainer.ray_wait_register_center_timeout={MEETING_S}",
        ),
        num_nodes=2,
    ),
    "agents": Mode((*_ALONE, "tool", "tool"), True, has_tools=True),
    "vLLM": Mode(_ALONE, True, engine="vllm"),
    "SGLang": Mode(
        (*_ALONE, "engine"),
        True,
        (_RESTARTS,),
        engine="sglang",
    ),
}


@dataclass(frozen=True)
class Engines:
    """The engines of others that this machine has.

    Attributes:
        sglang_python: the interpreter of SGLang's environment; "" without one.
    """

    has_vllm: bool = False
    sglang_python: str = ""

    @classmethod
    def find(cls) -> Engines:
        """Return those of this interpreter and of TANDEM_SGLANG_PYTHON."""
        python = os.environ.get("TANDEM_SGLANG_PYTHON", "")
        has_vllm = importlib.util.find_spec("vllm") is not None
        return cls(has_vllm, python if Path(python).is_file() else "")


def keys_of(mode: Mode, run: Path, *, engines: Engines) -> list[str]:
    """Return the keys of a run of a mode into the folder ``run``, after those of its task."""
    keys = [*_ALIKE, f"trainer.rollout_data_dir={run / DUMPS}", *mode.keys]
    if mode.engine:
        keys.append(f"{_ROLLOUT}.name={mode.engine}")
    if mode.engine == "sglang":
        keys.append(f"{_ROLLOUT}.engine_kwargs.sglang.python={engines.sglang_python}")
    return keys


def find_missing(*, engines: Engines, has_hosts: bool) -> dict[str, str]:
    """Return the modes that cannot run on this machine, and why."""
    missing: dict[str, str] = {}
    if not engines.has_vllm:
        missing["vLLM"] = "vllm is not installed in this environment"
    if not engines.sglang_python:
        missing["SGLang"] = "TANDEM_SGLANG_PYTHON names no interpreter"
    if not has_hosts:
        missing["two nodes"] = "network namespaces are not permitted"
    return missing
