# SPDX-License-Identifier: Apache-2.0
"""Tools of servers that speak the Model Context Protocol: programs, and servers with a URL.

The servers are real processes (``tests/fakes/mcp_server.py``). ``tests/frameworks`` has the servers
of the protocol's own package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.agents.mcp import McpServer, text_of_result
from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, ServedTools, ServerSpec, Task, ToolLimits
from tandem.agents.tool_files import read_tool_file
from tandem.errors import UserError
from tandem.types import AssistantTurn, Observation, ToolCall, ToolStatus
from tests.fakes.mcp_server import TOOLS
from tests.fakes.patience import PATIENCE_S

SERVER = str(Path(__file__).parents[1] / "fakes" / "mcp_server.py")
VARIABLES = {"PATH": os.environ["PATH"], "MCP_SECRET": "s3cret"}
KEY = {"Authorization": "Bearer secret"}
PROGRAM = ServerSpec("made", (sys.executable, SERVER), VARIABLES)


def setup_of(*servers: ServerSpec, **fields: Any) -> EnvironmentSetup:
    limits = ToolLimits(max_parallel_calls=4, timeout_s=20.0)
    return EnvironmentSetup(served=(ServedTools(servers, **fields),), limits=limits)


def in_pool(
    setup: EnvironmentSetup, work: Callable[[EnvironmentPool], Coroutine[Any, Any, Any]]
) -> Any:
    async def main() -> Any:
        async with EnvironmentPool(setup, num_processes=1, environment=dict(os.environ)) as pool:
            return await work(pool)

    return asyncio.run(main())


def servers_running() -> list[psutil.Process]:
    """The programs that processes of tools have started and not ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[-1:] == [SERVER]:
                found.append(process)
    return found


async def step(
    pool: EnvironmentPool, *calls: str, number: int = 0, session: Any = None, **arguments: Any
) -> Observation:
    names = tuple(TOOLS)
    task = Task(({"role": "user", "content": "q"},), "s", {}, 0, (0, number), names)
    made = tuple(ToolCall(f"c{i}", name, json.dumps(arguments)) for i, name in enumerate(calls))
    own = session or pool.open(task)
    observation = await own.step(AssistantTurn("", made))
    if session is None:
        await own.close()
    return observation


def texts(observation: Observation) -> list[str]:
    return [message["content"] for message in observation.messages]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    argv = [sys.executable, SERVER, "http"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/mcp"
        server.kill()


def test_a_program_serves_tools_and_is_started_again_when_it_dies() -> None:
    async def work(pool: EnvironmentPool) -> None:
        schemas = await pool.start()
        assert [schema["function"]["name"] for schema in schemas] == list(TOOLS)
        assert schemas[0]["function"]["parameters"]["required"] == ["n"]
        assert texts(await step(pool, "double", n=21)) == ['{"twice": 42}']
        assert texts(await step(pool, "greet")) == ["hello"]
        assert texts(await step(pool, "env", "count")) == ["s3cret", "4"]
        wrong = await step(pool, "double", m=1)
        assert wrong.statuses == (ToolStatus.MODEL_ERROR,) and "'n' is missing" in texts(wrong)[0]
        assert (refused := await step(pool, "refuse")).statuses == (ToolStatus.MODEL_ERROR,)
        assert texts(refused) == ["not today"]
        assert texts(await step(pool, "reject")) == ["no such argument"]
        broken = await step(pool, "break")
        assert broken.statuses == (ToolStatus.FAILED,) and "out of order" in broken.detail
        seen = await step(pool, "picture")
        assert seen.statuses == (ToolStatus.FAILED,) and "'image'" in seen.detail
        dead = await step(pool, "die")
        assert dead.statuses == (ToolStatus.FAILED,) and "has ended" in dead.detail
        # Two have died by now, the second one asked again by the call that killed the first.
        assert texts(await step(pool, "count")) == ["1"]

    in_pool(setup_of(PROGRAM), work)


def test_a_call_that_hangs_is_answered_at_its_time_and_nothing_is_left() -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}

    async def work(pool: EnvironmentPool) -> None:
        slow = await step(pool, "hang")
        assert slow.statuses == (ToolStatus.TIMEOUT,)
        assert texts(slow) == ["No result within 0.3 s."]

    in_pool(setup_of(PROGRAM, selected=("hang",), timeout_s=0.3), work)
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


async def call_too_long(server: McpServer) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await server.call("hang", {})


async def count(server: McpServer) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return text_of_result(await server.call("count", {}))


def test_a_server_that_hangs_is_started_again_for_the_calls_after() -> None:
    async def work() -> None:
        server = McpServer(PROGRAM, ping_s=0.3)
        assert await count(server) == "1"
        await call_too_long(server)
        assert [await count(server), await count(server)] == ["1", "2"], "it is a new one"
        await server.close()

    asyncio.run(work())
    assert not servers_running()


def test_a_server_that_lives_is_kept_when_a_call_takes_too_long(url: str) -> None:
    async def work() -> None:
        server = McpServer(ServerSpec("web", url=url, headers=KEY), ping_s=PATIENCE_S)
        before = int(await count(server))
        await call_too_long(server)
        (channel,) = server._num_under_way
        # On a busy machine, the time is up before "hang" is sent, and the server does not count it.
        assert int(await count(server)) in (before + 1, before + 2)
        assert list(server._num_under_way) == [channel]
        await server.close()

    asyncio.run(work())


def test_an_episode_may_have_a_server_of_its_own() -> None:
    async def work(pool: EnvironmentPool) -> None:
        tasks = [
            Task(({"role": "user", "content": "q"},), "s", {}, 0, (0, n), ("count",))
            for n in range(2)
        ]
        first, second = map(pool.open, tasks)
        assert texts(await step(pool, "count", session=first)) == ["1"]
        assert texts(await step(pool, "count", session=first)) == ["2"]
        assert texts(await step(pool, "count", session=second)) == ["1"]
        assert len(servers_running()) == 2
        await first.close()
        await second.close()
        assert not servers_running()

    in_pool(setup_of(PROGRAM, selected=("count",), is_per_episode=True), work)


def test_an_episode_fails_with_its_own_server_and_does_not_go_on_with_a_new_one() -> None:
    async def work(pool: EnvironmentPool) -> None:
        task = Task(({"role": "user", "content": "q"},), "s", {}, 0, (0, 0), ("count",))
        session = pool.open(task)
        assert texts(await step(pool, "count", session=session)) == ["1"]
        (server,) = servers_running()
        server.kill()
        lost = await step(pool, "count", session=session)
        assert lost.statuses == (ToolStatus.FAILED,) and "has ended" in lost.detail
        await session.close()

    in_pool(setup_of(PROGRAM, selected=("count",), is_per_episode=True), work)


def test_a_server_with_a_url_serves_tools(url: str) -> None:
    web = ServerSpec("web", url=url, headers=KEY)

    async def work(pool: EnvironmentPool) -> None:
        assert len(await pool.start()) == 2
        assert texts(await step(pool, "greet", "double", n=4)) == ["hello", '{"twice": 8}']

    in_pool(setup_of(web, selected=("greet", "double")), work)


def test_a_request_that_fails_does_not_take_others_along(url: str) -> None:
    """The call ``env`` is under way when ``refuse`` gets HTTP status 500, and is made once."""
    web = ServerSpec("web", url=url, headers=KEY)

    async def work(pool: EnvironmentPool) -> None:
        (before,) = texts(await step(pool, "count"))
        both = await step(pool, "refuse", "env", "greet")
        assert both.statuses == (ToolStatus.MODEL_ERROR, ToolStatus.OK, ToolStatus.OK), both
        # Three calls were answered since, and this one is the next.
        assert texts(await step(pool, "count")) == [str(int(before) + 4)]

    in_pool(setup_of(web, selected=("refuse", "env", "greet", "count")), work)


def test_servers_that_cannot_be_used_are_named_before_training(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = (sys.executable, "-c", "raise SystemExit(3)")
    old = {**VARIABLES, "MCP_VERSION": "2031-01-01"}
    cases = [
        (ServerSpec("gone", argv), {}, r"the server gone cannot be used: .* has ended"),
        (ServerSpec("no", ("/no/such",)), {}, "/no/such cannot be started: No such file"),
        (ServerSpec("old", PROGRAM.command, old), {}, "version 2031-01-01, which is not built"),
        (ServerSpec("web", url=url), {}, r"HTTP status 401"),
        (
            ServerSpec("web", url=url.replace("/mcp", "/old"), headers=KEY),
            {},
            "HTTP status 307, a redirect to /mcp; name the address that it leads to as url",
        ),
        (ServerSpec("web", url="http://127.0.0.1:9/"), {}, "cannot be reached: All connection"),
        (PROGRAM, {"selected": ("x",)}, "have no tool 'x'; they have double, greet"),
    ]
    for server, fields, message in cases:
        with pytest.raises(UserError, match=f"tool_config_path: .*{message}") as caught:
            in_pool(setup_of(server, **fields), lambda pool: pool.start())
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="two tools have the name 'double'"):
        in_pool(setup_of(PROGRAM, PROGRAM), lambda pool: pool.start())


def test_verls_form_and_the_form_of_other_programs_are_read(tmp_path: Path) -> None:
    servers = tmp_path / "servers.json"
    entry = {"url": "https://example.org/mcp", "auth_token": "t"}
    servers.write_text(json.dumps({"mcpServers": {"search": entry}}))
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n"
        "  - class_name: verl.tools.mcp_search_tool.MCPSearchTool\n"
        "    config: {rate_limit: 120, timeout: 12, type: mcp}\n"
        f"    mcp: {{mcp_servers_config_path: {servers}, tool_selected_list: [look]}}\n"
        "  - config: {type: mcp, per_episode: true}\n"
        f"    mcp: {{servers: {{made: {{command: {sys.executable}, args: ['-u', s.py],"
        " env: {KEY: 1}}}}\n"
    )
    read = read_tool_file(str(file))
    token = {"Authorization": "Bearer t"}
    web = ServerSpec("search", url="https://example.org/mcp", headers=token)
    made = ServerSpec("made", (sys.executable, "-u", "s.py"), {"KEY": "1"})
    assert read.served == (
        ServedTools((web,), ("look",), 12.0),
        ServedTools((made,), is_per_episode=True),
    )
    assert read.notes == ("tools[0]: rate_limit has no effect",)


BAD_ENTRIES = {
    "class_name: a.B, mcp: {servers: {a: {url: 'http://x'}}}": "'a.B' reads results of its own",
    "tool_schema: {}, mcp: {}": "tool_schema is the server's to tell",
    "mcp: {}": "not exactly one of servers and mcp_servers_config_path",
    "mcp: {mcp_servers_config_path: no.json}": "no.json: no such file",
    "mcp: {servers: []}": "servers is not a mapping of servers",
    "mcp: {server: {}}": "mcp has an unknown field 'server'",
    "mcp: {servers: {a: {}}}": "not exactly one of command and url",
    "mcp: {servers: {a: {url: 'http://x', type: sse}}}": "speaks 'sse'; stdio and http are built",
    "mcp: {servers: {a: {url: 'ftp://x'}}}": "does not begin with http",
    "mcp: {servers: {a: {url: 'http://x:99999/y'}}}": "server a: the url .* is not valid .Port out",
    "mcp: {servers: {a: {url: 'http://'}}}": "the url 'http://' has no host",
    "mcp: {servers: {a: {command: sh, args: 5}}}": "command and args are not texts",
    "mcp: {servers: {a: {command: sh, cwd: 5}}}": "the server a: cwd is not a path",
    "mcp: {servers: {a: {command: sh, 1: 2, b: 3}}}": "the server a has an unknown field 1;",
    "mcp: {servers: {a: {command: no-such-command}}}": "'no-such-command' is not found",
    "mcp: {servers: {a: {command: sh, args: [1]}}}": "command and args are not texts",
    "mcp: {servers: {a: {command: sh, evn: {}}}}": "the server a has an unknown field 'evn'",
    "mcp: {servers: {a: {command: sh}}, tool_selected_list: x}": "is not a list of names",
}


@pytest.mark.parametrize("entry", BAD_ENTRIES)
def test_entries_with_mistakes(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: [{{config: {{type: mcp}}, {entry}}}]")
    with pytest.raises(UserError, match=f"tool_config_path=.*{BAD_ENTRIES[entry]}") as caught:
        read_tool_file(str(file))
    assert "\n" not in str(caught.value)


def test_all_texts_of_a_result_are_read() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "resource", "resource": {"uri": "x:y", "text": "b"}},
        {"type": "resource_link", "uri": "x:z"},
    ]
    assert text_of_result({"content": parts, "structuredContent": {}}) == "a\nb\nx:z"
    assert text_of_result({}) == ""
