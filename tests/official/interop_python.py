"""What the Python SDK's client and FastMCP's do with the reference server; interop.py starts it in their venvs.

    python interop_python.py {sdk|fastmcp} {URL | COMMAND ARGUMENT...}

Prints one JSON array for each feature: its name, works / not offered / client's fault / fails, and what was seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import pkgutil
import sys
from typing import Any

import mcp
import mcp.client
from mcp.client.stdio import StdioServerParameters
from mcp.client.subscriptions import ResourceUpdated, ToolsListChanged
from mcp_types import HEADER_MISMATCH, ElicitRequestURLParams, ElicitResult, PromptReference

CONFIG = "file:///project/config.json"
FEATURES = ("discover", "list tools", "call", "structured output", "mirrored argument", "progress", "cancel",
            "resources", "prompts", "completion", "form elicitation", "URL elicitation", "subscription", "tasks")


class NotOffered(Exception):
    """The client has nothing for this feature; says how that was established."""


class ClientFault(Exception):
    """The client breaks a rule of the specification and is refused for it; says which."""


def expect(truth: object, seen: object) -> str:
    """What was seen, when the truth holds."""
    if not truth:
        raise AssertionError(str(seen))
    return str(seen)[:100]


def methods_about(word: str, *classes: type) -> list[str]:
    """The public methods of a client whose names hold the word."""
    return [name for cls in classes for name in dir(cls) if word in name.lower() and not name.startswith("_")]


async def accept(params: Any, driver: Driver) -> ElicitResult:
    """Fills in a form with a login and yeses; opens a page and enters what it asks for, by the tool that plays it."""
    if isinstance(params, ElicitRequestURLParams):
        await driver.text("finish_billing", visit=params.url.rpartition("/")[2])
        return ElicitResult(action="accept")
    fields = params.requested_schema["properties"].items()
    content = {name: True if field["type"] == "boolean" else "octocat" for name, field in fields}
    return ElicitResult(action="accept", content=content)


class Driver:
    """The features that both clients have, in terms of four steps that they name differently."""

    client: Any

    async def listed(self, kind: str) -> list[Any]:
        """Everything that is listed, page after page."""
        raise NotImplementedError

    async def call(self, name: str, arguments: dict[str, str], on_progress: Any = None) -> Any:
        """A tool's result; an exception for a failed one."""
        raise NotImplementedError

    async def read(self, uri: str) -> str:
        """A resource's text."""
        raise NotImplementedError

    async def complete(self, prompt: str, argument: str, value: str) -> list[str]:
        """The proposed values of a prompt's argument."""
        raise NotImplementedError

    async def text(self, name: str, **arguments: str) -> str:
        """A tool's text."""
        return str((await self.call(name, arguments)).content[0].text)

    async def discover(self) -> str:
        return expect(self.client.protocol_version == "2026-07-28", self.client.server_info)

    async def list_tools(self) -> str:
        names = [tool.name for tool in await self.listed("tools")]
        return expect("build_report" in names, f"{len(names)} tools")

    async def call_tool(self) -> str:
        return expect(words := await self.text("get_weather", location="Paris"), words)

    async def structured_output(self) -> str:
        seen = (await self.call("get_weather_data", {"location": "Paris"})).structured_content
        return expect(seen, seen)

    async def mirrored_argument(self) -> str:
        return expect(words := await self.text("execute_sql", region="us-west1", query="SELECT 1"), words)

    async def progress(self) -> str:
        seen: list[float] = []

        async def on_progress(done: float, total: float | None, message: str | None) -> None:
            seen.append(done)

        await self.call("build_report", {"month": "2026-06"}, on_progress)
        return expect(seen == list(range(1, 11)), seen)

    async def cancel(self) -> str:
        second = asyncio.Event()

        async def on_progress(done: float, total: float | None, message: str | None) -> None:
            if done >= 2:
                second.set()

        task = asyncio.create_task(self.call("build_report", {"month": "2026-07"}, on_progress))
        await second.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return expect(task.cancelled(), "cancelled by the client")  # interop.py looks for it in the server's log

    async def resources(self) -> str:
        uris = [str(resource.uri) for resource in await self.listed("resources")]
        templates = [template.uri_template for template in await self.listed("resource_templates")]
        return expect(CONFIG in uris and templates and await self.read(CONFIG), f"{len(uris)} and {templates}")

    async def prompts(self) -> str:
        names = [prompt.name for prompt in await self.listed("prompts")]
        prompt = await self.client.get_prompt("code_review", {"code": "print(1)", "language": "python"})
        words = prompt.messages[0].content.text
        return expect("code_review" in names and "print(1)" in words, words)

    async def completion(self) -> str:
        return expect("python" in (values := await self.complete("code_review", "language", "py")), values)

    async def form_elicitation(self) -> str:
        return expect("octocat" in (words := await self.text("create_repo", repo="demo")), words)

    async def url_elicitation(self) -> str:
        return expect("is connected" in (words := await self.text("connect_billing")), words)


class Sdk(Driver):
    """`mcp.Client`, the Python SDK's client."""

    def __init__(self, target: list[str]) -> None:
        over_http = target[0].startswith("http")
        server = target[0] if over_http else StdioServerParameters(command=target[0], args=target[1:])
        self.client = mcp.Client(server, elicitation_callback=lambda context, params: accept(params, self))

    async def listed(self, kind: str) -> list[Any]:
        page = await getattr(self.client, f"list_{kind}")()
        found: list[Any] = getattr(page, kind)
        while page.next_cursor is not None:
            page = await getattr(self.client, f"list_{kind}")(cursor=page.next_cursor)
            found = found + getattr(page, kind)
        return found

    async def call(self, name: str, arguments: dict[str, str], on_progress: Any = None) -> Any:
        result = await self.client.call_tool(name, arguments, progress_callback=on_progress)
        expect(not result.is_error, result.content)
        return result

    async def read(self, uri: str) -> str:
        return str((await self.client.read_resource(uri)).contents[0].text)

    async def complete(self, prompt: str, argument: str, value: str) -> list[str]:
        result = await self.client.complete(PromptReference(name=prompt), {"name": argument, "value": value})
        return list(result.completion.values)

    async def subscription(self) -> str:
        async with self.client.listen(tools_list_changed=True, resource_subscriptions=[CONFIG]) as changes:
            await self.text("toggle_beta_tool")
            first = await anext(changes)
            await self.text("touch_config")
            second = await anext(changes)
        await self.text("toggle_beta_tool")  # as it was
        return expect((first, second) == (ToolsListChanged(), ResourceUpdated(uri=CONFIG)), (first, second))

    async def tasks(self) -> str:
        found = [module.name for module in pkgutil.walk_packages(mcp.client.__path__) if "task" in module.name]
        found += methods_about("task", mcp.Client, mcp.ClientSession)
        expect(not found, f"there is something for tasks now: {found}")
        raise NotOffered("mcp.client has no module for tasks, Client and ClientSession have no method")


class Fastmcp(Driver):
    """`fastmcp.Client`."""

    def __init__(self, target: list[str]) -> None:
        self.target = target
        self.client = self.connect()

    def connect(self) -> Any:
        """A new client for the target."""
        import fastmcp
        from fastmcp.client.transports import StdioTransport

        over_http = self.target[0].startswith("http")
        server = self.target[0] if over_http else StdioTransport(self.target[0], self.target[1:], keep_alive=False)
        return fastmcp.Client(server, elicitation_handler=lambda message, kind, params, context: accept(params, self))

    async def listed(self, kind: str) -> list[Any]:
        return list(await getattr(self.client, f"list_{kind}")())

    async def call(self, name: str, arguments: dict[str, str], on_progress: Any = None) -> Any:
        return await self.client.call_tool(name, arguments, progress_handler=on_progress)

    async def read(self, uri: str) -> str:
        return str((await self.client.read_resource(uri))[0].text)

    async def complete(self, prompt: str, argument: str, value: str) -> list[str]:
        result = await self.client.complete(PromptReference(name=prompt), {"name": argument, "value": value})
        return list(result.values)

    async def subscription(self) -> str:
        found = methods_about("listen", type(self.client)) + methods_about("subscri", type(self.client))
        expect(not found, f"there is something for subscriptions now: {found}")
        raise NotOffered("fastmcp.Client has no method to listen or to subscribe")

    async def tasks(self) -> str:
        tasks = importlib.import_module("fastmcp_tasks")  # from here on new clients declare the extension
        async with self.connect() as client:
            try:
                report = await client.call_tool("build_report", {"month": "2026-08"})
            except mcp.MCPError as refusal:
                if refusal.error.code == HEADER_MISMATCH and "Mcp-Name header is missing" in refusal.error.message:
                    raise ClientFault("tasks/get without Mcp-Name, which SEP-2663 demands over HTTP") from refusal
                raise
            task = await tasks.call_tool_task(client, "build_report", {"month": "2026-09"})
            await task.cancel()
            ended = await task.wait()
        return expect(ended.status == "cancelled" and report.content, f"{report.content[0].text}; {ended.status}")


async def run(driver: Driver) -> None:
    """Every feature in turn, over one connection."""
    async with driver.client:
        for feature in FEATURES:
            method = {"call": "call_tool"}.get(feature, feature.replace(" ", "_").lower())
            try:
                outcome, seen = "works", await asyncio.wait_for(getattr(driver, method)(), 30)
            except NotOffered as reason:
                outcome, seen = "not offered", str(reason)
            except ClientFault as rule:
                outcome, seen = "client's fault", str(rule)
            except Exception as error:
                outcome, seen = "fails", f"{type(error).__name__}: {error}"
            print(json.dumps([feature, outcome, seen]), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(run({"sdk": Sdk, "fastmcp": Fastmcp}[sys.argv[1]](sys.argv[2:])))
