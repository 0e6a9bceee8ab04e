"""One table of walks, taken over Streamable HTTP and over stdio: the protocol is the same on both."""

import contextlib
import json
import os
import re
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from support import PATIENCE, TASKS, eventually, message, running

from reference_server import ADDS, Server, StdioTransport, ToolError, demo_server, elicit, input_required, takes
from sse import LineSplitter

CAPABILITIES = {"extensions": {TASKS: {}}, "elicitation": {"form": {}, "url": {}}}
MAY = {"month": "May"}
Exchange = Callable[..., list[dict[str, Any]]]


def http_exchange(server: Server) -> Iterator[Exchange]:
    """One request, and all the messages that answer it, over HTTP."""
    with running(server) as http, http.connect() as connection:
        yield lambda method, params=None, **more: connection.call(method, params, "alice", **more).messages


def stdio_exchange(server: Server) -> Iterator[Exchange]:
    """The same over a pair of pipes."""
    (source, to_server), (from_server, sink) = os.pipe(), os.pipe()
    serving = threading.Thread(target=StdioTransport(server, source, sink, "alice").serve)
    serving.start()
    lines, received = LineSplitter(1 << 24), []

    def exchange(method: str, params: dict[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
        request = message(method, params, **more)
        os.write(to_server, json.dumps(request).encode() + b"\n")
        messages: list[dict[str, Any]] = []
        while not messages or "id" not in messages[-1]:
            if not received:
                assert select.select([from_server], [], [], PATIENCE)[0], f"no answer to {method}"
                received.extend(lines.feed(os.read(from_server, 65536)))
            messages += [json.loads(line) for line in received]
            received.clear()
        return messages

    try:
        yield exchange
    finally:
        os.close(to_server)
        serving.join(PATIENCE)
        assert not serving.is_alive()
        os.close(sink)
        assert os.read(from_server, 1) == b"", "something was written after the last answer"
        for descriptor in (source, from_server):
            os.close(descriptor)
        server.store.close()


def one_server() -> Server:
    """The demo, and tools for what it does not show."""
    server = demo_server(0)
    server.tool("fails", "Fails.", takes(), annotations=ADDS)(raises(ToolError("for the model")))
    server.tool("crashes", "Has a fault.", takes(), annotations=ADDS)(raises(RuntimeError("for nobody")))
    server.tool("nan", "Returns no JSON.", takes(), annotations=ADDS)(
        lambda arguments, request: {"content": [], "_meta": {"x": float("nan")}}
    )
    server.prompt("asks", "Asks first.")(
        lambda arguments, request: (
            "done" if request.responses else input_required({"q": elicit("?", {"x": {"type": "string"}})}, "s")
        )
    )
    return server


def raises(problem: Exception) -> Callable[..., Any]:
    def fail(arguments: Any, request: Any) -> Any:
        raise problem

    return fail


class Transports(NamedTuple):
    """The same server twice, and how to talk to each."""

    http: Exchange
    stdio: Exchange


@pytest.fixture(scope="module")
def transports() -> Iterator[Transports]:
    both = [contextlib.contextmanager(exchange)(one_server()) for exchange in (http_exchange, stdio_exchange)]
    with both[0] as http, both[1] as stdio:
        yield Transports(http, stdio)


def tool(name: str, arguments: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments or {}, **more}


def finished(ask: Exchange, task: str, *statuses: str) -> list[dict[str, Any]]:
    """tasks/get as soon as the task has one of these statuses."""

    def poll() -> list[dict[str, Any]]:
        return ask("tasks/get", {"taskId": task}, capabilities=CAPABILITIES)

    assert eventually(lambda: poll()[-1]["result"]["status"] in statuses)
    return poll()


# ---- walks of one request: method, params, metadata, and the code of the error (None: a result) ----

COMPLETION = {"ref": {"type": "ref/prompt", "name": "code_review"}, "argument": {"name": "language", "value": "j"}}
SINGLE: list[tuple[str, dict[str, Any] | None, dict[str, Any], int | None]] = [
    ("server/discover", None, {"id": "discover-1"}, None),
    ("server/discover", {"extra": [1]}, {"id": 0}, None),
    ("tools/list", None, {"id": -1}, None),
    ("tools/list", None, {"id": 2**63}, None),
    ("tools/list", {"cursor": "x"}, {}, -32602),
    ("prompts/list", None, {"id": ""}, None),
    ("resources/list", None, {}, None),
    ("resources/templates/list", None, {}, None),
    ("resources/read", {"uri": "app://me/settings"}, {}, None),
    ("resources/read", {"uri": "file:///project/README.md"}, {}, None),
    ("resources/read", {"uri": "file:///project/..%2Fx"}, {}, -32602),
    ("resources/read", {"uri": "file:///project/Ünï\u2028cødé"}, {}, -32602),
    ("prompts/get", {"name": "code_review", "arguments": {"code": "a\nb\r\u2028\u0085"}}, {}, None),
    ("prompts/get", {"name": "code_review"}, {}, -32602),
    ("prompts/get", {"name": "asks"}, {"capabilities": CAPABILITIES}, None),
    ("prompts/get", {"name": "asks"}, {}, -32021),
    ("completion/complete", COMPLETION, {}, None),
    ("tools/call", tool("get_weather", {"location": "Zürich \U0001f40d"}), {}, None),
    ("tools/call", tool("get_weather_data", {"location": "Oslo"}), {}, None),
    ("tools/call", tool("get_weather", {"location": 1}), {}, None),
    ("tools/call", tool("get_weather"), {"progressToken": 0}, None),
    ("tools/call", tool("book_flight", {"to": "Oslo", "date": "2020-01-01"}), {}, None),
    ("tools/call", tool("search", {"query": "m"}), {}, None),
    ("tools/call", tool("build_report", MAY), {}, None),
    ("tools/call", tool("build_report", MAY), {"progressToken": 0}, None),
    ("tools/call", tool("build_report", MAY), {"progressToken": "t", "log_level": "debug"}, None),
    ("tools/call", tool("build_report", MAY), {"log_level": "info"}, None),
    ("tools/call", tool("build_report", MAY), {"log_level": "loud"}, -32602),
    ("tools/call", tool("build_report", MAY), {"progressToken": 1.5}, -32602),
    ("tools/call", tool("create_repo", {"repo": "mcp"}), {"capabilities": {"elicitation": {}}}, None),
    ("tools/call", tool("create_repo", {"repo": "mcp"}), {}, -32021),
    ("tools/call", tool("connect_billing"), {"capabilities": {"elicitation": {}}}, -32021),
    ("tools/call", tool("create_repo", {"repo": "mcp"}, requestState="x"), {"capabilities": CAPABILITIES}, -32602),
    ("tools/call", tool("create_repo", {"repo": "mcp"}, inputResponses=[]), {"capabilities": CAPABILITIES}, -32602),
    ("tools/call", tool("nothing"), {}, -32602),
    ("tools/call", tool("beta_search", {"query": "x"}), {}, -32602),
    ("tools/call", tool("fails"), {}, None),
    ("tools/call", tool("crashes"), {}, -32603),
    ("tools/call", tool("nan"), {}, -32603),
    ("tools/call", tool("add_to_cart", {"cartId": "nothing", "sku": "x"}), {}, None),
    ("tasks/get", {"taskId": "nothing"}, {"capabilities": CAPABILITIES}, -32602),
    ("tasks/get", {"taskId": "nothing"}, {}, -32021),
    ("tasks/update", {"taskId": "nothing", "inputResponses": {}}, {"capabilities": CAPABILITIES}, -32602),
    ("tasks/cancel", {"taskId": "nothing"}, {}, -32021),
    ("tasks/result", {"taskId": "nothing"}, {"capabilities": CAPABILITIES}, -32601),
    ("subscriptions/listen", {"notifications": {"taskIds": ["x"]}}, {}, -32021),
    ("subscriptions/listen", {"notifications": {"toolsListChanged": 1}}, {}, -32602),
    ("subscriptions/listen", {}, {}, -32602),
    ("initialize", {"protocolVersion": "2025-11-25"}, {}, -32601),
    ("ping", None, {}, -32601),
    ("logging/setLevel", {"level": "info"}, {}, -32601),
    ("unknown/method", None, {}, -32601),
    ("server/discover", None, {"io.modelcontextprotocol/protocolVersion": "1900-01-01"}, -32022),
    ("server/discover", None, {"io.modelcontextprotocol/protocolVersion": "2025-11-25"}, -32022),
    ("initialize", None, {"io.modelcontextprotocol/protocolVersion": "2025-11-25"}, -32022),
]


@pytest.mark.parametrize(("method", "params", "metadata", "code"), SINGLE)
def test_a_request_is_answered_alike(transports, method, params, metadata, code):
    """MUST (Overview › Statelessness): what is needed to process a request is in the request, not in how it came."""
    answers = [scrub(ask(method, params, **metadata)) for ask in transports]
    assert answers[0] == answers[1]
    assert answers[0][-1].get("error", {}).get("code") == code
    expected = metadata.get("id", 1)
    assert all(type(answer[-1]["id"]) is type(expected) and answer[-1]["id"] == expected for answer in answers)


# ---- walks of several requests: each returns all the messages it was answered with ----


def walk_cart(ask):
    cart = ask("tools/call", tool("create_cart"))[-1]["result"]["structuredContent"]["cartId"]
    return [ask("tools/call", tool("add_to_cart", {"cartId": cart, "sku": sku})) for sku in ("a", "b")]


def walk_repository(ask):
    first = ask("tools/call", tool("create_repo", {"repo": "mcp"}), capabilities=CAPABILITIES)
    state = first[-1]["result"]["requestState"]
    return [first] + [
        ask(
            "tools/call",
            tool("create_repo", {"repo": "mcp"}, requestState=state, inputResponses={"github_login": answer}),
            id=2,
            capabilities=CAPABILITIES,
        )
        for answer in (
            {"action": "accept", "content": {"name": "octocat"}},
            {"action": "accept"},
            {"action": "decline"},
            {"action": "later"},
            "x",
        )
    ]


def walk_report(answer):
    def walk(ask):
        created = ask("tools/call", tool("build_report", MAY), progressToken="p", capabilities=CAPABILITIES)
        task = created[-1]["result"]["taskId"]
        asked = finished(ask, task, "input_required")
        updated = ask("tasks/update", {"taskId": task, "inputResponses": {"charts": answer}}, capabilities=CAPABILITIES)
        done = finished(ask, task, "completed")
        late = ask("tasks/cancel", {"taskId": task}, capabilities=CAPABILITIES)
        return [created, asked, updated, done, late, finished(ask, task, "completed")]

    return walk


def walk_cancelled_report(ask):
    task = ask("tools/call", tool("build_report", MAY), capabilities=CAPABILITIES)[-1]["result"]["taskId"]
    finished(ask, task, "input_required")
    return [ask("tasks/cancel", {"taskId": task}, capabilities=CAPABILITIES), finished(ask, task, "cancelled")]


def walk_pages(ask):
    pages = [ask("resources/list")]
    while cursor := pages[-1][-1]["result"].get("nextCursor"):
        pages.append(ask("resources/list", {"cursor": cursor}))
    return pages


def walk_beta(ask):
    return [
        ask(*step)
        for step in [
            ("tools/call", tool("toggle_beta_tool")),
            ("tools/list",),
            ("tools/call", tool("toggle_beta_tool")),
            ("tools/list",),
        ]
    ]


WALKS = {
    "a cart": (walk_cart, ['"items": ["a"]', '"items": ["a", "b"]']),
    "a repository": (walk_repository, ["Created octocat/mcp.", "input_required", "as you wished", "-32602"]),
    "a report with charts": (
        walk_report({"action": "accept", "content": {"charts": True}}),
        ['"task"', "input_required", "with charts"],
    ),
    "a report without": (walk_report({"action": "accept", "content": {"charts": False}}), ["without charts"]),
    "a report for who declines": (walk_report({"action": "decline"}), ["without charts"]),
    "a cancelled report": (walk_cancelled_report, ['"cancelled"']),
    "the pages of a list": (walk_pages, ['"LICENSE"']),
    "a tool that comes and goes": (walk_beta, ["now listed", "now unlisted"]),
}


@pytest.mark.parametrize(("walk", "contains"), WALKS.values(), ids=WALKS.keys())
def test_a_walk_goes_the_same_way(transports, walk, contains):
    """MUST (Overview › Statelessness): handles, states and cursors name what they name on either transport."""
    answers = [scrub(walk(ask)) for ask in transports]
    assert answers[0] == answers[1]
    text = json.dumps(answers[0])
    assert [one for one in contains if one not in text] == []


def test_an_id_may_be_used_again_once_it_is_answered(transports):
    """MUST NOT (Overview › Requests): only ids of requests that have not been answered are taken."""
    for ask in transports:
        for _ in range(200):
            assert ask("completion/complete", COMPLETION, id="again")[-1].get("result")


# what differs from run to run: handles, times, signatures
HANDLES = {"taskId", "cartId", "holdId", "requestState", "createdAt", "lastUpdatedAt", "url"}


def scrub(value: Any) -> Any:
    """The same value with what differs from run to run replaced by its name."""
    if isinstance(value, dict):
        return {
            key: f"<{key}>" if key in HANDLES and isinstance(inner, str) else scrub(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [scrub(inner) for inner in value]
    return re.sub(r"cart_[\w-]{22}", "<cart>", value) if isinstance(value, str) else value


def test_what_is_scrubbed_is_only_what_differs(transports):
    """Choice: the comparison above would be worth nothing if it hid the answers."""
    assert scrub({"taskId": "x", "status": "working", "result": [{"text": "y"}]}) == {
        "taskId": "<taskId>",
        "status": "working",
        "result": [{"text": "y"}],
    }
    answers = [ask("tools/call", tool("create_cart"))[-1]["result"]["structuredContent"] for ask in transports]
    assert answers[0] != answers[1]
