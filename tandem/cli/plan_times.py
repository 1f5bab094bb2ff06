# SPDX-License-Identifier: Apache-2.0
"""``tandem plan --times RUN_OR_TABLE ARGUMENTS``: the plan, and a better split of the devices.

The times come from earlier runs, or from a JSON table (``planner.task_times``). The option may be
given several times, for runs on different numbers of devices. Nothing is started, and the plan is
one for another machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem.cli.plan import OPTIONS, plan_arguments, print_plan, print_rows, take_option
from tandem.cli.printing import TableConsole
from tandem.config.parse.names import ALIASES
from tandem.config.plan.plan import Plan
from tandem.config.schema.run import RunConfig
from tandem.planner.advice import SplitAdvice, advise, format_seconds
from tandem.planner.task_times import TIMES_OPTION, read_times

_NODES, _DEVICES = "rollout.nnodes", "rollout.n_gpus_per_node"
_MODE = "trainer.v1.trainer_mode"
_THRESHOLD = "async_training.staleness_threshold"
_LEFT_OUT = "left out: memory, rewards, and the recomputation of caches after a weight update{}."
_NO_PACE = (
    "; and that decode steps of more sequences take longer, which matters if fewer devices "
    "generate: the times of a synchronous run with rows for a whole batch would show it"
)


def run(arguments: Sequence[str]) -> int:
    """Print the plan and the advice."""
    values, words = take_option(
        [word for word in arguments if word not in OPTIONS],
        TIMES_OPTION,
        rule="must name a run folder or a table",
        remedy="Name one.",
    )
    paths = [Path(os.path.expanduser(value)) for value in values]
    plan = plan_arguments(words)
    assert isinstance(plan.config, RunConfig), "plan_arguments plans runs"
    times = read_times(paths)
    advice = _in_keys_of(plan, advise(plan.config, times))
    if "--json" in arguments:
        print(json.dumps(plan.to_dict() | {"suggestion": advice.to_dict()}, indent=2))
        return 0
    console = TableConsole()
    print_plan(plan, console, with_keys="--keys" in arguments)
    print_rows("Suggested split, simulated", _rows(advice), console=console)
    line = "no split is faster than the configured one"
    if advice.is_better:
        left_out = _LEFT_OUT.format("" if times.decoding else _NO_PACE)
        line = f"{left_out} Try it for a few steps.\narguments: {' '.join(advice.overrides)}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _in_keys_of(plan: Plan, advice: SplitAdvice) -> SplitAdvice:
    """Return advice that can be appended to the command line: it takes back the keys of verl that
    divide the devices or set the lag, and counts all devices.
    """
    trainer, overrides = plan.config.trainer, advice.overrides
    taken_back: tuple[str, ...] = ()
    if not {*plan.verl_defaults, *plan.key_effects}.isdisjoint((_NODES, _DEVICES)):
        taken_back = (f"{_NODES}=null", f"{_DEVICES}=null")
    elif _MODE in plan.key_effects:
        taken_back = (f"{_MODE}=sync",)
    if taken_back:
        own = (
            f"trainer.nnodes={trainer.nnodes}",
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}",
        )
        overrides = (*overrides, *own, *taken_back)
    if _THRESHOLD in plan.key_effects:
        overrides = tuple(word.replace(ALIASES[_THRESHOLD], _THRESHOLD) for word in overrides)
    return replace(advice, overrides=overrides)


def _rows(advice: SplitAdvice) -> list[tuple[str, str]]:
    suggestion = advice.suggestion
    gain = advice.configured_seconds / suggestion.seconds
    return [
        *(
            (", ".join(group), f"{count} device(s)")
            for group, count in zip(advice.groups, suggestion.split.devices, strict=True)
        ),
        ("generate ahead, steps", f"{suggestion.split.lag:g}"),
        ("step, predicted", format_seconds(suggestion.seconds)),
        (
            "step as configured, predicted",
            f"{format_seconds(advice.configured_seconds)} ({gain:.2f} times)",
        ),
        ("busiest pool, the least a step can take", format_seconds(advice.lower_bound_s)),
        ("splits simulated", str(advice.num_simulated)),
    ]
