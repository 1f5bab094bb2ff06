# SPDX-License-Identifier: Apache-2.0
"""The agents of a run by its configuration: their check before the start, and their processes."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tandem.agents.code_tool import (
    check_protections,
    describe_take_over,
    survey_code_tools,
    take_over,
)
from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import (
    FUNCTION_KEY,
    TOOL_KEY,
    EnvironmentSetup,
    ToolLimits,
    read_interaction_file,
    read_tool_file,
)
from tandem.children.code_jail import JailError
from tandem.children.environment import child_environment
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.run import RunConfig
from tandem.data.call_formats import CALL_FORMATS, ToolSchema
from tandem.data.dialogue import TOOL, USER, Dialogue, ProbedFact
from tandem.data.prompts import SINGLE_TURN, TOOL_AGENT, AgentRule, PromptEntry
from tandem.data.tokenizer import TextCodec
from tandem.driver.execution import complete
from tandem.errors import UserError
from tandem.pipeline.conversing import Conversing, TurnLimits

logger = logging.getLogger(__name__)

ENVIRONMENT_LOG_FILE = "environments.log"
_ROLLOUT = "actor_rollout_ref.rollout"
_ENVIRONMENT_KEY = f"{_ROLLOUT}.agent.environment"
_TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """The checked agents of a run.

    Attributes:
        schemas: the schemas of the tools, as their processes report them.
        facts: the results of trying the chat template with the tools.
    """

    setup: EnvironmentSetup
    schemas: tuple[ToolSchema, ...]
    facts: tuple[ProbedFact, ...]
    rule: AgentRule


def prepare_agents(config: RunConfig, codec: TextCodec) -> AgentPlan | None:
    """Load the tools in a child process and try the chat template; None without any.

    Raises:
        UserError: a tool cannot be loaded, or the template cannot carry calls.
    """
    rollout = config.actor_rollout_ref.rollout
    if not config.has_environment:
        if _default_agent(rollout) == TOOL_AGENT:
            raise UserError(
                f"{_ROLLOUT}.multi_turn.enable",
                rollout.multi_turn.enable,
                rule="there are neither tools nor simulated users",
                remedy=f"Set {TOOL_KEY} or {FUNCTION_KEY}.",
            )
        return None
    setup = _setup(rollout)
    _check_isolation(setup)
    schemas = tuple(complete(lambda: _read_schemas(config, setup)))
    kinds = [kind for kind, has in ((TOOL, schemas), (USER, setup.interactions)) if has]
    facts = Dialogue(codec, schemas).probe(kinds)
    _check_facts(facts, config, codec=codec)
    _check_format(rollout, codec)
    default = _default_agent(rollout)
    named = {schema["function"]["name"]: schema for schema in schemas}
    return AgentPlan(setup, schemas, facts, AgentRule(default, named, has_environment=True))


def _default_agent(rollout: RolloutConfig) -> str:
    """Return the agent of rows without ``agent_name``."""
    default = TOOL_AGENT if rollout.multi_turn.enable else SINGLE_TURN
    return rollout.agent.default_agent_loop or default


def plays_episodes(plan: AgentPlan | None, entries: Sequence[PromptEntry]) -> bool:
    """Return whether some row is answered by an agent; warn if tools are there for none."""
    if plan is None:
        return False
    plays = any(entry.agent for entry in entries)
    if not plays:
        logger.warning(
            "the run has tools, and no row uses them: set %s.multi_turn.enable=True, or agent_name "
            "in the rows",
            _ROLLOUT,
        )
    return plays


@asynccontextmanager
async def open_agents(
    config: RunConfig, plan: AgentPlan | None, *, codec: TextCodec
) -> AsyncIterator[Conversing | None]:
    """Yield what episodes need, whose processes end with the context; None without episodes."""
    if plan is None:
        yield None
        return
    rollout = config.actor_rollout_ref.rollout
    log = config.trainer.run_folder / ENVIRONMENT_LOG_FILE
    async with _open_pool(config, replace(plan.setup, log=str(log))) as pool:
        yield Conversing(
            codec=codec,
            environments=pool,
            call_format=CALL_FORMATS[rollout.multi_turn.format],
            schemas=plan.rule.schemas,
            limits=TurnLimits(
                rollout.multi_turn.max_assistant_turns,
                rollout.multi_turn.max_user_turns,
                rollout.agent.timeout_s,
            ),
            has_users=bool(plan.setup.interactions),
            renders_anew=rollout.multi_turn.use_inference_chat_template,
        )


def _setup(rollout: RolloutConfig) -> EnvironmentSetup:
    turns = rollout.multi_turn
    users = turns.interaction_config_path
    written = () if turns.tool_config_path is None else read_tool_file(turns.tool_config_path)
    for line in filter(None, map(describe_take_over, written)):
        logger.info("%s", line)
    return EnvironmentSetup(
        tools=tuple(map(take_over, written)),
        function_path=turns.function_tool_path,
        interactions=() if users is None else read_interaction_file(users),
        limits=ToolLimits(
            max_parallel_calls=turns.max_parallel_calls,
            max_characters=turns.max_tool_response_length,
            truncate_side=turns.tool_response_truncate_side,
            timeout_s=turns.tool_timeout_s,
        ),
        isolation=rollout.agent.isolation,
    )


def _check_isolation(setup: EnvironmentSetup) -> None:
    """Raise UserError if tools execute code that the kernel does not hold; or warn of it."""
    try:
        protections = survey_code_tools(setup.tools)
    except JailError as error:
        rule = f"code that the policy writes cannot be executed here: {error}"
        raise UserError(TOOL_KEY, rule=rule, remedy="Use Linux, or other tools.") from error
    if setup.isolation == "strict":
        check_protections(protections)
    for one in protections:
        if not one.held_by:
            logger.warning("code that the policy writes could %s on this machine", one.promise)


def _open_pool(config: RunConfig, setup: EnvironmentSetup) -> EnvironmentPool:
    agent = config.actor_rollout_ref.rollout.agent
    seen = child_environment(os.environ, agent.environment, key=_ENVIRONMENT_KEY)
    return EnvironmentPool(setup, num_processes=agent.num_workers, environment=seen.variables)


async def _read_schemas(config: RunConfig, setup: EnvironmentSetup) -> list[ToolSchema]:
    async with _open_pool(config, setup) as pool:
        return await pool.start()


def _check_facts(facts: Sequence[ProbedFact], config: RunConfig, *, codec: TextCodec) -> None:
    mode = config.actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode
    for fact in facts:
        if fact.fault and mode != "disable":
            path = codec.tokenizer.name_or_path
            rule = f"the chat template of {path}, tried with a {fact.kind} message, {fact.fault}"
            if mode == "strict":
                remedy = f"Set {_TEMPLATE_KEY} to a template with tools."
                raise UserError(_TEMPLATE_KEY, rule=rule, remedy=remedy)
            logger.warning("%s", rule)


def _check_format(rollout: RolloutConfig, codec: TextCodec) -> None:
    """Raise UserError if calls end in a token on which the model does not stop."""
    name = rollout.multi_turn.format
    stop = CALL_FORMATS[name].stop
    if stop is None:
        return
    ids = codec.encode([stop])[0]
    if len(ids) != 1 or ids[0] not in codec.eos_ids:
        raise UserError(
            f"{_ROLLOUT}.multi_turn.format",
            name,
            rule=f"calls of this form end with {stop}, which is no end token of the model",
            remedy="Add it to eos_token_id in generation_config.json, or set another format.",
        )
