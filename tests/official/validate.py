"""Validates every message that the two servers send, over HTTP and over stdio, against the revision's JSON schema.

    python tests/official/validate.py [SCHEMA]        (default: ../shared/spec/schema-2026-07-28.json)

Prints how many messages of each type were seen on each transport, and each violation; exit status 1 if there is one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import ROOT, HttpProcess, install_python

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import TASKS, Connection, message, octets  # noqa: E402

Json = dict[str, Any]
Ask = Callable[..., Json]
SCHEMA = ROOT.parent / "shared/spec/schema-2026-07-28.json"
PATIENCE = 10.0
EVERYTHING = {"extensions": {TASKS: {}}, "elicitation": {"form": {}, "url": {}}}
FILTER = {
    "toolsListChanged": True,
    "promptsListChanged": True,
    "resourcesListChanged": True,
    "resourceSubscriptions": ["file:///project/config.json"],
}
VERSION = "io.modelcontextprotocol/protocolVersion"

# ------------------------------------------------------------------------------------- what is asked


def tool(name: str, /, **arguments: Any) -> Json:
    return {"name": name, "arguments": arguments}


LANGUAGE = {"ref": {"type": "ref/prompt", "name": "code_review"}, "argument": {"name": "language", "value": ""}}
SINGLE: list[tuple[str, Json, Json]] = [
    ("server/discover", {}, {}),
    ("tools/list", {}, {}),
    ("prompts/list", {}, {}),
    ("resources/list", {}, {}),
    ("resources/templates/list", {}, {}),
    ("resources/list", {"cursor": "x"}, {}),
    ("completion/complete", LANGUAGE, {}),
    ("completion/complete", LANGUAGE | {"ref": {"type": "ref/prompt", "name": "x"}}, {}),
    *(
        ("resources/read", {"uri": uri}, {})
        for uri in (
            "app://me/settings",
            "file:///project/config.json",
            "file:///project/README.md",
            "file:///project/%2e%2e",
            "",
        )
    ),
    ("prompts/get", {"name": "code_review", "arguments": {"code": "x = 1"}}, {}),
    ("prompts/get", {"name": "code_review"}, {}),
    ("prompts/get", {"name": "x"}, {}),
    ("tools/call", tool("get_weather", location="Zürich"), {}),
    ("tools/call", tool("get_weather_data", location="Oslo"), {}),
    ("tools/call", tool("get_weather"), {}),
    ("tools/call", tool("execute_sql", region="us-west1", query="SELECT 1"), {}),
    ("tools/call", tool("create_cart"), {}),
    ("tools/call", tool("add_to_cart", cartId="x", sku="y"), {}),
    ("tools/call", tool("book_flight", to="Oslo", date="x"), {}),
    ("tools/call", tool("search", query="m"), {}),
    ("tools/call", tool("place_hold", title="Emma"), {}),
    ("tools/call", tool("x"), {}),
    ("tools/call", tool("build_report", month="May"), {"progressToken": "p", "log_level": "debug"}),
    ("tools/call", tool("build_report", month="May"), {"progressToken": 0}),
    ("tools/call", tool("create_repo", repo="mcp"), {}),
    ("tools/call", tool("connect_billing"), {"capabilities": {"elicitation": {}}}),
    ("tools/call", tool("connect_billing"), {"capabilities": EVERYTHING}),
    ("tools/call", tool("create_repo", repo="mcp") | {"requestState": "x"}, {"capabilities": EVERYTHING}),
    ("tools/call", {"name": 1}, {}),
    ("tasks/get", {"taskId": "x"}, {}),
    ("tasks/get", {"taskId": "x"}, {"capabilities": EVERYTHING}),
    ("tasks/update", {"taskId": "x"}, {"capabilities": EVERYTHING}),
    ("tasks/cancel", {"taskId": "x"}, {"capabilities": EVERYTHING}),
    ("subscriptions/listen", {"notifications": {"taskIds": ["x"]}}, {}),
    ("subscriptions/listen", {"notifications": 1}, {}),
    ("initialize", {}, {}),
    ("ping", {}, {}),
    ("server/discover", {}, {VERSION: "2025-11-25"}),
    ("server/discover", {}, {"log_level": "loud"}),
]
BROKEN = [
    b"{",
    b"[]",
    b'{"jsonrpc":"2.0","id":null,"method":"ping"}',
    b'{"jsonrpc":"1.0","id":"x","method":"ping"}',
    b'"\xff"',
    b'{"jsonrpc":"2.0","id":1,"result":{}}',
    b'{"jsonrpc":"2.0","id":1,"method":"ping"}',
]


def walk(ask: Ask) -> None:
    """Everything that takes more than one request: carts, pages, questions, a report as a task, a cancelled one."""
    for method, params, metadata in SINGLE:
        ask(method, params, **metadata)
    cart = ask("tools/call", tool("create_cart"))["result"]["structuredContent"]["cartId"]
    ask("tools/call", tool("add_to_cart", cartId=cart, sku="book"))
    cursor = ask("resources/list", {})["result"].get("nextCursor")
    while cursor is not None:
        cursor = ask("resources/list", {"cursor": cursor})["result"].get("nextCursor")
    walk_questions(ask)
    for answer in ({"action": "accept", "content": {"charts": True}}, {"action": "decline"}, None):
        walk_report(ask, answer)
    for switch in ("toggle_beta_tool", "toggle_beta_tool", "touch_config"):
        ask("tools/call", tool(switch))


LISTS = {"tools": "tools/list", "prompts": "prompts/list", "resources": "resources/list",
         "resourceTemplates": "resources/templates/list"}
FILLED = {"name": "Alice", "color": "blue", "ok": True, "confirm": True, "context": "a test"}
ANSWERS: dict[str, Json] = {
    "elicitation/create": {"action": "accept", "content": FILLED},
    "sampling/createMessage": {"role": "assistant", "content": {"type": "text", "text": "Paris"}, "model": "m"},
    "roots/list": {"roots": [{"uri": "file:///home", "name": "home"}]},
}


def walk_everything(ask: Ask) -> None:
    """The server with everything: each entry of each list, page by page; its questions answered; its tasks awaited."""
    able = EVERYTHING | {"sampling": {"tools": {}}, "roots": {}}
    entries: dict[str, list[Json]] = {}
    for key, method in LISTS.items():
        page = ask(method, {})["result"]
        entries[key] = page[key]
        while "nextCursor" in page:
            page = ask(method, {"cursor": page["nextCursor"]})["result"]
            entries[key] += page[key]
    asked = [("tools/call", {"name": one["name"], "arguments": {}}) for one in entries["tools"]]
    asked += [("prompts/get", {"name": one["name"], "arguments": {
        argument["name"]: "test://x" for argument in one["arguments"]}}) for one in entries["prompts"]]
    asked += [("resources/read", {"uri": one["uri"]}) for one in entries["resources"]]
    asked += [("resources/read", {"uri": "test://template/1/data"}), ("server/discover", {})]
    reference = {"type": "ref/resource", "uri": "test://template/{id}/data"}
    asked.append(("completion/complete", {"ref": reference, "argument": {"name": "id", "value": ""}}))
    for method, params in asked:
        for capabilities in ({}, able):
            result = ask(method, params, capabilities=capabilities, progressToken="p", log_level="debug").get("result")
            for _ in range(4):
                if result and result["resultType"] == "input_required":
                    answers = {key: ANSWERS[one["method"]] for key, one in result.get("inputRequests", {}).items()}
                    retry = params | {"inputResponses": answers, "requestState": result.get("requestState")}
                    result = ask(method, retry, capabilities=capabilities)["result"]
            if result and result["resultType"] == "task":
                finish_task(ask, result["taskId"], able)
    ask("subscriptions/listen", {"notifications": FILTER})


def finish_task(ask: Ask, task: str, capabilities: Json) -> None:
    """Polls a task, and answers what it asks, until it has ended."""
    deadline = time.monotonic() + PATIENCE
    while (view := ask("tasks/get", {"taskId": task}, capabilities=capabilities)["result"])["status"] in (
            "working", "input_required"):
        if answers := {key: ANSWERS[one["method"]] for key, one in view.get("inputRequests", {}).items()}:
            ask("tasks/update", {"taskId": task, "inputResponses": answers}, capabilities=capabilities)
        if time.monotonic() > deadline:
            raise SystemExit(f"the task {task} does not end")
        threading.Event().wait(0.02)


def walk_questions(ask: Ask) -> None:
    for params, key, content in (
        (tool("create_repo", repo="mcp"), "github_login", {"name": "octocat"}),
        (tool("connect_billing"), "billing_key", {}),
    ):
        state = ask("tools/call", params, capabilities=EVERYTHING)["result"]["requestState"]
        for answer in (
            {"action": "accept", "content": content},
            {"action": "accept"},
            {"action": "decline"},
            {"action": "x"},
        ):
            ask(
                "tools/call", params | {"requestState": state, "inputResponses": {key: answer}}, capabilities=EVERYTHING
            )


def walk_report(ask: Ask, answer: Json | None) -> None:
    """A report as a task, followed by a subscription; without an answer it is cancelled."""
    task = ask("tools/call", tool("build_report", month="May"), capabilities=EVERYTHING)["result"]["taskId"]
    ask("subscriptions/listen", {"notifications": FILTER | {"taskIds": [task]}}, capabilities=EVERYTHING)
    wait_for(ask, task, "input_required")
    if answer:
        ask("tasks/update", {"taskId": task, "inputResponses": {"charts": answer}}, capabilities=EVERYTHING)
    else:
        ask("tasks/cancel", {"taskId": task}, capabilities=EVERYTHING)
    wait_for(ask, task, "completed" if answer else "cancelled")


def wait_for(ask: Ask, task: str, status: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while ask("tasks/get", {"taskId": task}, capabilities=EVERYTHING)["result"]["status"] != status:
        if time.monotonic() > deadline:
            raise SystemExit(f"the task is not {status}")
        threading.Event().wait(0.02)


# ------------------------------------------------------------------------------------- how it is asked


class Seen:
    """What the server has sent: `messages` with the method that each response answers; touched under `changed`."""

    def __init__(self) -> None:
        self.methods: dict[Any, str] = {}
        self.messages: list[Json] = []
        self.changed = threading.Condition()

    def request(self, method: str, params: Json, **metadata: Any) -> Json:
        """A request with an id of its own."""
        request = message(method, params, f"{len(self.methods)} {method}", **metadata)
        self.methods[request["id"]] = method
        return request

    def add(self, *messages: Json) -> None:
        with self.changed:
            self.messages += messages
            self.changed.notify_all()

    def first_for(self, request_id: str) -> Json:
        """The response to a request; for a subscription that was taken, its acknowledgement."""

        def found() -> Json | None:
            return next(
                (
                    one
                    for one in self.messages
                    if one.get("id") == request_id
                    or (
                        one.get("method") == "notifications/subscriptions/acknowledged"
                        and request_id in one["params"]["_meta"].values()
                    )
                ),
                None,
            )

        with self.changed:
            answer = self.changed.wait_for(found, PATIENCE)
        if answer is None:
            raise SystemExit(f"no answer to {request_id}")
        return answer


DEMO = ["reference_server.py", "--step-seconds", "0.01"]
FIXTURES = ["tests/official/conformance_server.py", "--page-size", "3"]


@contextmanager
def over_http(server_command: list[str]) -> Iterator[tuple[Seen, Ask, Callable[[bytes], None]]]:
    """A server in a process; its open subscriptions end with it."""
    seen, threads = Seen(), []
    with HttpProcess(*server_command) as server:
        port = int(server.url.split(":")[2].split("/")[0])

        def exchange(data: bytes) -> None:
            with Connection(port) as connection:
                connection.send(data)
                if connection.head()[1].get("content-type") == "text/event-stream":
                    for event in connection.events():
                        seen.add(event)
                else:
                    body = connection.buffer or connection.read_to_end()
                    seen.add(*([json.loads(body)] if body.startswith(b"{") else []))

        def ask(method: str, params: Json, **metadata: Any) -> Json:
            request = seen.request(method, params, **metadata)
            mirrored = (
                {"Mcp_Param_Region": params["arguments"]["region"]} if params.get("name") == "execute_sql" else {}
            )
            threads.append(threading.Thread(target=exchange, args=(octets(request, **mirrored),)))
            threads[-1].start()
            return seen.first_for(request["id"])

        yield seen, ask, lambda data: exchange(octets(data))
        for fields in ({"Mcp_Method": "tools/list"}, {"Mcp_Method": None}, {"MCP_Protocol_Version": "2025-11-25"}):
            exchange(octets(message("server/discover", {}), **fields))
    for thread in threads:
        thread.join(PATIENCE)


@contextmanager
def over_stdio(server_command: list[str]) -> Iterator[tuple[Seen, Ask, Callable[[bytes], None]]]:
    """A server as a child; everything that it writes to its standard output is a message."""
    seen = Seen()
    command = [sys.executable, *server_command, "--stdio"]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdin and child.stdout
    reader = threading.Thread(target=lambda: [seen.add(json.loads(line)) for line in child.stdout])
    reader.start()

    def send(line: bytes) -> None:
        child.stdin.write(line + b"\n")
        child.stdin.flush()

    def ask(method: str, params: Json, **metadata: Any) -> Json:
        request = seen.request(method, params, **metadata)
        send(json.dumps(request).encode())
        return seen.first_for(request["id"])

    try:
        yield seen, ask, send
    finally:
        child.stdin.close()
        reader.join(PATIENCE)
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
        child.kill()
        child.stdout.close()


# ------------------------------------------------------------------------------------- what it must look like

RESULTS = {
    "server/discover": "Discover",
    "tools/list": "ListTools",
    "tools/call": "CallTool",
    "prompts/list": "ListPrompts",
    "prompts/get": "GetPrompt",
    "resources/list": "ListResources",
    "resources/templates/list": "ListResourceTemplates",
    "resources/read": "ReadResource",
    "completion/complete": "Complete",
    "subscriptions/listen": "SubscriptionsListen",
}
NOTIFICATIONS = {
    "progress": "Progress",
    "message": "LoggingMessage",
    "cancelled": "Cancelled",
    "subscriptions/acknowledged": "SubscriptionsAcknowledged",
    "resources/updated": "ResourceUpdated",
    "tools/list_changed": "ToolListChanged",
    "prompts/list_changed": "PromptListChanged",
    "resources/list_changed": "ResourceListChanged",
    "tasks": "JSONRPC",
}
ERRORS = {
    -32700: "ParseError",
    -32600: "InvalidRequestError",
    -32601: "MethodNotFoundError",
    -32602: "InvalidParamsError",
    -32603: "InternalError",
    -32020: "HeaderMismatchError",
    -32021: "MissingRequiredClientCapabilityError",
    -32022: "UnsupportedProtocolVersionError",
}


def parts(one: Json, methods: dict[Any, str]) -> Iterator[tuple[str, Any]]:
    """The types that a message, and what it holds, must conform to."""
    yield "JSONRPCMessage", one
    if "method" in one:
        yield NOTIFICATIONS[one["method"].removeprefix("notifications/")] + "Notification", one
        yield from task_parts(one["params"])
    elif "error" in one:
        yield "JSONRPCErrorResponse", one
        name = ERRORS[one["error"]["code"]]
        yield name, one if one["error"]["code"] > -32100 else one["error"]
    else:
        method, result = methods[one["id"]], one["result"]
        if result["resultType"] == "complete" and method in RESULTS:
            yield RESULTS[method] + "ResultResponse", one
            yield RESULTS[method] + "Result", result
        elif result["resultType"] == "input_required":
            yield "InputRequiredResult", result
        else:
            yield "Result", result
            yield from task_parts(result)


def task_parts(task: Json) -> Iterator[tuple[str, Any]]:
    """What a task holds: its result, its error, its open questions. The task itself is no part of the core schema."""
    if "taskId" in task:
        for member, name in (("result", "CallToolResult"), ("error", "Error"), ("inputRequests", "InputRequests")):
            if member in task:
                yield name, task[member]


def validate(schema: Json, seen: Seen) -> tuple[Counter[str], list[str]]:
    """How many of each type there were, and what was wrong with which."""
    from jsonschema import Draft202012Validator  # from the script's own environment

    counts: Counter[str] = Counter()
    problems = []
    validators: dict[str, Any] = {}
    for one in seen.messages:
        for name, value in parts(one, seen.methods):
            if name not in validators:
                validators[name] = Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schema["$defs"]})
            counts[name] += 1
            problems += [
                f"{name}: {error.json_path} {error.message[:200]} in {json.dumps(value)[:300]}"
                for error in validators[name].iter_errors(value)
            ]
    unanswered = seen.methods.keys() - {one.get("id") for one in seen.messages}
    return counts, problems + [f"no response to {request_id}" for request_id in sorted(unanswered)]


def main() -> int:
    """Runs itself in an environment with jsonschema; then talks, and compares."""
    python = install_python("validate", "jsonschema==4.25.1") / "bin/python"
    if Path(sys.prefix).resolve() != python.parents[1].resolve():
        return subprocess.run([python, __file__, *sys.argv[1:]], env=os.environ, check=False).returncode
    schema = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else SCHEMA).read_text())
    total, failures = {}, []
    for name, transport in (("HTTP", over_http), ("stdio", over_stdio)):
        total[name] = Counter()
        for command, steps in ((DEMO, walk), (FIXTURES, walk_everything)):
            with transport(command) as (seen, ask, send):
                steps(ask)
                for data in BROKEN:
                    send(data)
            counts, problems = validate(schema, seen)
            total[name] += counts
            failures += [f"{name}, {command[0]}: {problem}" for problem in problems]
            print(f"{name}, {command[0]}: {len(seen.messages)} messages, {len(problems)} problems")
    for kind in sorted(total["HTTP"].keys() | total["stdio"].keys()):
        print(f"  {kind:44}{total['HTTP'][kind]:6}{total['stdio'][kind]:6}")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
