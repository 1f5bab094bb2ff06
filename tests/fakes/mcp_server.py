# SPDX-License-Identifier: Apache-2.0
"""A server of the Model Context Protocol, as a program or with a URL; the standard library alone.

``python mcp_server.py`` speaks over standard input and output, ``python mcp_server.py http`` over
HTTP: it prints its port first, and answers with events where the tool's name is ``greet``.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Event
from typing import Any

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = ("double", "greet", "count", "refuse", "reject", "break", "die", "hang", "picture", "env")
FAILED_ONCE = Event()
SLOW_BEGAN = Event()
SESSION = "session-1"
COUNTED = count(1)


def described(name: str) -> dict[str, Any]:
    schema = NUMBER if name == "double" else {"type": "object", "properties": {}}
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema}


def answer(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer to a message; None to one that needs none."""
    if "id" not in message or "method" not in message:
        return None
    head = {"jsonrpc": "2.0", "id": message["id"]}
    params = message["params"]
    if message["method"] == "initialize":
        version = os.environ.get("MCP_VERSION", params["protocolVersion"])
        info = {"name": "fake", "version": "1"}
        return {
            **head,
            "result": {"protocolVersion": version, "capabilities": {}, "serverInfo": info},
        }
    if message["method"] == "ping":
        return {**head, "result": {}}
    if message["method"] == "tools/list":
        half = len(TOOLS) // 2
        if "cursor" in params:
            return {**head, "result": {"tools": [described(name) for name in TOOLS[half:]]}}
        first = [described(name) for name in TOOLS[:half]]
        return {**head, "result": {"tools": first, "nextCursor": "more"}}
    return {**head, **call(params["name"], params["arguments"])}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    num_counted = next(COUNTED)
    if name == "die":
        os._exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "reject":
        return {"error": {"code": -32602, "message": "no such argument"}}
    if name == "break":
        return {"error": {"code": -32603, "message": "out of order"}}
    if name == "refuse":
        return {"result": {"content": [{"type": "text", "text": "not today"}], "isError": True}}
    if name == "picture":
        data = base64.b64encode(b"x").decode()
        return {"result": {"content": [{"type": "image", "data": data, "mimeType": "image/png"}]}}
    if name == "double":
        return {"result": {"content": [], "structuredContent": {"twice": 2 * arguments["n"]}}}
    text = {"count": str(num_counted), "env": os.environ.get("MCP_SECRET", "")}.get(name, "hello")
    return {"result": {"content": [{"type": "text", "text": text}]}}


def serve_lines() -> None:
    sys.stdout.write("a banner that is no message\n")
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("method") == "tools/call" and message["params"]["name"] == "greet":
            write({"jsonrpc": "2.0", "id": 1, "method": "ping"})
            assert json.loads(sys.stdin.readline())["result"] == {}
        found = answer(message)
        if found is not None:
            write(found)


def write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    """Answers one message."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_first = message.get("method") == "initialize"
        if self.headers.get("authorization") != "Bearer secret":
            self.reply(401, b"{}")
            return
        if not is_first and self.headers.get("mcp-session-id") != SESSION:
            self.reply(404, b"{}")
            return
        if not is_first:
            assert self.headers["mcp-protocol-version"] == "2025-11-25"
        if self.path == "/old":
            self.reply(307, b"")
            return
        name = message.get("params", {}).get("name")
        if name == "refuse" and not FAILED_ONCE.is_set():
            # Another call is under way when this one fails, and ends after it.
            SLOW_BEGAN.wait(60)
            FAILED_ONCE.set()
            self.reply(500, b"out of order")
            return
        found = answer(message)
        if name == "env" and not FAILED_ONCE.is_set():
            SLOW_BEGAN.set()
            FAILED_ONCE.wait(60)
            time.sleep(0.5)
        if found is None:
            self.reply(202, b"")
        elif message.get("params", {}).get("name") == "greet":
            note = json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}})
            events = f"event: message\ndata: {note}\n\ndata: {json.dumps(found)}\n\n"
            self.reply(200, events.encode(), kind="text/event-stream")
        else:
            self.reply(200, json.dumps(found).encode())

    def do_DELETE(self) -> None:
        self.reply(200, b"")

    def reply(self, status: int, body: bytes, *, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("mcp-session-id", SESSION)
        if status == 307:
            self.send_header("location", "/mcp")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def serve_web() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["http"]:
        serve_web()
    else:
        serve_lines()
