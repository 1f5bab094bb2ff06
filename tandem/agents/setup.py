# SPDX-License-Identifier: Apache-2.0
"""The description of an environment that travels to its child processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SECTION = "actor_rollout_ref.rollout.multi_turn"
TOOL_KEY = f"{SECTION}.tool_config_path"
FUNCTION_KEY = f"{SECTION}.function_tool_path"
INTERACTION_KEY = f"{SECTION}.interaction_config_path"
AGENTS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
ISOLATION_KEY = "actor_rollout_ref.rollout.agent.isolation"

ENVIRONMENT_LOG_FILE = "environments.log"
"""The file in the run folder for the output of tools and agents."""

Isolation = Literal["strict", "best_effort"]
TruncateSide = Literal["left", "middle", "right"]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server that speaks the Model Context Protocol.

    Attributes:
        command: the program that is started, with its arguments; () for a server with a URL.
        variables: the environment variables of the program; those of its entry in the file, and in
            child processes also those of tools.
        folder: the working directory of the program; None for that of the run.
        url, headers: its address, and what each request to it carries; "" for a program.
    """

    name: str
    command: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    folder: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A class of tools; ``schema`` is None if the class knows its own."""

    class_name: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ServedTools:
    """The tools of servers, which tell their schemas.

    Attributes:
        selected: the names of the tools that are used; () for all.
        timeout_s: the time of a call; None for that of all tools.
        is_per_episode: whether each episode has a connection, and with it a session, of its own.
    """

    servers: tuple[ServerSpec, ...]
    selected: tuple[str, ...] = ()
    timeout_s: float | None = None
    is_per_episode: bool = False


@dataclass(frozen=True, slots=True)
class InteractionSpec:
    """A class that plays the user, under the name that rows choose it by."""

    name: str
    class_name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """An agent of the user that calls the endpoint: a command, or a function.

    Attributes:
        argv: the command; () for a function.
        target: the full name of the function; "" for a command.
        arguments: the keyword arguments of the function beside task and endpoint.
        gives_reward: whether the agent gives the reward, instead of the reward function.
        max_running: the maximum number of its episodes at the same time.
        num_processes: the number of processes of the command, each of which plays many episodes;
            0: each episode has a process of its own.
    """

    name: str
    argv: tuple[str, ...] = ()
    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gives_reward: bool = False
    max_running: int = 64
    num_processes: int = 0


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of an agent.

    Attributes:
        returned: the reward that it gave: a number, or a mapping with ``reward``; None for none.
        failure: why it failed, in one line; "" if it did not.
    """

    returned: Any = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class OpenEnvSpec:
    """An agent whose environment is a session of a server that speaks OpenEnv's protocol.

    Attributes:
        url, headers: the address of the server, and what each request to it carries.
        action_field: the field of an action that is the text of a turn; None if the policy calls
            a tool with the fields of an action.
        tool: the name of that tool.
        observation_field: the field of an observation that the policy reads; None for all.
        reset: the fields of the message that begins an episode.
        timeout_s: the time of an answer of the server.
        gives_reward: whether the rewards of the environment are the score.
        max_running: the maximum number of its sessions at the same time.
    """

    name: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    action_field: str | None = None
    tool: str = "step"
    observation_field: str | None = None
    reset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = 60.0
    gives_reward: bool = True
    max_running: int = 64


@dataclass(frozen=True, slots=True)
class Access:
    """The access of one episode to the endpoint.

    Attributes:
        base_url, api_key, model: what a client of OpenAI's is given.
    """

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The limits of calls.

    Attributes:
        max_parallel_calls: the number of calls of one turn that run.
        max_characters: the length of a result; longer ones are cut at ``truncate_side``.
        max_observation_characters: the same for observations of OpenEnv; None for any length.
        timeout_s: the time of a call, unless the tool's config has a ``timeout``.
    """

    max_parallel_calls: int = 1
    max_characters: int = 256
    max_observation_characters: int | None = None
    truncate_side: TruncateSide = "middle"
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EnvironmentSetup:
    """The environment of a run.

    Attributes:
        function_path: a Python file with ``@function_tool`` functions.
        isolation: whether programs of the policy run although the kernel does not hold them.
        needs_declared: whether functions must be declared deterministic.
        log: the file for prints and for the first traceback of each process; None for stderr.
    """

    tools: tuple[ToolSpec, ...] = ()
    served: tuple[ServedTools, ...] = ()
    function_path: str | None = None
    interactions: tuple[InteractionSpec, ...] = ()
    programs: tuple[ProgramSpec, ...] = ()
    openenvs: tuple[OpenEnvSpec, ...] = ()
    limits: ToolLimits = field(default_factory=ToolLimits)
    isolation: Isolation = "strict"
    needs_declared: bool = False
    log: str | None = None

    @property
    def loaded(self) -> tuple[str, ...]:
        """The files and classes of the user that a process loads, each with its key."""
        named = [] if self.function_path is None else [(FUNCTION_KEY, self.function_path)]
        named += [(TOOL_KEY, spec.class_name) for spec in self.tools]
        named += [(INTERACTION_KEY, spec.class_name) for spec in self.interactions]
        named += [(AGENTS_KEY, spec.target) for spec in self.programs if spec.target]
        return tuple(f"{key}={name!r}" for key, name in named)


@dataclass(frozen=True, slots=True)
class Task:
    """The row that an episode is about. It never holds the ground truth.

    Attributes:
        messages: the prompt.
        seed: the same for all samples of a prompt, so that they see the same world.
        episode_id: uid of the prompt and number of the sample.
        tools: the names of the tools that the row may use.
        agent: the name of its agent, if that is an ``OpenEnvSpec``.
    """

    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    extra_info: Mapping[str, Any]
    seed: int
    episode_id: tuple[int, int]
    tools: tuple[str, ...]
    agent: str = ""


class ServerFull(Exception):
    """The error of a server that has no place for another session.

    Attributes:
        num_places: the number of sessions that it has at most; None if it does not tell.
    """

    def __init__(self, message: str, num_places: int | None) -> None:
        super().__init__(message)
        self.num_places = num_places
