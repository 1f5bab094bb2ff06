# SPDX-License-Identifier: Apache-2.0
"""verl's base classes of tools and interactions, for classes that were written for verl.

In a child process without verl, ``provide_verl`` registers them under verl's module names, so that
``from verl.tools.base_tool import BaseTool`` works there. No other process sees these names.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from tandem.data.tool_schema import schema_of_function

_LOOSE = ConfigDict(extra="allow")


class FunctionSchema(BaseModel):
    """The schema of a function; unknown fields are kept."""

    model_config = _LOOSE

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """The schema of a tool in OpenAI's form."""

    model_config = _LOOSE

    type: str
    function: FunctionSchema


class ToolResponse(BaseModel):
    """The result of a call."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """A tool with an instance for each trajectory; see verl's ``verl.tools.base_tool``."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None):
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> Any:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        return None


class BaseInteraction:
    """A simulated user; see verl's ``verl.interactions.base``."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name = dict(config).get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **_: Any) -> str:
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *_: Any, **__: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *_: Any, **__: Any) -> None:
        return None


@dataclass
class FunctionTool:
    """A function that the policy may call."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False


DECORATED: list[FunctionTool] = []
"""The decorated functions of this process, in order. Those of one run have different names."""


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Register a function as a tool; its schema comes from its signature and docstring."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = name if isinstance(name, str) else function.__name__
        given = schema if schema is not None else schema_of_function(function, name=own)
        if isinstance(given, dict):
            given = OpenAIFunctionToolSchema.model_validate(given)
        is_async = inspect.iscoroutinefunction(function)
        DECORATED.append(FunctionTool(own, function, given, is_async))
        return function

    return decorate(name) if callable(name) else decorate


def provide_verl() -> None:
    """Register these classes under verl's module names, unless verl is installed."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    schemas = {
        "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
        "OpenAIFunctionSchema": FunctionSchema,
        "ToolResponse": ToolResponse,
    }
    modules: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool, **schemas},
        "verl.tools.schemas": schemas,
        "verl.tools.function_tool": {"function_tool": function_tool, "FunctionTool": FunctionTool},
        "verl.interactions": {},
        "verl.interactions.base": {"BaseInteraction": BaseInteraction},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": _unchanged},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def schema_dict(schema: Any) -> dict[str, Any]:
    """Return the schema of a tool as plain values, from a model of verl's or of this file."""
    if isinstance(schema, dict):
        return json.loads(json.dumps(schema))
    return schema.model_dump(exclude_unset=True, exclude_none=True)
