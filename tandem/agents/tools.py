# SPDX-License-Identifier: Apache-2.0
"""Tools in a child process: their loading, and the calls of one episode.

A tool is a function, or an object of verl's ``BaseTool`` with an instance for each trajectory. A
mistake of the model (an unknown tool, arguments against the schema) becomes a result that it reads.
An exception of a tool is never a result: the episode has failed and has no reward.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from tandem.agents.setup import (
    FUNCTION_KEY,
    TOOL_KEY,
    EnvironmentSetup,
    Task,
    ToolLimits,
    ToolSpec,
    TruncateSide,
)
from tandem.agents.verl_names import (
    DECORATED,
    FunctionTool,
    OpenAIFunctionToolSchema,
    provide_verl,
    schema_dict,
)
from tandem.config.schema.imports import describe, import_object
from tandem.data.call_formats import ToolSchema
from tandem.errors import UserError
from tandem.types import ToolCall, ToolStatus

_NO_OBJECT = ""
_CUT = "...(truncated)"
UNFINISHED = (Iterator, AsyncIterator, Awaitable)
"""The kinds of values that stand for work that has not been done, such as generators."""
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}


class ToolFailed(Exception):
    """The error of a tool that raised; its text is the cause in one line."""


class ToolMistake(Exception):
    """The error of a call that is the policy's mistake; its text is what the policy reads."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call: the text for the policy, and what the tool says beside it."""

    status: ToolStatus
    text: str
    reward: float | None = None


class LoadedTool(Protocol):
    """A tool of the process, for all its episodes."""

    @property
    def schema(self) -> ToolSchema: ...

    @property
    def timeout_s(self) -> float | None: ...

    async def call(self, arguments: dict[str, Any], episode: ToolEpisode) -> Any: ...

    async def release(self, episode: ToolEpisode) -> None: ...


@dataclass
class ToolEpisode:
    """The tools of one episode.

    Attributes:
        instances: the ids of instances of stateful tools, by the name of the tool.
        creating: the locks under which instances are made, by the name of the tool.
        messages: the conversation so far.
        num_hung: the number of calls whose threads did not end in time and still run.
    """

    task: Task
    messages: list[dict[str, Any]]
    instances: dict[str, Any] = field(default_factory=dict[str, Any])
    creating: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    num_hung: int = 0


class FunctionOfUser:
    """A function tool.

    A plain function runs in a thread of its own, which may hang. If it returns an awaitable, that
    runs on the event loop.
    """

    timeout_s: float | None = None

    def __init__(self, tool: FunctionTool) -> None:
        self._tool = tool
        self.schema: ToolSchema = schema_dict(tool.tool_schema)

    async def call(self, arguments: dict[str, Any], episode: ToolEpisode) -> Any:
        """Call the function with the arguments of the policy."""
        if self._tool.is_async:
            return await guard(self._tool.fn(**arguments))
        return await run_in_thread(lambda: self._tool.fn(**arguments), episode)

    async def release(self, episode: ToolEpisode) -> None:
        """Do nothing: a function has no instance."""


class ClassOfUser:
    """A ``BaseTool``: ``create`` at the first call of an episode, ``release`` at its end.

    With ``per_call`` each call has an instance of its own.
    Each method gets those keyword arguments that it takes, as verl's versions pass different ones.
    """

    def __init__(self, tool: Any, config: Mapping[str, Any]) -> None:
        self._tool = tool
        self.schema: ToolSchema = schema_dict(tool.tool_schema)
        self._name: str = self.schema["function"]["name"]
        own = dict(config)
        self._is_per_call = bool(own.get("per_call"))
        timeout = own.get("timeout")
        self.timeout_s = None if timeout is None else float(timeout)

    async def call(self, arguments: dict[str, Any], episode: ToolEpisode) -> Any:
        """Execute the call on the instance of the episode."""
        if self._is_per_call:
            instance = await self._create(episode)
            try:
                return await self._execute(instance, arguments, episode=episode)
            finally:
                await self._release(instance, episode)
        async with episode.creating[self._name]:
            if self._name not in episode.instances:
                episode.instances[self._name] = await self._create(episode)
        instance = episode.instances[self._name]
        return await self._execute(instance, arguments, episode=episode)

    async def release(self, episode: ToolEpisode) -> None:
        """Release the instance of the episode, if it has one."""
        if self._name in episode.instances:
            await self._release(episode.instances.pop(self._name), episode)

    async def _create(self, episode: ToolEpisode) -> Any:
        known = _kwargs(episode, self._name, method="create")
        made = await call_method(self._tool.create, (), known=known)
        return made[0] if isinstance(made, tuple) else made

    async def _execute(
        self, instance: Any, arguments: dict[str, Any], *, episode: ToolEpisode
    ) -> Any:
        known = _kwargs(episode, self._name, method="execute")
        known["agent_data"] = _agent_data(episode)
        return await call_method(self._tool.execute, (instance, arguments), known=known)

    async def _release(self, instance: Any, episode: ToolEpisode) -> None:
        known = _kwargs(episode, self._name, method="release")
        await call_method(self._tool.release, (instance,), known=known)


def load_tools(setup: EnvironmentSetup) -> list[LoadedTool]:
    """Import the tools of a run that are classes and functions.

    Raises:
        UserError: a file or class cannot be imported.
    """
    provide_verl()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    tools: list[LoadedTool] = [_load_class(spec, setup) for spec in setup.tools]
    if setup.function_path is not None:
        tools += _load_functions(setup.function_path, needs_declared=setup.needs_declared)
    return tools


def name_tools(tools: Sequence[LoadedTool]) -> dict[str, LoadedTool]:
    """Return tools by their names; raise UserError if two have one name."""
    named: dict[str, LoadedTool] = {}
    for tool in tools:
        name = tool.schema["function"]["name"]
        if name in named:
            rule = f"two tools have the name {name!r}"
            raise UserError(TOOL_KEY, rule=rule, remedy="Rename one of them.")
        named[name] = tool
    return named


def _load_class(spec: ToolSpec, setup: EnvironmentSetup) -> LoadedTool:
    made = import_class(TOOL_KEY, spec.class_name)
    schema = spec.schema and OpenAIFunctionToolSchema.model_validate(spec.schema)
    try:
        is_told = "isolation" in inspect.signature(made).parameters
        known = {"isolation": setup.isolation} if is_told else {}
        tool = made(config=dict(spec.config), tool_schema=schema, **known)
        return ClassOfUser(tool, spec.config)
    except Exception as error:
        raise UserError(
            TOOL_KEY,
            spec.class_name,
            rule=f"cannot be made: {describe(error)}",
            remedy="Correct the class or its entry; a class without tool_schema must know its own.",
        ) from error


def import_class(key: str, class_name: str) -> Callable[..., Any]:
    """Import a class by its full name; raise UserError if it cannot be imported."""
    module_name, _, own = class_name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), own)
    except Exception as error:
        raise UserError(
            key,
            class_name,
            rule=f"cannot be imported: {describe(error)}",
            remedy="Correct class_name, or add its folder to PYTHONPATH.",
        ) from error


def _load_functions(path: str, *, needs_declared: bool) -> list[LoadedTool]:
    num_before = len(DECORATED)
    try:
        import_object(FUNCTION_KEY, path, name=_NO_OBJECT)
    except UserError as error:
        if error.value != _NO_OBJECT:  # the file was imported, and lacks that object
            raise UserError(FUNCTION_KEY, path, rule=error.rule, remedy=error.remedy) from error
    found = DECORATED[num_before:]
    if not found:
        raise UserError(
            FUNCTION_KEY,
            path,
            rule="has no function with the decorator @function_tool",
            remedy="Decorate one: from tandem.agents.verl_names import function_tool.",
        )
    for tool in found:
        if needs_declared and not getattr(tool.fn, "is_deterministic", False):
            rule = f"full_determinism=True, and {tool.name} may answer differently each time"
            remedy = f"If it does not, write {tool.name}.is_deterministic = True below it."
            raise UserError(FUNCTION_KEY, path, rule=rule, remedy=remedy)
    return [FunctionOfUser(tool) for tool in found]


async def answer_call(
    call: ToolCall, tools: Mapping[str, LoadedTool], *, episode: ToolEpisode, limits: ToolLimits
) -> ToolResult:
    """Execute a call, within its time, and return what the policy reads.

    Raises:
        ToolFailed: the tool raised an exception.
    """
    tool = tools.get(call.name) if call.name in episode.task.tools else None
    if tool is None:
        names = ", ".join(episode.task.tools) or "none"
        return ToolResult(
            ToolStatus.MODEL_ERROR, f"Unknown tool {call.name[:80]!r}. The tools are: {names}."
        )
    arguments = json.loads(call.arguments)
    fault = _find_fault(arguments, tool.schema)
    if fault:
        text = f"The arguments of {call.name} are wrong: {fault}."
        return ToolResult(ToolStatus.MODEL_ERROR, text)
    limit_s = tool.timeout_s or limits.timeout_s
    try:
        async with asyncio.timeout(limit_s) as clock:
            returned = await tool.call(arguments, episode)
        text, reward = read_return(returned)
        status = ToolStatus.OK
    except TimeoutError as error:
        if not clock.expired():  # the tool's own
            raise ToolFailed(f"the tool {call.name}: {describe(error)}") from error
        return ToolResult(ToolStatus.TIMEOUT, f"No result within {limit_s:g} s.")
    except ToolMistake as mistake:
        text, reward, status = str(mistake), None, ToolStatus.MODEL_ERROR
    except Exception as error:
        raise ToolFailed(f"the tool {call.name}: {describe(error)}") from error
    text = cut_text(text, limits.max_characters, side=limits.truncate_side)
    return ToolResult(status, text, reward)


def cut_text(text: str, limit: int, *, side: TruncateSide) -> str:
    """Cut a text of more than ``limit`` characters; ``side`` names the part that is cut away."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + _CUT
    half = limit // 2
    return text[:half] + _CUT + "..." + text[len(text) - half :]


def _find_fault(arguments: Mapping[str, Any], schema: ToolSchema) -> str:
    """Return why arguments do not match a schema, or ""; it checks names and plain types."""
    parameters = schema["function"].get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    for name in required:
        if name not in arguments:
            return f"{name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no {name[:80]!r}" if properties else ""
        kind = properties[name].get("type")
        kinds = _TYPES.get(kind) if isinstance(kind, str) else None
        is_wrong = kinds is not None and not isinstance(value, kinds)
        is_flag = isinstance(value, bool) and kind in ("integer", "number")
        may_be_null = name not in required or properties[name].get("nullable")
        if (is_wrong or is_flag) and not (value is None and may_be_null):
            return f"{name!r} must be of the type {kind}"
    return ""


def read_return(returned: Any) -> tuple[str, float | None]:
    """Return text and reward of what a tool returned, in any form of verl's versions."""
    reward: Any = None
    if isinstance(returned, tuple):
        if not 1 <= len(returned) <= 3:
            raise TypeError(f"a tool returned a tuple of {len(returned)} values, not of 1 to 3")
        returned, reward = (*returned, None)[:2]
    if returned is None:
        text = ""
    elif isinstance(returned, bytes):
        text = returned.decode(errors="replace")
    elif isinstance(returned, dict):
        text = json.dumps(returned, ensure_ascii=False, default=str)
    elif hasattr(returned, "text"):
        if getattr(returned, "image", None) or getattr(returned, "video", None):
            raise TypeError("a tool returned an image or a video, and models are text only")
        text = returned.text or ""
    elif isinstance(returned, UNFINISHED):
        kind = type(returned).__name__
        raise TypeError(f"a tool returned an object of the type {kind}, and no finished result")
    else:
        text = str(returned)
    # A lone surrogate is no text that a tokenizer takes.
    text = text.encode(errors="replace").decode()
    return text, None if reward is None else float(reward)


def _kwargs(episode: ToolEpisode, tool: str, *, method: str) -> dict[str, Any]:
    """Return the keyword arguments of a method from the row: verl's ``tools_kwargs``.

    verl 0.5 passes them one by one, later versions together as ``create_kwargs``.
    """
    of_tools = episode.task.extra_info.get("tools_kwargs") or {}
    own = (of_tools.get(tool) or {}).get(f"{method}_kwargs") or {}
    own = {key: value for key, value in own.items() if value is not None}
    return {**own, "create_kwargs": own} if method == "create" else own


def _agent_data(episode: ToolEpisode) -> SimpleNamespace:
    return SimpleNamespace(
        messages=episode.messages,
        tools_kwargs=episode.task.extra_info.get("tools_kwargs") or {},
        request_id="-".join(map(str, episode.task.episode_id)),
        extra_fields={},
    )


async def call_method(
    method: Callable[..., Any], arguments: Sequence[Any], *, known: Mapping[str, Any]
) -> Any:
    """Call a method of the user, plain or async, with those of ``known`` that it takes."""

    async def call() -> Any:
        result = method(*arguments, **takes(method, known))
        return await result if inspect.isawaitable(result) else result

    return await guard(call())


def takes(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``known`` that a function takes by name: all if it has ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(known)
    return {name: value for name, value in known.items() if name in parameters}


async def guard(work: Awaitable[Any]) -> Any:
    """Await code of the user, and let an error of any kind be an ``Exception``.

    An exit, an interrupt (this process has no terminal), a panic of a library in Rust, or a
    cancellation that nobody has asked for would otherwise end this process, or leave a call without
    an answer.
    """
    try:
        return await work
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _as_exception(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> Exception:
    """Return an error as an ``Exception`` that names it and the line that raised it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return RuntimeError(text).with_traceback(error.__traceback__)


async def run_in_thread(function: Callable[[], Any], episode: ToolEpisode) -> Any:
    """Run a function in a thread that nothing waits for if it hangs.

    If it returns an awaitable, as a decorated coroutine function does, return what that gives.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def put(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            episode.num_hung -= 1
        elif error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            # A future takes no StopIteration, and a CancelledError would seem to be our own.
            is_kept = isinstance(error, Exception) and not isinstance(error, StopIteration)
            failure = error if is_kept else _as_exception(error)
        loop.call_soon_threadsafe(put, result, failure)

    threading.Thread(target=work, daemon=True).start()
    try:
        result = await done
    except asyncio.CancelledError:
        episode.num_hung += 1
        raise
    return await guard(result) if inspect.isawaitable(result) else result
