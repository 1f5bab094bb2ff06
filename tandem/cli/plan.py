# SPDX-License-Identifier: Apache-2.0
"""``tandem plan [--json] ARGUMENTS OF TRAIN``: resolve and check everything, start nothing.

Needs no model and no torch. Data files that cannot be counted become a warning and null fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.cli.model_fit import length_caution, read_local_config
from tandem.config.memory import ModelSizes
from tandem.config.overrides import load_config
from tandem.config.plan import Plan, make_plan
from tandem.config.run import RunConfig
from tandem.data.files import count_rows
from tandem.errors import UserError


@dataclass(frozen=True, slots=True)
class RowCount:
    """Rows of some files; None and the reason where they could not be counted."""

    rows: int | None
    problem: str


def run(arguments: Sequence[str]) -> int:
    """Print the plan of ``tandem train`` with these arguments."""
    plan = plan_arguments([argument for argument in arguments if argument != "--json"])
    if "--json" in arguments:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        print_plan(plan, Console())
    return 0


def plan_arguments(arguments: Sequence[str]) -> Plan:
    """The plan for the arguments of ``tandem train``. Raises UserError for mistakes in them."""
    loaded = load_config(RunConfig, arguments)
    data = loaded.config.data
    train = count("data.train_files", data.train_files)
    val = count("data.val_files", data.val_files) if data.val_files else RowCount(0, "")
    hf_config = read_local_config(loaded.config.actor_rollout_ref.model.path)
    return make_plan(
        loaded,
        num_train_rows=train.rows,
        num_val_rows=val.rows,
        sizes=ModelSizes.of(hf_config),
        warnings=[
            *(found.problem for found in (train, val) if found.problem),
            *length_caution(loaded.config, hf_config),
        ],
    )


def count(key: str, files: Sequence[str]) -> RowCount:
    """Count rows without failing: the data may be made after the plan."""
    try:
        return RowCount(count_rows(files, key=key), "")
    except (UserError, OSError) as error:
        return RowCount(None, " ".join(str(error).split()))


def print_plan(plan: Plan, console: Console) -> None:
    """The plan for a reader."""
    for title, rows in plan_tables(plan):
        table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
        for row in rows:
            table.add_row(*(Text(text) for text in row))
        if rows:
            console.print(table)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)


def plan_tables(plan: Plan) -> tuple[tuple[str, list[tuple[str, str]]], ...]:
    """Titles and rows of what is printed."""
    steps = [
        ("training rows", _shown(plan.num_train_rows)),
        ("validation rows", _shown(plan.num_val_rows)),
        ("steps per epoch", _shown(plan.steps_per_epoch)),
        ("training steps", _shown(plan.total_training_steps)),
        ("sequences per step", str(plan.sequences_per_step)),
        ("optimizer steps per step", str(plan.optimizer_steps_per_step)),
        ("validations at", _shown_steps(plan.validation_steps)),
    ]
    pools = [(", ".join(pool.tasks), f"{pool.devices} device(s)") for pool in plan.pools]
    gib = {} if plan.memory is None else plan.memory.to_gib()
    memory = [(name, f"{value:.2f}") for name, value in gib.items()]
    unknown = [(key, "unknown key") for key in plan.unknown_keys]
    return (
        ("Steps", steps),
        ("Pools", pools),
        ("Memory of an accelerator, GiB", memory),
        ("Keys without effect", [*plan.keys_without_effect.items(), *unknown]),
    )


def _shown(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _shown_steps(steps: tuple[int, ...] | None) -> str:
    if steps is None:
        return "unknown"
    if len(steps) <= 8:
        return ", ".join(map(str, steps)) or "never"
    return f"{', '.join(map(str, steps[:4]))}, ..., {', '.join(map(str, steps[-2:]))}"
