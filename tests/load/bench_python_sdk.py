"""The official Python SDK's server with the tools that bench.py measures; bench.py starts it in its own environment.

    python bench_python_sdk.py PORT [--stdio]
"""

from __future__ import annotations

import sys
import time

import anyio
import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("python-sdk")


@server.tool(structured_output=False)
def get_weather(location: str) -> str:
    """Made-up weather, as text."""
    return f"14 °C and rainy in {location}."


@server.tool()
async def build_report(month: str, ctx: Context) -> str:
    """Ten seconds; says when it was stopped."""
    try:
        await ctx.report_progress(0, 10, "begun")
        await anyio.sleep(10)
    except anyio.get_cancelled_exc_class():
        print("build_report cancelled", file=sys.stderr, flush=True)
        raise
    return f"The report for {month} is ready."


@server.tool()
async def stamps(count: int, ctx: Context) -> str:
    """Progress events that carry the time at which they were written."""
    for number in range(count):
        await ctx.report_progress(number, None, str(time.monotonic_ns()))
        await anyio.sleep(0.002)
    return "done"


@server.tool()
async def touch_config(ctx: Context) -> str:
    """Tells subscribers that a resource has changed."""
    await ctx.notify_resource_updated("file:///project/config.json")
    return "changed"


if __name__ == "__main__":
    if "--stdio" in sys.argv:
        sys.exit(server.run("stdio"))
    app = server.streamable_http_app()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
