# SPDX-License-Identifier: Apache-2.0
"""Servers made with the protocol's own package, mcp, which comes with verifiers."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tandem.agents.json_rpc import RpcLost
from tandem.agents.mcp import McpServer
from tandem.agents.setup import ServerSpec

PYTHON = os.environ.get("TANDEM_VERIFIERS_PYTHON", "")
LIMIT_S = 120
SERVER = '''
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs mcp: make test-verifiers")


async def check(server: McpServer) -> None:
    async with asyncio.timeout(LIMIT_S):
        (tool,) = await server.list_tools()
        assert tool["name"] == "add" and tool["inputSchema"]["required"] == ["a", "b"]
        result = await server.call("add", {"a": 1, "b": 2})
        assert result["content"][0]["text"] == "3" and not result["isError"]
        assert (await server.call("add", {"a": "q"}))["isError"]
        await server.close()


def test_a_program_of_the_package_serves_tools(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    asyncio.run(check(McpServer(ServerSpec("demo", (PYTHON, str(file)), dict(os.environ)))))


def test_a_url_of_the_package_serves_tools(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def ask() -> None:
        ends_s = time.monotonic() + LIMIT_S
        while True:
            try:
                await check(McpServer(ServerSpec("demo", url=f"http://127.0.0.1:{port}/mcp")))
                return
            except RpcLost:
                assert time.monotonic() < ends_s, "the server has not started"
                await asyncio.sleep(0.2)

    with subprocess.Popen([PYTHON, str(file), str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            asyncio.run(ask())
        finally:
            server.kill()
