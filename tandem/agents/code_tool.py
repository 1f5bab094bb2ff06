# SPDX-License-Identifier: Apache-2.0
"""``code_interpreter``: a tool that executes Python programs of the policy in the jail.

It takes the place of verl's Sandbox Fusion tools under their names (``sandbox_names``), without a
server. A program that fails, runs too long or prints too much is the policy's to read about. An
execution that could not be made raises, and the episode has no reward.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tandem.agents.setup import ISOLATION_KEY, Isolation, ToolSpec
from tandem.agents.verl_names import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from tandem.children.code_jail import (
    CodeJail,
    Execution,
    ExecutionEnd,
    JailError,
    survey_protections,
)
from tandem.children.jail import MIB, JailLimits
from tandem.children.jail_trial import Protection, lost_protections
from tandem.children.scratch import MAX_FILES, ScratchPlace
from tandem.errors import UserError

CODE_TOOL = "tandem.agents.code_tool.CodeInterpreter"
QUEUE_S = 30.0
"""The time that a call may wait for others of its process, beyond the time of its program."""
_MARGIN_S = 5.0
"""The time by which a call that waited too long fails before its tool would be said to be slow."""
_SANDBOXES: Mapping[str, bool] = {
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": False,
    "recipe.retool.retool.CustomSandboxFusionTool": True,
}
"""Class of verl's -> whether it prints the value of an expression that ends a program."""
_OF_SERVERS = ("sandbox_fusion_url", "num_workers", "enable_global_rate_limit", "rate_limit")
_DEFAULTS: Mapping[str, Any] = {
    "default_timeout": 30,
    "memory_limit_mb": 1024,
    "default_language": "python",
    "modules": (),
    "max_at_once": 4,
    "print_last_value": True,
    "scratch": "none",
    "scratch_mb": 16,
}
_SCRATCHES = ("none", "call", "episode")
_OF_ALL_TOOLS = ("type", "timeout", "per_call", "deterministic")
_BLOCK = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}


class CodeInterpreter(BaseTool):
    """A tool of verl's form that executes the argument ``code``.

    Args:
        config: ``default_timeout`` in seconds on the clock, ``memory_limit_mb``, ``modules`` that
            are imported before programs, ``max_at_once`` executions in a process,
            ``print_last_value``, and ``scratch``: whether programs have a folder of
            ``scratch_mb``, which the calls of an episode share or not.
        isolation: strict refuses to execute programs if the kernel does not hold them.

    Raises:
        ValueError: a field of ``config`` is unknown, or has a value that it may not have.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tool_schema: OpenAIFunctionToolSchema | None = None,
        *,
        isolation: Isolation = "strict",
    ) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        fields = _read_config(config)
        self._limits = JailLimits(
            cpu_s=max(1, round(fields["default_timeout"])),
            wall_s=float(fields["default_timeout"]),
            memory_bytes=fields["memory_limit_mb"] * MIB,
            scratch_bytes=fields["scratch_mb"] * MIB if fields["scratch"] != "none" else 0,
        )
        self._scratch: str = fields["scratch"]
        self._place = ScratchPlace()
        self._kept: dict[str, _Kept] = {}
        self._prints_last = bool(fields["print_last_value"])
        self._isolation: Isolation = isolation
        self._jail = CodeJail(modules=fields["modules"], max_at_once=fields["max_at_once"])

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        """Execute a program.

        Raises:
            JailError: it could not be executed, or others of its process took too long.
            UserError: the kernel does not hold programs, and isolation is strict.
        """
        if self._isolation == "strict":
            check_protections(await self._jail.start())
        program = read_program(parameters.get("code", ""))
        async with self._folder_for(instance_id) as folder:
            execution = await self._execute_in_turn(program, folder)
        metrics = {"end": execution.end.value, "cpu_s": execution.cpu_s}
        return ToolResponse(text=describe_execution(execution, self._limits)), None, metrics

    async def _execute_in_turn(self, program: str, folder: str) -> Execution:
        """Execute a program, whose own time begins when the programs before it have ended."""
        limit_s = self._limits.wall_s + QUEUE_S
        try:
            async with asyncio.timeout(limit_s):
                return await self._jail.execute(
                    program, self._limits, prints_last=self._prints_last, scratch=folder
                )
        except TimeoutError as error:
            cause = f"other programs of the process left it no time within {limit_s:g} s"
            raise JailError(f"a program could not be executed: {cause}") from error

    async def release(self, instance_id: str, **_: Any) -> None:
        """Remove the folder of an episode."""
        kept = self._kept.pop(instance_id, None)
        if kept is not None:
            self._place.remove(kept.folder)

    @asynccontextmanager
    async def _folder_for(self, instance_id: str) -> AsyncIterator[str]:
        """Yield the folder of a call, which no other call has meanwhile; "" for none."""
        if self._scratch == "none":
            yield ""
        elif self._scratch == "call":
            folder = self._place.make()
            try:
                yield folder
            finally:
                self._place.remove(folder)
        else:
            if instance_id not in self._kept:
                self._kept[instance_id] = _Kept(self._place.make(), asyncio.Lock())
            kept = self._kept[instance_id]
            async with kept.in_use:
                yield kept.folder


@dataclass(frozen=True, slots=True)
class _Kept:
    """A folder that the calls of an episode have one after another."""

    folder: str
    in_use: asyncio.Lock


def check_protections(protections: tuple[Protection, ...]) -> None:
    """Raise UserError if the kernel does not hold what strict isolation needs."""
    lost = lost_protections(protections)
    if lost:
        could = ", ".join(one.promise for one in lost)
        raise UserError(
            ISOLATION_KEY,
            "strict",
            rule=f"code that the policy writes could {could} on this machine",
            remedy=f"See tandem doctor, or set {ISOLATION_KEY}=best_effort to run it all the same.",
        )


def survey_code_tools(tools: tuple[ToolSpec, ...]) -> tuple[Protection, ...]:
    """Try the jail if a tool of the run executes code; else return nothing."""
    return survey_protections() if any(one.class_name == CODE_TOOL for one in tools) else ()


def take_over(spec: ToolSpec) -> ToolSpec:
    """Return the tool that takes the place of a sandbox of verl; any other as it is."""
    if spec.class_name not in (*_SANDBOXES, CODE_TOOL):
        return spec
    kept = {name: value for name, value in spec.config.items() if name not in _OF_SERVERS}
    time_s = kept.get("default_timeout", _DEFAULTS["default_timeout"])
    # Without files, a process that died takes no state along, and the call is tried once more.
    own: dict[str, Any] = {"per_call": kept.get("scratch") != "episode"}
    if isinstance(time_s, int | float):  # anything else is refused where the tool is made
        time_s = min(time_s, kept.pop("timeout", time_s))
        own |= {"default_timeout": time_s, "timeout": time_s + QUEUE_S + _MARGIN_S}
        kept.pop("default_timeout", None)
    if spec.class_name in _SANDBOXES:
        own["print_last_value"] = _SANDBOXES[spec.class_name]
    return ToolSpec(CODE_TOOL, {**own, **kept}, spec.schema)


def describe_take_over(spec: ToolSpec) -> str:
    """Return one line about a sandbox of verl that is not used, "" for any other tool."""
    if spec.class_name not in _SANDBOXES:
        return ""
    unused = ", ".join(name for name in _OF_SERVERS if name in spec.config)
    without = f"; without effect: {unused}" if unused else ""
    return f"{spec.class_name} is {CODE_TOOL} here, which executes programs in a jail{without}"


def read_program(code: Any) -> str:
    """Return the program of a call: the first block of Python, or else the whole text."""
    text = code if isinstance(code, str) else str(code)
    block = _BLOCK.search(text)
    return block[1] if block else text


def describe_execution(execution: Execution, limits: JailLimits) -> str:
    """Return what the policy reads about an execution."""
    output = execution.output.rstrip()
    match execution.end:
        case ExecutionEnd.DONE:
            return output or "The program printed nothing."
        case ExecutionEnd.TIME:
            return f"{output}\nStopped: the program took longer than {limits.wall_s:g} s."
        case ExecutionEnd.OUTPUT:
            return f"{output}\nStopped: the program printed more than {limits.output_bytes} bytes."
        case ExecutionEnd.FILES:
            most = limits.scratch_bytes // MIB
            return (
                f"{output}\nStopped: its files took more than {most} MiB, or were over {MAX_FILES}."
            )
        case ExecutionEnd.KILLED:
            return f"{output}\nThe program was killed by {_signal_name(-execution.code)}."
        case _:
            return output or f"The program ended with exit code {execution.code}."


def _signal_name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def _read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in config.items() if name not in _OF_ALL_TOOLS}
    unknown = sorted(own.keys() - _DEFAULTS.keys())
    if unknown:
        raise ValueError(f"there is no {unknown[0]!r}; the fields are {', '.join(_DEFAULTS)}")
    fields = {**_DEFAULTS, **own}
    if fields["default_language"] != "python":
        raise ValueError(f"default_language={fields['default_language']!r}: only python is built")
    if fields["scratch"] not in _SCRATCHES:
        raise ValueError(f"scratch={fields['scratch']!r} must be one of {', '.join(_SCRATCHES)}")
    for name in ("default_timeout", "memory_limit_mb", "max_at_once", "scratch_mb"):
        value = fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{name}={value!r} must be a number above 0")
    for name in ("memory_limit_mb", "max_at_once", "scratch_mb"):
        fields[name] = round(fields[name])
    return fields
