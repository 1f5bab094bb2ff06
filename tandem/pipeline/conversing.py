# SPDX-License-Identifier: Apache-2.0
"""The collaborators of episodes of several turns, which the composition root hands over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.agents.pool import EnvironmentPool
from tandem.data.call_formats import CallFormat, ToolSchema
from tandem.data.dialogue import Dialogue
from tandem.data.tokenizer import TextCodec


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
class Conversing:
    """What episodes of several turns need beside the engine.

    Attributes:
        schemas: the schema of each tool by its name.
        has_users: whether simulated users answer turns without calls.
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
    dialogues: dict[tuple[str, ...], Dialogue] = field(
        default_factory=dict[tuple[str, ...], Dialogue]
    )

    def tools_of(self, extra_info: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the tools that a row may use."""
        selected = extra_info.get("tool_selection")
        return tuple(name for name in self.schemas if not selected or name in selected)

    def dialogue_of(self, tools: tuple[str, ...]) -> Dialogue:
        """Return the dialogue for these tools; it is made once."""
        if tools not in self.dialogues:
            self.dialogues[tools] = Dialogue(self.codec, [self.schemas[name] for name in tools])
        return self.dialogues[tools]
