# SPDX-License-Identifier: Apache-2.0
"""``tandem plan [--json] [--keys] [--elsewhere] [--memory GIB] [--times RUN] [sft] ARGUMENTS``:
resolve and check a run, start nothing. ``--keys`` prints the effect of every key that was set.

The arguments are those of ``tandem train``, or after the word ``sft`` those of ``tandem sft``, or
after the name of an entry module of verl (``cli.entries``) those of that module. This file checks
the arguments and prints plans; it needs no torch. ``plan_here`` then checks the run on this
machine. With ``--elsewhere``, ``--memory`` (``plan_memory``) or ``--times`` (``plan_times``), a
plan is for another machine: files and devices that are not here give warnings and null fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cli.printing import TableConsole
from tandem.config.check.device_rules import require_division, require_whole_layers
from tandem.config.derived.pools import CRITIC, REWARD_MODEL, TASKS, Placement, Pool
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import trained_model
from tandem.config.parse.keys import in_override_grammar
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.plan.memory import MemoryPlan
from tandem.config.plan.plan import UNREAD_MODEL, Plan, make_plan
from tandem.config.schema.data import DataConfig
from tandem.config.schema.families import (
    NATIVE_FAMILIES,
    require_value_head,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig, SftDataConfig
from tandem.data.selection import row_source
from tandem.driver.arguments import load_arguments, refusals, with_found
from tandem.driver.model_checks import (
    length_warnings,
    read_local_config,
    require_local_family,
)
from tandem.errors import UserError
from tandem.metrics.sinks import require_known_loggers
from tandem.platforms.names import AUTO, VARIABLE, platform_name

OPTIONS = ("--json", "--keys", "--elsewhere")
"""The options without a value."""


@dataclass(frozen=True, slots=True)
class RowCount:
    """The number of rows of some files, or None and the reason if they cannot be counted."""

    rows: int | None
    problem: str


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan and how it is to be printed."""

    plan: Plan
    as_json: bool
    with_keys: bool

    def show(self, plan: Plan) -> int:
        """Print ``plan``; return the exit code. Raise its first refusal."""
        if self.as_json:
            print(json.dumps(plan.to_dict(), indent=2))
        else:
            print_plan(plan, TableConsole(), with_keys=self.with_keys)
        for error in plan.refusals:
            raise error
        return 0


def parse(arguments: Sequence[str]) -> PlanRequest:
    """Return the plan of a run with these arguments. Raise UserError if one is wrong."""
    words = [argument for argument in arguments if argument not in OPTIONS]
    plan = plan_sft_arguments(words[1:]) if words[:1] == ["sft"] else plan_arguments(words)
    return PlanRequest(plan, "--json" in arguments, "--keys" in arguments)


def run(arguments: Sequence[str]) -> int:
    """Print the plan of a run on another machine; return the exit code."""
    request = parse(arguments)
    return request.show(request.plan)


def take_option(
    words: Sequence[str], option: str, *, rule: str, remedy: str
) -> tuple[list[str], list[str]]:
    """Return the values of an option, which may be given several times, and the other words.

    Raises:
        UserError: a value is missing; ``rule`` and ``remedy`` are those of the error.
    """
    values: list[str] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == option:
            value = next(remaining, "")
        elif word.startswith(f"{option}="):
            value = word.removeprefix(f"{option}=")
        else:
            others.append(word)
            continue
        if not value:
            raise UserError(option, "", rule=rule, remedy=remedy)
        values.append(value)
    return values, others


def describe_memory_keys(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return a row about the memory keys that a run sets itself; none if it sets none."""
    shown = " ".join(f"{key}={value}" for key, value in chosen.items())
    return {"memory keys": f"{shown} (chosen to fit the devices)"} if shown else {}


def plan_arguments(arguments: Sequence[str]) -> Plan:
    """Return the plan for arguments of ``tandem train``. Raise UserError if one is wrong."""
    loaded = load_arguments(RunConfig, arguments)
    hf_config = _local_config(loaded.config)
    _check_reward_model(loaded.config)
    plan = _plan(loaded, hf_config)
    _check_environment(plan)
    require_known_loggers(loaded.config.trainer.logger)
    return plan


def plan_sft_arguments(arguments: Sequence[str]) -> Plan:
    """Return the plan for arguments of ``tandem sft``. Raise UserError if one is wrong."""
    loaded = load_arguments(SftConfig, arguments)
    plan = _plan(loaded, _local_config(loaded.config))
    _check_environment(plan)
    require_known_loggers(loaded.config.trainer.logger)
    return plan


def _local_config(config: RunConfig | SftConfig) -> Mapping[str, Any]:
    """Return the checked config.json of the trained model; {} if it is not on this machine."""
    model = trained_model(config)
    hf_config = read_local_config(model.config.path)
    require_local_family(
        hf_config,
        key=model.key,
        path=model.config.path,
        trust_remote_code=model.config.trust_remote_code,
    )
    return hf_config


def _unread_model(config: RunConfig | SftConfig, hf_config: Mapping[str, Any]) -> Iterator[str]:
    model = trained_model(config)
    if model.config.path and not hf_config:
        yield f"{model.name}: {UNREAD_MODEL}"


def _check_environment(plan: Plan) -> None:
    """Raise UserError if the environment names an impossible platform for ``auto``."""
    named = os.environ.get(VARIABLE, "")
    open_pools = [pool.name for pool in plan.placement.used_pools if pool.platform == AUTO]
    if named and open_pools:
        found = dict.fromkeys(open_pools, platform_name(named, key=VARIABLE))
        if isinstance(plan.config, RunConfig):
            with_found(plan.config, plan.placement, found=found)


def _check_reward_model(config: RunConfig) -> None:
    path = config.reward_model.model.path
    hf_config = read_local_config(path) if config.reward_model.enable and path else {}
    if hf_config:
        require_value_head(hf_config, key="reward_model.model.path", path=path)


def _plan(
    loaded: LoadedConfig[RunConfig] | LoadedConfig[SftConfig],
    hf_config: Mapping[str, Any],
) -> Plan:
    config, data = loaded.config, loaded.config.data
    found = auxiliary_sizes(config)
    sizes = ModelSizes.of(hf_config)
    train = count(data, validation=False)
    val = count(data, validation=True) if data.val_files else RowCount(0, "")
    plan = make_plan(
        loaded,
        num_train_rows=train.rows,
        num_val_rows=val.rows,
        sizes=sizes,
        auxiliary={name: known for name, known in found.items() if known is not None},
        warnings=[
            *(rows.problem for rows in (train, val) if rows.problem),
            *_unread_model(config, hf_config),
            *length_warnings(trained_model(config), hf_config),
        ],
        refusals=refusals(config),
    )
    require_division(config, plan.placement, models=dict.fromkeys(TASKS, sizes) | found)
    family = hf_config.get("model_type", NATIVE_FAMILIES[0])
    require_whole_layers(config, plan.placement, family=family)
    return plan


def auxiliary_sizes(config: RunConfig | SftConfig) -> dict[str, ModelSizes | None]:
    """Return the sizes of a critic and a reward model of their own; None if they are unknown."""
    if isinstance(config, SftConfig):
        return {}
    paths = {CRITIC: config.critic.model.path, REWARD_MODEL: config.reward_model.model.path}
    return {name: ModelSizes.of(read_local_config(path)) for name, path in paths.items() if path}


def count(data: DataConfig | SftDataConfig, *, validation: bool) -> RowCount:
    """Return the number of rows. Missing files are no error: they may be made after the plan."""
    try:
        return RowCount(row_source(data, validation=validation).count(), "")
    except (UserError, OSError) as error:
        return RowCount(None, " ".join(str(error).split()))


def print_plan(plan: Plan, console: Console, *, with_keys: bool) -> None:
    """Print the plan as tables; ``with_keys`` adds the effect of every key."""
    for title, rows in plan_tables(plan):
        print_rows(title, rows, console=console)
    if with_keys:
        print_rows("Keys", [*plan.key_effects.items()], console=console)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)


def print_rows(title: str, rows: Sequence[tuple[str, str]], *, console: Console) -> None:
    """Print a table of names and values, or nothing if there are no rows."""
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    for row in rows:
        table.add_row(*(Text(text) for text in row))
    if rows:
        console.print(table)


def plan_tables(plan: Plan) -> tuple[tuple[str, list[tuple[str, str]]], ...]:
    """Return the titles and rows of the printed tables."""
    schedule = plan.schedule
    steps = [
        ("training rows", _shown(plan.num_train_rows)),
        ("validation rows", _shown(plan.num_val_rows)),
        ("steps per epoch", _shown(schedule and schedule.steps_per_epoch)),
        ("training steps", _shown(schedule and schedule.total_training_steps)),
        ("sequences per step", str(plan.sequences_per_step)),
        ("optimizer steps per step", str(plan.optimizer_steps_per_step)),
        ("validations at", _shown_steps(schedule and schedule.validation_steps)),
        ("checkpoints at", _shown_steps(schedule and schedule.save_steps)),
    ]
    pools = [
        (
            ", ".join(plan.tasks_of(pool)) or f"idle ({pool.name})",
            _shown_devices(pool, plan.placement),
        )
        for pool in plan.placement.pools
    ]
    memory = [
        (name, ", ".join(_shown_parts(needed))) for name, needed in (plan.memory or {}).items()
    ]
    defaults = [(key, in_override_grammar(value)) for key, value in plan.verl_defaults.items()]
    unknown = [(key, "unknown key") for key in plan.unknown_keys]
    refused = [(error.key, f"{error.rule}. {error.remedy}") for error in plan.refusals]
    return (
        ("Run", list(plan.run.items())),
        ("Steps", steps),
        ("Pools", pools),
        ("Weights between pools", list(plan.weights.items())),
        ("Memory per accelerator of each pool, GiB", memory),
        ("Defaults of verl, not of tandem", defaults),
        ("Keys without effect", [*plan.ignored_keys.items(), *unknown]),
        ("Refused", refused),
    )


def _shown_parts(memory: MemoryPlan) -> Iterator[str]:
    for part, gib in memory.to_gib().items():
        if gib:
            yield f"{'on the host' if part == 'host' else part} {gib:.2f}"


def _shown_devices(pool: Pool, placement: Placement) -> str:
    ranges = (
        f"{r.first}-{r.last} of node {r.node}"
        if r.last > r.first
        else f"{r.first} of node {r.node}"
        for r in placement.node_ranges(pool)
    )
    kind = f"{pool.platform} " if placement.is_mixed else ""
    return f"{pool.num_devices} {kind}device(s): {', '.join(ranges)}"


def _shown(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _shown_steps(steps: tuple[int, ...] | None) -> str:
    if steps is None:
        return "unknown"
    if len(steps) <= 8:
        return ", ".join(map(str, steps)) or "never"
    return f"{', '.join(map(str, steps[:4]))}, ..., {', '.join(map(str, steps[-2:]))}"
