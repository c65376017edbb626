"""An MCP server for tests: ``python -m tests.support.mcp_server`` serves on standard input and output, or over HTTP if a port follows."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail(how: str) -> str:
    """Fail in the way that `how` names."""
    if how == "hang":
        time.sleep(30)
    if how == "exit":
        os._exit(3)
    raise ValueError(how)


@server.tool()
def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def mood() -> str:
    """Tells an environment variable of the server's."""
    return os.environ.get("MOOD", "none")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
