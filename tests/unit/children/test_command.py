# SPDX-License-Identifier: Apache-2.0
"""The cause that is told of a command that has failed."""

from __future__ import annotations

import pytest

from tandem.children.command import CommandEnd

NODE = """
file:///app/agent.mjs:9
  throw new TypeError(`no ${name}`);
        ^

TypeError: no page
    at open (file:///app/agent.mjs:9:9)
    at new NodeError (node:internal/errors:405:5)
    at node:internal/main/run_main_module:23:47

Node.js v20.20.2
"""
FETCH = """
node:internal/deps/undici/undici:13510
      Error.captureStackTrace(err);
            ^

TypeError: fetch failed
    at node:internal/deps/undici/undici:13510:13
    at async file:///app/agent.mjs:3:11 {
  [cause]: Error: connect ECONNREFUSED 127.0.0.1:9
      at TCPConnectWrap.afterConnect [as oncomplete] (node:net:1611:16) {
    errno: -111,
    code: 'ECONNREFUSED'
  }
}

Node.js v20.20.2
"""
PACKAGE = """
node:internal/modules/esm/resolve:854
  throw new ERR_MODULE_NOT_FOUND(packageName, fileURLToPath(base), null);
        ^

Error [ERR_MODULE_NOT_FOUND]: Cannot find package 'openai' imported from /app/agent.mjs
    at packageResolve (node:internal/modules/esm/resolve:854:9) {
  code: 'ERR_MODULE_NOT_FOUND'
}

Node.js v20.20.2
"""
PYTHON = """
error: a line of a log
Traceback (most recent call last):
  File "agent.py", line 3, in <module>
    open_page()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "agent.py", line 5, in <module>
    raise Missing("no page")
__main__.Missing: no page
"""
JAVA = """
Exception in thread "main" java.lang.IllegalStateException: no page
        at Agent.main(Agent.java:5)
"""
GO = """
panic: runtime error: index out of range [5] with length 3

goroutine 1 [running]:
main.main()
exit status 2
"""
CAUSES = {
    NODE: "TypeError: no page",
    FETCH: "[cause]: Error: connect ECONNREFUSED 127.0.0.1:9",
    PACKAGE: "Error [ERR_MODULE_NOT_FOUND]: Cannot find package 'openai' imported from",
    PYTHON: "__main__.Missing: no page",
    JAVA: 'Exception in thread "main" java.lang.IllegalStateException: no page',
    GO: "panic: runtime error: index out of range",
    "loading the errors of yesterday\nno such page\n": "no such page",
}


@pytest.mark.parametrize("errors", CAUSES)
def test_the_line_that_reports_the_error_is_told(errors: str) -> None:
    assert (
        CommandEnd(1, "", errors).describe().startswith(f"ended with exit code 1: {CAUSES[errors]}")
    )


def test_a_command_without_errors_tells_its_code_or_signal_only() -> None:
    assert CommandEnd(3, "bye", "").describe() == "ended with exit code 3"
    assert CommandEnd(-9, "", NODE).describe() == "killed by SIGKILL"
