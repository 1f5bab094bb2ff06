# SPDX-License-Identifier: Apache-2.0
"""The collaborators of episodes of several turns, which the composition root hands over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.agents.endpoint import Endpoint
from tandem.agents.pool import EnvironmentPool
from tandem.agents.programs import Programs
from tandem.data.call_formats import CallFormat, ToolSchema, parse_turn
from tandem.data.dialogue import TOOL, Dialogue, DialogueRefused
from tandem.data.tokenizer import TextCodec
from tandem.types import AssistantTurn

_MAX_DIALOGUES = 256
_HEADER_TOKENS = 256
"""The number of tokens before a turn in which the template opens it."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """The bounds of an episode; None without one.

    Attributes:
        timeout_s: the seconds that an episode may take after its first turn.
    """

    max_assistant_turns: int | None
    max_user_turns: int | None
    timeout_s: float

    def are_reached(self, num_assistant_turns: int, num_user_turns: int) -> bool:
        """Return whether an episode may have no further turn."""
        most, most_answers = self.max_assistant_turns, self.max_user_turns
        return num_assistant_turns == most or num_user_turns == most_answers


@dataclass(frozen=True, slots=True)
class HostedPrograms:
    """The agents of a run that are programs, and the endpoint that they call."""

    programs: Programs
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class HostedEnvironment:
    """The agent of an environment that a server has.

    Attributes:
        action: the tool by which the policy acts; None if the text of its turns is the action.
        gives_reward: whether the rewards of the environment are the score.
        max_running: the maximum number of its sessions at the same time.
    """

    action: ToolSchema | None
    gives_reward: bool
    max_running: int


@dataclass(frozen=True, slots=True)
class Conversing:
    """The parts of a run that episodes of several turns need beside the engine.

    Attributes:
        schemas: the schema of each tool by its name.
        has_users: whether simulated users answer turns without calls.
        max_prompt_tokens: the maximum number of tokens of a prompt, for conversations of programs.
        programs: the agents that are programs, and the endpoint that they call; None without any.
        hosted: the agents whose environment a server has, by their names.
        renders_anew: whether the whole conversation is rendered again after a message of the user.
            Where that gives other tokens than the conversation has, it forks.
    """

    codec: TextCodec
    environments: EnvironmentPool
    call_format: CallFormat
    schemas: Mapping[str, ToolSchema]
    limits: TurnLimits
    has_users: bool = False
    renders_anew: bool = False
    max_prompt_tokens: int = 0
    programs: HostedPrograms | None = None
    hosted: Mapping[str, HostedEnvironment] = field(default_factory=dict[str, HostedEnvironment])
    dialogues: dict[str, Dialogue] = field(default_factory=dict[str, Dialogue])

    def plays_program(self, agent: str) -> bool:
        """Return whether an agent is a program of the user."""
        return self.programs is not None and agent in self.programs.programs.specs

    def tools_of(self, extra_info: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the tools that a row may use."""
        selected = extra_info.get("tool_selection")
        return tuple(name for name in self.schemas if not selected or name in selected)

    def schemas_of(self, agent: str, extra_info: Mapping[str, Any]) -> list[ToolSchema]:
        """Return the schemas of the tools of a row."""
        if agent in self.hosted:
            action = self.hosted[agent].action
            return [] if action is None else [action]
        return [self.schemas[name] for name in self.tools_of(extra_info)]

    def answers_text(self, agent: str) -> bool:
        """Return whether turns without calls are answered."""
        if agent in self.hosted:
            return self.hosted[agent].action is None
        return self.has_users

    def parse(
        self,
        turn_ids: Sequence[int],
        *,
        after: Sequence[int],
        tools: Sequence[ToolSchema],
        first_call: int,
        stop: str = "",
    ) -> AssistantTurn:
        """Parse a turn from its tokens.

        Args:
            after: the tokens that were given before it, at least the last ones.
            first_call: the number of calls of the episode so far.
            stop: the text that ended the turn; what follows it is left out.
        """
        text, end = self.decode_turn(turn_ids)
        prompt = ""
        if self.call_format.reads_prompt:
            prompt = self.codec.decode([after[-_HEADER_TOKENS:]], skip_special=False)[0]
        return parse_turn(
            text[: text.index(stop)] if stop else text,
            self.call_format,
            tools=tools,
            end_texts=(end,) if end else (),
            first_call=first_call,
            prompt=prompt,
        )

    def decode_turn(self, turn_ids: Sequence[int]) -> tuple[str, str]:
        """Return the text of a turn, and that of the token that closes it; "" if none does."""
        is_closed = len(turn_ids) > 0 and turn_ids[-1] in self.codec.eos_ids
        text, end = self.codec.decode([turn_ids, turn_ids[-1:]], skip_special=False)
        return text, end if is_closed else ""

    def dialogue_of(self, schemas: Sequence[ToolSchema]) -> Dialogue:
        """Return the dialogue for these tools of the run; it is made once."""
        return self._dialogue(schemas)

    def dialogue_with(self, schemas: Sequence[ToolSchema]) -> Dialogue:
        """Return the dialogue for the tools of a request; it is made once.

        Raises:
            DialogueRefused: the chat template cannot carry calls and results.
        """
        is_known = json.dumps(schemas) in self.dialogues
        dialogue = self._dialogue(schemas)
        if schemas and not is_known:
            (fact,) = dialogue.probe((TOOL,))
            if fact.fault:
                del self.dialogues[json.dumps(schemas)]
                raise DialogueRefused(fact.fault)
        return dialogue

    def _dialogue(self, schemas: Sequence[ToolSchema]) -> Dialogue:
        key = json.dumps(schemas)
        if key not in self.dialogues:
            if len(self.dialogues) >= _MAX_DIALOGUES:
                self.dialogues.clear()  # an agent may make up tools for each request
            self.dialogues[key] = Dialogue(self.codec, schemas)
        return self.dialogues[key]
