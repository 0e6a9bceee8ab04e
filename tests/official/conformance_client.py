"""The client in the official suite's client scenarios: plays the one that the suite names with tests/lessons/client.py.

    MCP_CONFORMANCE_SCENARIO=NAME python tests/official/conformance_client.py URL      (the suite starts it like this)

It only does what a scenario wants done; the suite, which is the server, watches and judges. An error ends it with a
traceback, which the suite reports.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lessons"))

from client import Client

UNHEARD_OF = "2999-01-01"  # a version that no server supports
EXAMPLES = {"string": "x", "number": 1.5, "integer": 1, "boolean": True}


def example(schema: dict[str, Any]) -> dict[str, Any]:
    """A value for each property that is a primitive."""
    properties = schema.get("properties", {}).items()
    return {name: EXAMPLES[one["type"]] for name, one in properties if one.get("type") in EXAMPLES}


def call_tools(client: Client) -> None:
    """Calls every tool that the client keeps of the list."""
    for tool in client.list_tools():
        client.call_tool(tool["name"], example(tool["inputSchema"]))


def call_as_told(client: Client) -> None:
    """Calls the tools with the arguments that the suite gives in $MCP_CONFORMANCE_CONTEXT."""
    client.list_tools()
    for call in json.loads(os.environ["MCP_CONFORMANCE_CONTEXT"])["toolCalls"]:
        client.call_tool(call["name"], call["arguments"])


def make_all_requests(client: Client) -> None:
    """Lists tools, resources and prompts and asks for each of them."""
    call_tools(client)
    for resource in client.request("resources/list")["resources"]:
        client.request("resources/read", {"uri": resource["uri"]})
    for prompt in client.request("prompts/list")["prompts"]:
        client.request("prompts/get", {"name": prompt["name"]})


def negotiate(client: Client) -> None:
    """Begins with a version that is refused; the client has to find the one that both sides speak."""
    able: dict[str, Any] = {"elicitation": {}}
    choosing = Client(client.url, capabilities=able, versions=(UNHEARD_OF, *client.versions))
    choosing.request("server/discover")
    choosing.list_tools()


def answer_questions(client: Client) -> None:
    """Agrees to whatever a tool asks; makes another call before each answer, which must not get mixed up with it."""
    def agree(key: str, question: dict[str, Any]) -> dict[str, Any]:
        client.call_tool("test_mrtr_unrelated")
        return {"action": "accept", "content": {"confirmed": True}}

    for tool in client.list_tools():
        client.call_tool(tool["name"], answer=agree)


def echo_schema(client: Client) -> None:
    """Sends a tool's input schema back as it is remembered after the tools were listed."""
    client.list_tools()
    client.call_tool("json_schema_echo", {"schema": client.tools["json_schema_2020_12_tool"]["inputSchema"]})


SCENARIOS: dict[str, Callable[[Client], object]] = {
    "tools_call": call_tools,
    "request-metadata": negotiate,
    "http-standard-headers": make_all_requests,
    "http-custom-headers": call_as_told,
    "http-invalid-tool-headers": call_tools,
    "sep-2322-client-request-state": answer_questions,
    "json-schema-ref-no-deref": Client.list_tools,
    "json-schema-2020-12-preservation": echo_schema,
}

if __name__ == "__main__":
    SCENARIOS[os.environ["MCP_CONFORMANCE_SCENARIO"]](Client(sys.argv[-1]))
