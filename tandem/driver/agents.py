# SPDX-License-Identifier: Apache-2.0
"""The agents of a run by its configuration: their check before the start, and their processes."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from tandem.agents.agent_files import AgentFile, read_agent_file
from tandem.agents.code_tool import (
    check_protections,
    describe_take_over,
    survey_code_tools,
    take_over,
)
from tandem.agents.endpoint import check_address, open_endpoint, read_address
from tandem.agents.pool import EnvironmentPool
from tandem.agents.programs import Programs, without_proxy
from tandem.agents.setup import (
    AGENTS_KEY,
    ENVIRONMENT_LOG_FILE,
    FUNCTION_KEY,
    TOOL_KEY,
    EnvironmentSetup,
    ServedTools,
    ToolLimits,
)
from tandem.agents.tool_files import ToolFile, read_interaction_file, read_tool_file
from tandem.children.code_jail import JailError
from tandem.children.environment import child_environment
from tandem.children.jail_trial import Protection
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.run import RunConfig
from tandem.data.call_formats import CALL_FORMATS, CallFormat, ToolSchema
from tandem.data.dialogue import TOOL, USER, Dialogue, ProbedFact
from tandem.data.rendering import SINGLE_TURN, TOOL_AGENT, AgentRule, PromptEntry, PromptRow
from tandem.data.response_format import AUTO, NoFormat, find_format
from tandem.data.tokenizer import TextCodec
from tandem.driver.execution import complete
from tandem.errors import UserError
from tandem.pipeline.conversing import Conversing, HostedEnvironment, HostedPrograms, TurnLimits

logger = logging.getLogger(__name__)

_ROLLOUT = "actor_rollout_ref.rollout"
_ENVIRONMENT_KEY = f"{_ROLLOUT}.agent.environment"
_USUAL_FORMAT = "hermes"
_TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """The checked agents of a run.

    Attributes:
        schemas: the schemas of the tools, as their processes report them.
        hosted: the agents whose environment a server has, by their names.
        address: host and port of the endpoint; port 0 is any free one.
        call_format: the form in which the policy writes calls.
        format_name: its name; for ``auto``, what was found.
        facts: the results of trying the chat template with the tools.
        renders_anew: whether conversations are rendered anew after a message of the user.
        protections: what holds code of the policy; nothing if no tool executes any.
        notes: what of the files of tools has no effect or is replaced.
    """

    setup: EnvironmentSetup
    address: tuple[str, int]
    schemas: tuple[ToolSchema, ...]
    hosted: Mapping[str, HostedEnvironment]
    call_format: CallFormat
    format_name: str
    facts: tuple[ProbedFact, ...]
    rule: AgentRule
    renders_anew: bool
    protections: tuple[Protection, ...]
    notes: tuple[str, ...]

    def without_own_reward(
        self, entries: Sequence[PromptRow | PromptEntry]
    ) -> list[PromptRow | PromptEntry]:
        """Return the entries whose agent does not give the reward itself."""
        return [entry for entry in entries if not self.rule.programs.get(entry.agent)]


def prepare_agents(config: RunConfig, codec: TextCodec) -> AgentPlan | None:
    """Load the tools in a child process and try the chat template; None without any.

    Raises:
        UserError: a tool cannot be loaded, or the template cannot carry calls.
    """
    rollout = config.actor_rollout_ref.rollout
    if not config.has_environment:
        _require_agent(rollout, ())
        if _default_agent(rollout) == TOOL_AGENT:
            raise UserError(
                f"{_ROLLOUT}.multi_turn.enable",
                rollout.multi_turn.enable,
                rule="there are neither tools nor simulated users",
                remedy=f"Set {TOOL_KEY} or {FUNCTION_KEY}.",
            )
        return None
    setup, notes = _setup(rollout)
    protections = _check_isolation(setup)
    if rollout.full_determinism:
        _check_declared(setup)
    _require_agent(rollout, [spec.name for spec in (*setup.programs, *setup.openenvs)])
    address = read_address(rollout.agent.endpoint)
    check_address(address)
    schemas, actions = complete(lambda: _read_schemas(config, setup))
    hosted = {
        spec.name: HostedEnvironment(
            actions[spec.name], gives_reward=spec.gives_reward, max_running=spec.max_running
        )
        for spec in setup.openenvs
    }
    acting = tuple(action for action in actions.values() if action is not None)
    talks = setup.interactions or setup.programs or len(acting) < len(hosted)
    kinds = [kind for kind, has in ((TOOL, schemas or acting), (USER, talks)) if has]
    facts = Dialogue(codec, schemas or acting).probe(kinds)
    _check_facts(facts, config, codec=codec)
    call_format, format_name = choose_format(
        rollout, codec, tools=schemas or acting, has_programs=bool(setup.programs)
    )
    default = _default_agent(rollout)
    named = {schema["function"]["name"]: schema for schema in schemas}
    has_environment = bool(schemas or setup.interactions)
    programs = {spec.name: spec.gives_reward for spec in (*setup.programs, *setup.openenvs)}
    rule = AgentRule(default, named, has_environment, programs)
    return AgentPlan(
        setup,
        address,
        schemas,
        hosted,
        call_format,
        format_name,
        facts,
        rule,
        renders_anew=rollout.multi_turn.use_inference_chat_template,
        protections=protections,
        notes=notes,
    )


def _require_agent(rollout: RolloutConfig, programs: Sequence[str]) -> None:
    """Raise UserError if the default agent is no agent of the run."""
    known = (SINGLE_TURN, TOOL_AGENT, *programs)
    turns = rollout.multi_turn
    tools = turns.tool_config_path or turns.function_tool_path or turns.interaction_config_path
    taken = {SINGLE_TURN, *((TOOL_AGENT,) if tools else ())} & set(programs)
    if taken:
        rule = f"has an agent of the name {taken.pop()}, which the run has already"
        raise UserError(
            AGENTS_KEY, rollout.agent.agent_loop_config_path, rule=rule, remedy="Rename it."
        )
    name = rollout.agent.default_agent_loop
    if name is not None and name not in known:
        rule = f"is no agent of the run, which has {', '.join(known)}"
        remedy = f"Correct it, or name the agent in {AGENTS_KEY}."
        raise UserError(f"{_ROLLOUT}.agent.default_agent_loop", name, rule=rule, remedy=remedy)


def _default_agent(rollout: RolloutConfig) -> str:
    """Return the agent of rows without ``agent_name``."""
    default = TOOL_AGENT if rollout.multi_turn.enable else SINGLE_TURN
    return rollout.agent.default_agent_loop or default


def plays_episodes(plan: AgentPlan | None, entries: Sequence[PromptRow | PromptEntry]) -> bool:
    """Return whether some row is answered by an agent; warn if tools are there for none."""
    if plan is None:
        return False
    plays = any(entry.agent for entry in entries)
    if not plays:
        logger.warning(
            "the run has tools or agents, and no row uses them: set %s.multi_turn.enable=True or "
            "%s.agent.default_agent_loop, or agent_name in the rows",
            _ROLLOUT,
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
    async with AsyncExitStack() as stack:
        setup = replace(plan.setup, log=str(log))
        pool = await stack.enter_async_context(_open_pool(config, setup))
        programs = None
        if setup.programs:
            opened = open_endpoint(plan.address, name_once=_NamedOnce())
            endpoint = await stack.enter_async_context(opened)
            specs = {spec.name: spec for spec in setup.programs}
            made = Programs(specs, pool=pool, environment=pool.environment, log=log)
            stack.push_async_callback(made.close)
            programs = HostedPrograms(made, endpoint)
        yield Conversing(
            codec=codec,
            environments=pool,
            call_format=plan.call_format,
            schemas=plan.rule.schemas,
            limits=TurnLimits(
                rollout.multi_turn.max_assistant_turns,
                rollout.multi_turn.max_user_turns,
                rollout.agent.timeout_s,
            ),
            has_users=bool(plan.setup.interactions),
            renders_anew=rollout.multi_turn.use_inference_chat_template,
            max_prompt_tokens=config.data.max_prompt_length,
            programs=programs,
            hosted=plan.hosted,
        )


class _NamedOnce:
    """A log of the fields that requests set without effect; each is named once."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def __call__(self, setting: str) -> None:
        name = setting.partition("=")[0]
        if name not in self._named:
            self._named.add(name)
            logger.warning("an agent's request sets %s, which has no effect in training", setting)


def _setup(rollout: RolloutConfig) -> tuple[EnvironmentSetup, tuple[str, ...]]:
    """Return the environments of a run, and what of the files of tools has no effect."""
    turns = rollout.multi_turn
    users = turns.interaction_config_path
    path = turns.tool_config_path
    written = ToolFile() if path is None else read_tool_file(path)
    notes = (*filter(None, map(describe_take_over, written.classes)), *written.notes)
    for line in notes:
        logger.info("%s", line)
    agents_path = rollout.agent.agent_loop_config_path
    agents = AgentFile() if agents_path is None else read_agent_file(agents_path)
    is_cut = "max_tool_response_length" in turns.model_fields_set
    setup = EnvironmentSetup(
        tools=tuple(map(take_over, written.classes)),
        served=written.served,
        function_path=turns.function_tool_path,
        interactions=() if users is None else read_interaction_file(users),
        programs=agents.programs,
        openenvs=agents.openenvs,
        limits=ToolLimits(
            max_parallel_calls=turns.max_parallel_calls,
            max_characters=turns.max_tool_response_length,
            max_observation_characters=turns.max_tool_response_length if is_cut else None,
            truncate_side=turns.tool_response_truncate_side,
            timeout_s=turns.tool_timeout_s,
        ),
        isolation=rollout.agent.isolation,
        needs_declared=rollout.full_determinism,
    )
    return setup, notes


def _check_isolation(setup: EnvironmentSetup) -> tuple[Protection, ...]:
    """Return what holds the code that tools execute.

    Raise UserError if the kernel does not hold it and isolation is strict; warn of it otherwise.
    """
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
    return protections


def _check_declared(setup: EnvironmentSetup) -> None:
    """Raise UserError if an environment may answer differently each time; functions tell later."""
    others = [spec.name for spec in (*setup.programs, *setup.openenvs)]
    others += [server.name for one in setup.served for server in one.servers]
    classes = [*setup.tools, *setup.interactions]
    declared = {"deterministic": True}.items()
    others += [one.class_name for one in classes if not declared <= one.config.items()]
    if others:
        raise UserError(
            f"{_ROLLOUT}.full_determinism",
            True,
            rule=f"{others[0]} may answer differently each time",
            remedy="If it is a class that does not, add deterministic: true to its config. Agents "
            "of your own, servers of tools and of environments are not drawn in waves.",
        )


def _open_pool(config: RunConfig, setup: EnvironmentSetup) -> EnvironmentPool:
    agent = config.actor_rollout_ref.rollout.agent
    seen = child_environment(os.environ, agent.environment, key=_ENVIRONMENT_KEY)
    variables = without_proxy(seen.variables)
    setup = replace(setup, served=tuple(_with_variables(one, variables) for one in setup.served))
    return EnvironmentPool(setup, num_processes=agent.num_workers, environment=variables)


def _with_variables(served: ServedTools, variables: Mapping[str, str]) -> ServedTools:
    """Return servers whose programs get the environment variables of tools, too."""
    servers = tuple(
        replace(server, variables={**variables, **server.variables}) for server in served.servers
    )
    return replace(served, servers=servers)


async def _read_schemas(
    config: RunConfig, setup: EnvironmentSetup
) -> tuple[tuple[ToolSchema, ...], Mapping[str, ToolSchema | None]]:
    """Load tools and agents in a process.

    Returns:
        The schemas of the tools, and the action of each environment that a server has.
    """
    async with _open_pool(config, setup) as pool:
        return tuple(await pool.start()), pool.actions


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


def choose_format(
    rollout: RolloutConfig,
    codec: TextCodec,
    *,
    tools: Sequence[ToolSchema],
    has_programs: bool,
) -> tuple[CallFormat, str]:
    """Return the form of calls and its name.

    Raise UserError if there is none, or if calls end in a token on which the model does not stop.

    Args:
        tools: the tools that are known before training.
        has_programs: whether there are programs, which may bring tools with their requests.
    """
    key, name = f"{_ROLLOUT}.multi_turn.format", rollout.multi_turn.format
    if name == AUTO:
        try:
            found, name = find_format(codec, tools)
        except NoFormat as error:
            rule = f"the tokenizer of {codec.tokenizer.name_or_path} {error}"
            remedy = f"Set one of {', '.join(CALL_FORMATS)}."
            if tools:
                raise UserError(key, AUTO, rule=rule, remedy=remedy) from error
            if has_programs:
                logger.warning(
                    "%s=%s: %s; calls of tools that agents bring with their requests are read as "
                    "%s. %s",
                    *(key, AUTO, rule, _USUAL_FORMAT, remedy),
                )
            found, name = CALL_FORMATS[_USUAL_FORMAT], f"{_USUAL_FORMAT}, as no other is known"
        name = f"{AUTO}: {name}"
    else:
        found = CALL_FORMATS[name]
    if found.stop is not None:
        ids = codec.encode([found.stop])[0]
        if len(ids) != 1 or ids[0] not in codec.eos_ids:
            raise UserError(
                key,
                name,
                rule=f"calls of this form end with {found.stop}, which is no end token of the "
                "model",
                remedy="Add it to eos_token_id in generation_config.json, or set another format.",
            )
    return found, name
