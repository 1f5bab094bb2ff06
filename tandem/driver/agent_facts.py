# SPDX-License-Identifier: Apache-2.0
"""The facts of a run's agents that are known once its data and tools are read, for its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.data.call_formats import ToolSchema
from tandem.data.dialogue import ProbedFact
from tandem.data.rendering import SINGLE_TURN, PromptEntry, PromptRow
from tandem.data.tokenizer import ChatRefused, TextCodec
from tandem.driver.agents import AgentPlan

_ASKED = [{"role": "user", "content": "x"}]


def describe_agents(
    plan: AgentPlan | None,
    *,
    codec: TextCodec,
    train: Sequence[PromptRow | PromptEntry],
    validation: Sequence[PromptRow | PromptEntry],
) -> Mapping[str, str]:
    """Return what a plan says about agents: name -> text; nothing without any."""
    if plan is None:
        return {}
    described = {"agents of the rows": _count_rows(train)}
    if validation:
        described["agents of the validation"] = _count_rows(validation)
    if plan.schemas:
        described["schemas of the tools"] = _measure_schemas(plan.schemas, codec)
    described["form of calls"] = plan.format_name
    for fact in plan.facts:
        described[f"template, {fact.kind}"] = _describe_fact(fact, renders_anew=plan.renders_anew)
    held = ", ".join(f"{one.name} ({one.held_by})" for one in plan.protections if one.held_by)
    if held:
        described["code of the policy"] = f"held by the jail: {held}"
    if plan.notes:
        described["of the files of tools"] = "; ".join(plan.notes)
    return described


def _count_rows(rows: Sequence[PromptRow | PromptEntry]) -> str:
    counts = Counter(row.agent or SINGLE_TURN for row in rows)
    return ", ".join(f"{name}: {count} rows" for name, count in counts.most_common())


def _measure_schemas(schemas: Sequence[ToolSchema], codec: TextCodec) -> str:
    """Return the tokens that schemas add to a prompt, each alone and all together."""

    def measure(some: Sequence[ToolSchema]) -> int:
        with_schemas = codec.render([_ASKED], settings={"tools": list(some)})
        asked, alone = codec.encode([*with_schemas, *codec.render([_ASKED])])
        return len(asked) - len(alone)

    try:
        each = ", ".join(f"{one['function']['name']} {measure([one])}" for one in schemas)
        total = measure(schemas)
        if total == 0:
            return "none in a prompt: the chat template does not show them"
        return f"{total} tokens of a prompt ({each}, each by itself)"
    except ChatRefused as error:
        return f"not measured: the template {error}"


def _describe_fact(fact: ProbedFact, *, renders_anew: bool) -> str:
    if fact.fault:
        return f"{fact.fault}; see tokenization_sanity_check_mode"
    if fact.appends:
        return "keeps all tokens before it, so that turns are appended exactly"
    if renders_anew:
        return "drops a part of earlier turns, and the conversation forks there"
    return "drops a part of earlier turns, which the policy still sees: tokens are appended"
