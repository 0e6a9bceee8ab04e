"""The order of checks on a POST: each rung's answer, that nothing was executed, and that the first failure wins.

`spoil` functions break one rule of a request that keeps them all, so that any two can be broken at once.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from support import META, VERSION, Lines, Reply, Running, running

from reference_server import SUPPORTED_VERSIONS, TASKS, Request, Server, takes

ALLOWED = "https://app.example"
MAX_BODY = 8192
VERSION_KEY, CAPABILITIES_KEY = META  # the two members that every request must have


class Spy(Server):
    """A server whose every function records that it ran."""

    def __init__(self) -> None:
        super().__init__("spy", "1.0.0", page_size=1)
        self.calls: list[str] = []
        region = {"type": "string", "x-mcp-header": "Region"}
        self.tool("spy", "Records its call.", takes({"region": region}))(self.record)
        self.tool("asks", "Needs a form.", takes())(self.needs_a_form)
        self.resource("test://a", "a")(lambda uri, request: self.record({}, request))
        self.resource("test://b", "b")(lambda uri, request: self.record({}, request))
        self.prompt("greet", "A greeting.")(self.record)

    def record(self, arguments: dict[str, Any], request: Request) -> str:
        """Any tool, resource or prompt."""
        self.calls.append(request.method)
        return "done"

    def needs_a_form(self, arguments: dict[str, Any], request: Request) -> str:
        """A tool that cannot do without a capability of its client's."""
        request.require({"elicitation": {"form": {}}})
        return self.record(arguments, request)


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for all; its limit for a message is small."""
    with running(Spy(), allow_origins=[ALLOWED], max_body=MAX_BODY) as run:
        yield run


@pytest.fixture
def run(shared: Running) -> Running:
    """The shared server, which has forgotten its calls."""
    calls(shared).clear()
    return shared


def calls(run: Running) -> list[str]:
    """What was executed."""
    assert isinstance(run.server, Spy)
    return run.server.calls


class Draft:
    """A request that breaks no rule, before it becomes octets."""

    def __init__(self) -> None:
        self.verb, self.target, self.version = "POST", "/mcp", "HTTP/1.1"
        self.lines: list[tuple[str, str]] = [
            ("Host", "127.0.0.1:3000"), ("Content-Type", "application/json"),
            ("Accept", "application/json, text/event-stream"), ("MCP-Protocol-Version", VERSION),
            ("Mcp-Method", "tools/call"), ("Mcp-Name", "spy"), ("Mcp-Param-Region", "eu")]
        self.params: dict[str, Any] = {"name": "spy", "arguments": {"region": "eu"}, "_meta": dict(META)}
        self.message: dict[str, Any] = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": self.params}
        self.body: bytes | None = None  # instead of the message
        self.length = True

    def drop(self, name: str) -> None:
        """Leaves out a field."""
        self.lines = [line for line in self.lines if line[0].lower() != name.lower()]

    def put(self, name: str, *values: str) -> None:
        """Sets a field, in as many lines as there are values."""
        self.drop(name)
        self.lines += [(name, value) for value in values]

    def has(self, name: str, value: str) -> bool:
        """Whether there is such a field line."""
        return (name, value) in self.lines

    def name(self, method: str, member: str, value: str, header: str | None = None) -> None:
        """Makes it another named request; the header says the same unless it is given."""
        self.message["method"] = method
        self.params[member] = value
        self.put("Mcp-Method", method)
        self.put("Mcp-Name", value if header is None else header)

    def octets(self) -> bytes:
        """What goes over the wire."""
        body = json.dumps(self.message).encode() if self.body is None else self.body
        lines = [*self.lines, ("Content-Length", str(len(body)))] if self.length else self.lines
        head = [f"{self.verb} {self.target} {self.version}", *(f"{name}: {value}" for name, value in lines), "", ""]
        return "\r\n".join(head).encode("latin-1") + body


Spoil = Callable[[Draft], object]


class Row(NamedTuple):
    """One way to fail on a rung, and the answer. code: None for no JSON-RPC error; id: None for none."""

    rung: int
    what: str
    spoil: Spoil
    status: int
    code: int | None = None
    id: Any = None
    says: str = ""  # what the message names


def field(name: str, *values: str) -> Spoil:
    """Sets a field."""
    return lambda draft: draft.put(name, *values)


def without(name: str) -> Spoil:
    """Leaves out a field."""
    return lambda draft: draft.drop(name)


def member(**members: Any) -> Spoil:
    """Sets members of the message."""
    return lambda draft: draft.message.update(members)


def param(**members: Any) -> Spoil:
    """Sets members of the params."""
    return lambda draft: draft.params.update(members)


def meta(**members: Any) -> Spoil:
    """Sets members of `_meta`, by the last part of their names; None leaves one out."""
    def spoil(draft: Draft) -> None:
        for name, value in members.items():
            key = name if name == "progressToken" else f"io.modelcontextprotocol/{name}"
            draft.params["_meta"].pop(key, None)
            if value is not None:
                draft.params["_meta"][key] = value
    return spoil


def body(octets: bytes) -> Spoil:
    """Sends this instead of a message."""
    return lambda draft: setattr(draft, "body", octets)


def named(method: str, member: str, value: str, header: str | None = None) -> Spoil:
    """Makes it another named request."""
    return lambda draft: draft.name(method, member, value, header)


def unfinished(draft: Draft) -> None:
    """Cuts the last octet off the JSON text."""
    draft.body = json.dumps(draft.message).encode()[:-1]


def two_names(draft: Draft) -> None:
    """Gives one member twice."""
    draft.body = json.dumps(draft.message).encode().replace(b'{"jsonrpc"', b'{"id": 8, "jsonrpc"')


def notification(draft: Draft) -> None:
    """Takes the id away."""
    draft.message.pop("id", None)


def old_version(draft: Draft) -> None:
    """Asks for another version, in body and header alike."""
    meta(protocolVersion="2025-11-25")(draft)
    draft.put("MCP-Protocol-Version", "2025-11-25")


def unknown_method(draft: Draft) -> None:
    """Calls what is not there."""
    draft.message["method"] = "tools/fly"
    draft.put("Mcp-Method", "tools/fly")


def repeated(name: str) -> Spoil:
    """Sends a second line of a field, with another value."""
    return lambda draft: draft.lines.append((name, "other"))


def start_line(line: str) -> Spoil:
    """Sets verb, request-target and version."""
    def spoil(draft: Draft) -> None:
        draft.verb, draft.target, draft.version = line.split(" ")
    return spoil


def no_length(draft: Draft) -> None:
    """Says nothing about the body."""
    draft.length = False
    draft.body = b""


def length(value: str) -> Spoil:
    """Says this about the body's length."""
    def spoil(draft: Draft) -> None:
        draft.put("Content-Length", value)
        draft.length = False
    return spoil


def coding(value: str, beside_length: bool = False) -> Spoil:
    """Says that the body has a transfer coding."""
    def spoil(draft: Draft) -> None:
        draft.put("Transfer-Encoding", value)
        draft.length = beside_length
    return spoil


def broken_chunks(draft: Draft) -> None:
    """Announces chunks and sends none."""
    coding("chunked")(draft)
    draft.body = b"nothing hexadecimal\r\n"


MISSING_TASKS = {"extensions": {TASKS: {}}}
NOT_LOCAL = ["http://evil.example", "null", "", "http://localhost.evil.example", "http://127.0.0.1:3000/x", "file://",
             "http://127.0.0.1:99999", "https://app.example.evil"]
ROWS = [
    # 1: HTTP framing
    Row(1, "no Host", without("Host"), 400),
    Row(1, "two Hosts", field("Host", "127.0.0.1", "127.0.0.1"), 400),
    Row(1, "a Host that is none", field("Host", "127.0.0.1:80a"), 400),
    Row(1, "white space before the colon", field("X ", "1"), 400),
    Row(1, "no colon", lambda draft: draft.lines.append(("X\r\nno colon\r\nY", "1")), 400),
    Row(1, "a bare CR", field("X", "1\rMcp-Name: spy"), 400),
    Row(1, "a folded line", field("X", "1\r\n 2"), 400),
    Row(1, "a length with a sign", length("+7"), 400),
    Row(1, "two lengths", lambda draft: draft.lines.append(("Content-Length", "7")), 400),
    Row(1, "length and coding", coding("chunked", beside_length=True), 400),
    Row(1, "broken chunks", broken_chunks, 400),
    Row(1, "a message without length", no_length, 411),
    Row(1, "a message that is too large", param(x="x" * MAX_BODY), 413),
    Row(1, "a length that is too large", length(str(MAX_BODY + 1)), 413),
    Row(1, "a request line that is too long", lambda draft: setattr(draft, "target", "/mcp?" + "x" * 8192), 414),
    Row(1, "an unknown expectation", field("Expect", "tea"), 417),
    Row(1, "a field line that is too long", field("X", "x" * 8192), 431),
    Row(1, "too many fields", field("X", *["1"] * 64), 431),
    Row(1, "an unknown coding", coding("gzip"), 501),
    Row(1, "another major version", start_line("POST /mcp HTTP/2.0"), 505),
    # 2: Origin, and the Host that goes with it
    *[Row(2, f"Origin {origin!r}", field("Origin", origin), 403) for origin in NOT_LOCAL],
    Row(2, "two Origins", field("Origin", "http://localhost", ALLOWED), 403),
    Row(2, "Host is a foreign name", field("Host", "evil.example"), 403),
    # 3: path
    *[Row(3, target, start_line(f"POST {target} HTTP/1.1"), 404, says="/mcp")
      for target in ("/", "/mcp/", "/mcpx", "/MCP", "//mcp", "/x/../mcp", "/healthz", "http://127.0.0.1/other", "*")],
    # 4: verb
    *[Row(4, verb, start_line(f"{verb} /mcp HTTP/1.1"), 405, says="POST")
      for verb in ("GET", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "post", "BREW")],
    # 5: Content-Type
    *[Row(5, f"Content-Type {value!r}", field("Content-Type", value), 415) for value in (
        "text/plain", "", "application/jsonp", "text/plain; a=application/json", "application/json; charset=utf-16")],
    Row(5, "no Content-Type", without("Content-Type"), 415),
    Row(5, "two Content-Types", field("Content-Type", "application/json", "application/json"), 415),
    *[Row(5, f"Content-Encoding {values!r}", field("Content-Encoding", *values), 415, says="Content-Encoding")
      for values in (["gzip"], ["br"], ["x-gzip"], ["identity, gzip"], ["identity", "deflate"], ["gzip;q=0"])],
    # 6: Accept
    *[Row(6, f"Accept {value!r}", field("Accept", value), 406) for value in (
        "application/json", "text/event-stream", "", "text/*", "*/*;q=0", "*/*, text/event-stream;q=0", "text/html")],
    Row(6, "no Accept", without("Accept"), 406),
    # 7: Authorization
    *[Row(7, f"Authorization {value!r}", field("Authorization", value), 401) for value in (
        "Basic YTpi", "Bearer", "Bearer ", "Bearer a b", "alice")],
    Row(7, "two Authorizations", field("Authorization", "Bearer alice", "Bearer bob"), 401),
    # 8: JSON text
    *[Row(8, what, body(octets), 400, -32700) for what, octets in {
        "nothing": b"", "white space": b" \r\n", "no UTF-8": b'{"a": "\xff"}', "UTF-16": '{"id": 1}'.encode("utf-16"),
        "NaN": b'{"id": NaN}', "-Infinity": b'{"id": -Infinity}', "a number past all limits": b'{"id": 1e999}',
        "an integer past the parser's limits": b'{"id": ' + b"1" * 5000 + b"}",
        "nesting past the parser's limits": b"[" * 2000 + b"]" * 2000, "two texts": b"{} {}",
    }.items()],
    Row(8, "an unfinished text", unfinished, 400, -32700),
    Row(8, "a member name twice", two_names, 400, -32700),
    # 9: one request or notification
    *[Row(9, what, body(octets), 400, -32600) for what, octets in {
        "an array": b'[{"jsonrpc": "2.0", "id": 7, "method": "tools/list"}]', "an empty array": b"[]", "a text": b'"x"',
        "null": b"null", "a number": b"1"}.items()],
    Row(9, "a response", body(b'{"jsonrpc": "2.0", "id": 7, "result": {}}'), 400, -32600, 7),
    Row(9, "an error response", body(b'{"jsonrpc": "2.0", "id": 7, "error": {}}'), 400, -32600, 7),
    Row(9, "a request with a result", member(result={}), 400, -32600, 7),
    Row(9, "a request with an error", member(error={}), 400, -32600, 7),
    *[Row(9, f"jsonrpc {value!r}", member(jsonrpc=value), 400, -32600, 7) for value in ("1.0", 2.0, None, ["2.0"])],
    *[Row(9, f"id {value!r}", member(id=value), 400, -32600) for value in (None, 1.5, 1.0, True, [], {})],
    *[Row(9, f"method {value!r}", member(method=value), 400, -32600, 7) for value in (None, 1, ["tools/call"])],
    *[Row(9, f"params {value!r}", member(params=value), 400, -32600, 7) for value in (None, [], "x", 0)],
    # 10: a notification; the mirrored headers that it has must agree
    Row(10, "a notification", notification, 202),
    # 11: what must be there, before the metadata is looked at
    Row(11, "no MCP-Protocol-Version", without("MCP-Protocol-Version"), 400, -32020, 7, "MCP-Protocol-Version"),
    Row(11, "an empty MCP-Protocol-Version", field("MCP-Protocol-Version", ""), 400, -32020, 7, "MCP-Protocol-Version"),
    Row(11, "two MCP-Protocol-Versions", repeated("MCP-Protocol-Version"), 400, -32020, 7, "MCP-Protocol-Version"),
    Row(11, "no Mcp-Method", without("Mcp-Method"), 400, -32020, 7, "Mcp-Method"),
    Row(11, "two Mcp-Methods", repeated("Mcp-Method"), 400, -32020, 7, "Mcp-Method"),
    Row(11, "another Mcp-Method", field("Mcp-Method", "tools/list"), 400, -32020, 7, "Mcp-Method"),
    Row(11, "Mcp-Method in other case", field("Mcp-Method", "Tools/Call"), 400, -32020, 7, "Mcp-Method"),
    *[Row(11, f"{name} with {value!r}", field(name, value), 400, -32020, 7, name) for name, value in (
        ("Mcp-Method", "tools/call\x01"), ("Mcp-Method", "\x1btools/call"), ("MCP-Protocol-Version", "\x7f"))],
    # 12: metadata
    Row(12, "no params", lambda draft: draft.message.pop("params"), 400, -32602, 7, "_meta"),
    Row(12, "no _meta", lambda draft: draft.params.pop("_meta"), 400, -32602, 7, "_meta"),
    Row(12, "_meta is no object", param(_meta=[]), 400, -32602, 7, "_meta"),
    Row(12, "no protocolVersion", meta(protocolVersion=None), 400, -32602, 7, "protocolVersion"),
    Row(12, "protocolVersion is no text", meta(protocolVersion=20260728), 400, -32602, 7, "protocolVersion"),
    Row(12, "no clientCapabilities", meta(clientCapabilities=None), 400, -32602, 7, "clientCapabilities"),
    *[Row(12, f"clientCapabilities {value!r}", meta(clientCapabilities=value), 400, -32602, 7, "clientCapabilities")
      for value in ([], "x", True)],
    Row(12, "clientInfo without version", meta(clientInfo={"name": "x"}), 400, -32602, 7, "clientInfo"),
    Row(12, "a log level that is none", meta(logLevel="loud"), 400, -32602, 7, "logLevel"),
    *[Row(12, f"progressToken {value!r}", meta(progressToken=value), 400, -32602, 7, "progressToken")
      for value in (1.5, True, [])],
    # 13: the version in header and metadata
    Row(13, "the header names another version", field("MCP-Protocol-Version", "2025-06-18"), 400, -32020, 7,
        "MCP-Protocol-Version"),
    # 14: a version that is served
    Row(14, "an older version", old_version, 400, -32022, 7, VERSION),
    # 15: a method that exists
    Row(15, "an unknown method", unknown_method, 404, -32601, 7, "tools/fly"),
    *[Row(15, f"{method}, which this revision has not", named(method, "x", ""), 404, -32601, 7, method)
      for method in ("ping", "logging/setLevel", "resources/subscribe", "initialize")],
    # 16: Mcp-Name
    Row(16, "another Mcp-Name", field("Mcp-Name", "other"), 400, -32020, 7, "Mcp-Name"),
    Row(16, "no Mcp-Name", without("Mcp-Name"), 400, -32020, 7, "Mcp-Name"),
    Row(16, "two Mcp-Names", repeated("Mcp-Name"), 400, -32020, 7, "Mcp-Name"),
    Row(16, "Mcp-Name in broken base64", field("Mcp-Name", "=?base64?c3B5=?="), 400, -32020, 7, "Mcp-Name"),
    *[Row(16, f"Mcp-Name with {chr(octet)!r}", field("Mcp-Name", f"s{chr(octet)}py"), 400, -32020, 7, "Mcp-Name")
      for octet in (*range(1, 9), 11, 12, *range(14, 32), 127)],
    Row(16, "no name in the body", lambda draft: draft.params.pop("name"), 400, -32020, 7, "Mcp-Name"),
    Row(16, "a name that is no text", param(name=1), 400, -32020, 7, "Mcp-Name"),
    *[Row(16, method, named(method, source, "x", header="y"), 400, -32020, 7, "Mcp-Name") for method, source in (
        ("prompts/get", "name"), ("resources/read", "uri"), ("tasks/get", "taskId"), ("tasks/update", "taskId"),
        ("tasks/cancel", "taskId"))],
    # 17: what the method needs
    *[Row(17, f"{method} without the extension", named(method, "taskId", "x"), 400, -32021, 7)
      for method in ("tasks/get", "tasks/update", "tasks/cancel")],
    Row(17, "another Mcp-Param", field("Mcp-Param-Region", "us"), 400, -32020, 7, "Mcp-Param-Region"),
    Row(17, "no Mcp-Param", without("Mcp-Param-Region"), 400, -32020, 7, "Mcp-Param-Region"),
    Row(17, "Mcp-Param with a control", field("Mcp-Param-Region", "e\x0bu"), 400, -32020, 7, "Mcp-Param-Region"),
    Row(17, "Mcp-Param without a value", param(arguments={}), 400, -32020, 7, "Mcp-Param-Region"),
    Row(17, "a forged requestState", param(requestState="AAAA"), 400, -32602, 7, "requestState"),
    Row(17, "a capability that is missing", named("tools/call", "name", "asks"), 400, -32021, 7),
    # 18: what the method finds
    Row(18, "an unknown tool", named("tools/call", "name", "nobody"), 200, -32602, 7, "nobody"),
    Row(18, "an unknown prompt", named("prompts/get", "name", "nobody"), 200, -32602, 7, "nobody"),
    Row(18, "an unknown resource", named("resources/read", "uri", "test://z"), 200, -32602, 7),
    Row(18, "an unknown cursor", named("resources/list", "cursor", "zzz"), 200, -32602, 7, "cursor"),
]


def spoiled(*spoils: Spoil) -> Draft:
    """A request that breaks these rules."""
    draft = Draft()
    for spoil in spoils:
        spoil(draft)
    return draft


def assert_answers(row: Row, reply: Reply) -> None:
    """The reply is the row's: status, code, id, what it says, and a form that suits them."""
    assert reply.status == row.status, reply.body
    assert reply.ended
    if row.status == 202:
        assert reply.body == b"" and "content-type" not in reply.fields
    elif row.code is not None:
        assert reply.fields["content-type"] == "application/json"
        error = reply.message["error"]
        assert (error["code"], reply.message.get("id"), "id" in reply.message) == (row.code, row.id, row.id is not None)
        assert row.says in error["message"]
    elif row.status in (404, 405):  # what a browser may show its user
        assert reply.fields["content-type"] == "text/plain; charset=utf-8"
        assert row.says in reply.body.decode() and reply.body.count(b"\n") == 1
    else:  # choice: what HTTP refuses has no JSON-RPC code, because it got no further than HTTP
        assert reply.fields["content-type"] == "application/json"
        assert list(reply.message) == ["error"] and list(reply.message["error"]) == ["message"]
    assert (row.rung == 1) <= (reply.fields.get("connection") == "close")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.rung}: {row.what}")
def test_each_rung_has_its_answer_and_nothing_is_executed(run: Running, row: Row) -> None:
    """MUST (Streamable HTTP › Server Validation): status, code and id of each check's refusal, on literal octets."""
    with run.connect() as client:
        client.send(spoiled(row.spoil).octets())
        assert_answers(row, client.reply())
        if row.rung == 1:
            assert client.ended(), "what breaks HTTP's framing ends the connection"
    assert calls(run) == []


def test_every_rung_is_in_the_table() -> None:
    """Choice: the ladder has eighteen rungs."""
    assert [rung for rung, _ in itertools.groupby(row.rung for row in ROWS)] == list(range(1, 19))


def test_a_request_that_breaks_no_rung_is_executed_once(run: Running) -> None:
    """MUST (Streamable HTTP › Sending Messages): the request that all others here are spoiled from is served."""
    reply = run.exchange(Draft().octets())
    assert (reply.status, reply.message["id"], reply.message["result"]["resultType"]) == (200, 7, "complete")
    assert calls(run) == ["tools/call"]


# One row stands for each rung here; of 17 and 18, those that can be broken beside each other.
def first_row(rung: int, what: str = "") -> Row:
    """The rung's first row, or the one of this name."""
    return next(row for row in ROWS if row.rung == rung and what in row.what)


CHOSEN = {1: "a length with a sign", 4: "PUT", 8: "an unfinished", 9: "jsonrpc '1.0'", 12: "no clientCapabilities",
          17: "a forged"}
PAIRS = [(first_row(early, CHOSEN.get(early, "")), first_row(late, CHOSEN.get(late, "")))
         for early, late in itertools.combinations(range(1, 19), 2)]


@pytest.mark.parametrize(("early", "late"), [
    pytest.param(early, late, id=f"{early.rung} before {late.rung}") for early, late in PAIRS
    if (early.rung, late.rung) not in {(10, 13), (10, 16)}])  # whose headers do not agree: see notifications
def test_of_two_broken_rungs_the_earlier_one_answers(run: Running, early: Row, late: Row) -> None:
    """Choice: the order of checks is part of the contract, so the first failure is the answer."""
    without_id = early.rung == 9 and late.rung == 10
    reply = run.exchange(spoiled(late.spoil, early.spoil).octets())
    assert_answers(early._replace(id=None) if without_id else early, reply)
    assert calls(run) == []


@pytest.mark.parametrize(("early", "late"), [
    (first_row(17, "tasks/get without"), field("Mcp-Param-Region", "us")),
    (first_row(17, "another Mcp-Param"), param(requestState="AAAA")),
    (first_row(17, "a forged"), named("tools/call", "name", "asks")),
    (first_row(17, "another Mcp-Param"), param(requestState=5)),
    (first_row(17, "no Mcp-Param"), param(arguments={"region": "eu", "more": []})),
    (first_row(17, "a forged"), named("prompts/get", "name", "nobody")),
    (first_row(17, "a forged"), named("resources/read", "uri", "test://z")),
], ids=["extension before header", "header before state", "state before capability", "header before the state's type",
        "header before the schema", "state before the prompt", "state before the resource"])
def test_the_seventeenth_rung_has_an_order_of_its_own(run: Running, early: Row, late: Spoil) -> None:
    """Choice: the tasks extension, then Mcp-Param, then requestState, then what the tool needs of its client."""
    assert_answers(early, run.exchange(spoiled(late, early.spoil).octets()))
    assert calls(run) == []


def test_a_missing_capability_is_named_as_an_object(run: Running) -> None:
    """MUST (Overview › _meta): -32021 says in `requiredCapabilities` what the client would have to declare."""
    for row, wanted in ((first_row(17, "tasks/get"), MISSING_TASKS),
                        (first_row(17, "a capability"), {"elicitation": {"form": {}}})):
        error = run.exchange(spoiled(row.spoil).octets()).message["error"]
        assert error["data"]["requiredCapabilities"] == wanted


def test_an_unsupported_version_is_told_what_is_supported(run: Running) -> None:
    """MUST (Versioning and Compatibility › Protocol Version Negotiation): the error lists the supported versions."""
    error = run.exchange(spoiled(old_version).octets()).message["error"]
    assert error["data"] == {"supported": [VERSION], "requested": "2025-11-25"}


# --------------------------------------------------------------------------------------- notifications, old clients


@pytest.mark.parametrize("spoil", [
    field("Mcp-Method", "tools/list"), field("MCP-Protocol-Version", "2025-06-18"), field("Mcp-Name", "other"),
    repeated("Mcp-Method"), repeated("Mcp-Name")], ids=["method", "version", "name", "two methods", "two names"])
def test_a_mirrored_header_of_a_notification_must_agree(run: Running, spoil: Spoil) -> None:
    """MUST (Streamable HTTP › Server Validation): headers that are present are compared, also without an id."""
    row = Row(10, "", spoil, 400, -32020, None, "header")
    assert_answers(row, run.exchange(spoiled(notification, spoil).octets()))


@pytest.mark.parametrize("method", [
    "notifications/cancelled", "notifications/initialized", "notifications/x", "tools/call"])
def test_a_notification_needs_no_metadata_and_no_mirrored_headers(run: Running, method: str) -> None:
    """MUST (Streamable HTTP › Sending Messages): 202 with no body, whatever it is; and nothing is done."""
    draft = spoiled(notification, member(method=method, params={"requestId": 7}), *map(without, (
        "MCP-Protocol-Version", "Mcp-Method", "Mcp-Name", "Mcp-Param-Region")))
    assert_answers(first_row(10), run.exchange(draft.octets()))
    assert calls(run) == []


INITIALIZE = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "old", "version": "1"}}


@pytest.mark.parametrize("lines", [[], [("MCP-Protocol-Version", "2025-06-18")], [("Mcp-Session-Id", "abc")]],
                         ids=["no header", "its version", "a session id"])
def test_initialize_from_an_old_client_is_told_which_version_is_spoken_here(
        run: Running, lines: list[tuple[str, str]]) -> None:
    """SHOULD (Versioning and Compatibility › Backward Compatibility with Initialization-Based Versions): name them."""
    draft = spoiled(member(id="old-1", method="initialize", params=INITIALIZE))
    draft.lines = draft.lines[:3] + lines
    reply = run.exchange(draft.octets())
    assert (reply.status, reply.message["id"], reply.message["error"]["code"]) == (400, "old-1", -32020)
    assert all(version in reply.message["error"]["message"] for version in SUPPORTED_VERSIONS)
    assert "mcp-session-id" not in reply.fields


# ---------------------------------------------------------------------------------------------------- other verbs


@pytest.mark.parametrize("verb", ["GET", "DELETE", "PUT", "PATCH", "HEAD", "BREW"])
def test_other_verbs_are_told_in_one_sentence_what_to_do_instead(run: Running, verb: str) -> None:
    """SHOULD (Streamable HTTP › Earlier Streamable HTTP Revisions): 405 for GET and DELETE; the connection goes on."""
    with run.connect() as client:
        client.send(f"{verb} /mcp HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
        status, fields = client.head()
        assert (status, fields["content-type"]) == (405, "text/plain; charset=utf-8")
        # rfc9110 §15.5.6: MUST generate an Allow field
        assert {one.strip() for one in fields["allow"].split(",")} == {"POST", "OPTIONS"}
        size = int(fields["content-length"])
        if verb != "HEAD":  # rfc9110 §9.3.2: MUST NOT send content
            text = client.read_until(b"\n").decode()
            assert len(text.encode()) == size and re.fullmatch(r"[A-Z][^\n]+\.\n", text) and "POST" in text
        client.send(Draft().octets())
        assert client.reply().status == 200


@pytest.mark.parametrize(("target", "verb", "status"), [
    ("/healthz", "GET", 200), ("/healthz?x=1", "GET", 200), ("/healthz", "POST", 404), ("/healthz/", "GET", 404),
    ("/", "GET", 404), ("/favicon.ico", "GET", 404), ("/.well-known/oauth-protected-resource", "GET", 404)])
def test_health_is_told_at_one_place(run: Running, target: str, verb: str, status: int) -> None:
    """Choice: GET /healthz answers `ok`; whatever is not there is a 404 in plain text."""
    reply = run.exchange(f"{verb} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
    assert reply.status == status
    assert reply.fields["content-type"].startswith("text/plain")
    assert (reply.body == b"ok\n") == (status == 200)


@pytest.mark.parametrize("target", [
    "/healthz", "/healthz?x=1", "http://localhost/healthz", "HTTP://127.0.0.1:80/healthz"])
def test_health_is_told_to_whoever_asks_in_whatever_legal_way(run: Running, target: str) -> None:
    """RFC 9110 §9.3.2: HEAD is GET without the body; RFC 9112 §3.2.2: absolute-form is origin-form with the host."""
    answers = []
    for verb in ("GET", "HEAD"):
        for lines in ("", "Content-Length: 0\r\n", "Expect: 100-continue\r\n", "Origin: http://localhost\r\n"):
            with run.connect() as client:
                client.send(f"{verb} {target} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
                status, fields = client.head()
                assert (status, fields["content-length"], fields["content-type"]) == (200, "3", "text/plain")
                if verb == "GET":
                    assert client.read_until(b"ok\n") == b"ok\n"
                client.send(Draft().octets())  # the next answer begins where it should
                assert client.head()[0] == 200
        answers.append((status, {name: value for name, value in fields.items() if name != "date"}))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("target", "host", "status"), [
    ("http://evil.example/mcp", "127.0.0.1", 403), ("http://127.0.0.1/mcp", "evil.example", 200),
    ("HTTP://EVIL.example:80/mcp", "localhost", 403), ("https://evil.example/mcp", "localhost", 403),
    ("http://app.example/mcp", "evil.example", 200), ("http:///mcp", "127.0.0.1", 400), ("http://", "localhost", 400),
    ("http://a@127.0.0.1/mcp", "localhost", 400), ("http://127.0.0.1:x/mcp", "localhost", 400),
    ("http://127.0.0.1:99999/mcp", "localhost", 400), ("http://[::1/mcp", "localhost", 400),
    ("http://[::g]/mcp", "localhost", 400), ("http://127.0.0.1,evil.example/mcp", "localhost", 403),
    ("http://localhost", "localhost", 404), ("http://localhost?x", "localhost", 404),
    ("ftp://localhost/mcp", "localhost", 404)])
def test_the_host_of_an_absolute_target_counts(run: Running, target: str, host: str, status: int) -> None:
    """RFC 9112 §3.2.2: MUST ignore the Host field when the request-target is in absolute-form."""
    draft = spoiled(start_line(f"POST {target} HTTP/1.1"), field("Host", host))
    assert run.exchange(draft.octets()).status == status


@pytest.mark.parametrize(("verb", "target", "lines", "first"), [
    ("GET", "/healthz", "", 100), ("HEAD", "/healthz", "", 100),
    ("OPTIONS", "/healthz", "Origin: http://localhost", 100), ("OPTIONS", "/mcp", "Origin: http://localhost", 100),
    ("GET", "/healthz", "Origin: http://evil.example", 403), ("OPTIONS", "/mcp", "Origin: http://evil.example", 403),
    ("OPTIONS", "/mcp", "", 405), ("GET", "/mcp", "", 405), ("POST", "/healthz", "", 404),
    ("OPTIONS", "/other", "Origin: http://localhost", 404), ("DELETE", "/healthz", "", 404)])
def test_an_expectation_is_met_wherever_the_answer_would_be_good(
        run: Running, verb: str, target: str, lines: str, first: int) -> None:
    """RFC 9110 §10.1.1: 100, and the answer after the body; or the final status at once, as the head alone decides."""
    head = f"{verb} {target} HTTP/1.1\r\nHost: localhost\r\n{lines}{chr(13) + chr(10) if lines else ''}"
    with run.connect() as client:
        client.send(f"{head}Content-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode())
        status, fields = client.head()
        assert status == first
        if first == 100:
            client.send(b"{}" + Draft().octets())
            assert client.head()[0] == (204 if verb == "OPTIONS" else 200)
            client.read_until(b"ok\n" if verb == "GET" else b"")
            assert client.head()[0] == 200, "the body was not taken for the next request"
        else:
            assert fields["connection"] == "close"
    assert calls(run) == ["tools/call"] * (first == 100)


def test_health_is_not_told_to_a_foreign_page(run: Running) -> None:
    """MUST (Streamable HTTP › Security & Endpoint): an invalid Origin gets 403, on whatever path."""
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n"
    assert run.exchange(request).status == 403


# ----------------------------------------------------------------------------------------------------------- CORS

ORIGINS = ["http://localhost", "https://localhost:8443", "http://127.0.0.1:3000", "http://[::1]:5173", ALLOWED]
CORS = "access-control-allow-origin"


@pytest.mark.parametrize("path", ["/mcp", "/healthz", "/mcp?x", "http://localhost/mcp"])
@pytest.mark.parametrize("origin", ORIGINS)
def test_a_preflight_from_an_allowed_origin_allows_the_mirrored_headers(run: Running, origin: str, path: str) -> None:
    """Choice: OPTIONS from an allowed origin is a CORS preflight; it allows the headers that MCP needs."""
    asked = "content-type, mcp-protocol-version, mcp-method, mcp-name, mcp-param-region, authorization, x-other"
    request = (f"OPTIONS {path} HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n"
               f"Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: {asked}\r\n\r\n")
    reply = run.exchange(request.encode())
    assert (reply.status, reply.body, reply.fields[CORS]) == (204, b"", origin)
    assert "content-length" not in reply.fields  # rfc9110 §8.6: MUST NOT send it in a 204
    allowed = {one.strip().lower() for one in reply.fields["access-control-allow-headers"].split(",")}
    assert set(asked.split(", ")) - {"x-other"} <= allowed and "x-other" not in allowed
    assert "POST" in reply.fields["access-control-allow-methods"]
    assert "origin" in reply.fields["vary"].lower()


@pytest.mark.parametrize(("line", "status"), [
    ("Origin: http://evil.example", 403), ("Origin: null", 403), ("X-No-Origin: 1", 405)])
def test_no_other_preflight_allows_anything(run: Running, line: str, status: int) -> None:
    """MUST (Streamable HTTP › Security & Endpoint): 403 for an invalid Origin; without one OPTIONS is no preflight."""
    request = f"OPTIONS /mcp HTTP/1.1\r\nHost: localhost\r\n{line}\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    reply = run.exchange(request.encode())
    assert reply.status == status
    assert not [name for name in reply.fields if name.startswith("access-control-")]


ANSWERS: list[tuple[str, Spoil]] = [
    ("200", field("X", "1")), ("202", notification), ("400", first_row(8).spoil), ("404", first_row(15).spoil),
    ("404 in plain text", first_row(3).spoil), ("405", first_row(4).spoil), ("415", first_row(5).spoil),
    ("401", first_row(7).spoil)]


@pytest.mark.parametrize(("what", "spoil"), ANSWERS, ids=[what for what, _ in ANSWERS])
def test_pages_of_allowed_origins_and_no_others_can_read_an_answer(run: Running, what: str, spoil: Spoil) -> None:
    """Choice: every answer to an allowed origin names that origin, an answer to anyone else names none."""
    for origin in ORIGINS:
        reply = run.exchange(spoiled(spoil, field("Origin", origin)).octets())
        assert (str(reply.status), reply.fields[CORS]) == (what[:3], origin)
        assert "origin" in reply.fields["vary"].lower()
    foreign = run.exchange(spoiled(spoil, field("Origin", "http://evil.example")).octets())
    assert foreign.status == 403 and CORS not in foreign.fields
    without_origin = run.exchange(spoiled(spoil).octets())
    assert CORS not in without_origin.fields


@pytest.mark.parametrize("row", [row for row in ROWS if row.rung == 1], ids=lambda row: row.what)
def test_no_answer_names_a_foreign_origin(run: Running, row: Row) -> None:
    """Choice: what is refused before Origin is looked at does not let a foreign page read the refusal."""
    for origins in (["http://evil.example"], ["http://evil.example", ALLOWED], [ALLOWED, "http://evil.example"]):
        reply = run.exchange(spoiled(row.spoil, field("Origin", *origins)).octets())
        assert (reply.status, reply.fields.get(CORS)) == (row.status, None)


def test_a_stream_can_be_read_by_an_allowed_page_too(run: Running) -> None:
    """Choice: the head of a stream carries the same CORS field as any other answer."""
    draft = spoiled(field("Origin", ALLOWED), lambda draft: draft.drop("Mcp-Name"))
    draft.message["method"] = "subscriptions/listen"
    draft.params["notifications"] = {}
    draft.put("Mcp-Method", "subscriptions/listen")
    with run.connect() as client:
        client.send(draft.octets())
        status, fields = client.head()
    assert (status, fields["content-type"], fields[CORS]) == (200, "text/event-stream", ALLOWED)


# ------------------------------------------------------------------------------------------- what must not be refused


@pytest.mark.parametrize("spoil", [
    field("Accept", "*/*"), field("Accept", "application/*, text/*;q=0.1"),
    field("ACCEPT", "Text/Event-Stream,APPLICATION/JSON"), field("Accept", "application/json", "text/event-stream"),
    field("Content-Type", 'Application/JSON; Charset="UTF-8"'),
    field("Authorization", "bEARER alice"), field("Origin", "http://localhost:1"), field("Host", "[::1]:3000"),
    field("Host", "app.example"), field("Host", "LOCALHOST"), field("Mcp-Name", "=?base64?c3B5?="),
    field("mcp-method", "tools/call", "tools/call"), field("Mcp-Param-Other", "x"), field("Mcp-Session-Id", "abc"),
    field("Last-Event-ID", "3"), field("X", "x" * 8189), field("X", *["1"] * 56),
    field("Content-Encoding", "identity"), field("Content-Encoding", "IDENTITY", "identity"),
    field("Content-Encoding", ""), field("Content-Encoding", ", identity ,"),
    *[start_line(f"POST {target} HTTP/1.1") for target in (
        "HTTP://LOCALHOST/mcp", "https://[::1]:8/mcp?x", "http://127.0.0.1:3000/mcp", "http://app.example/mcp")],
    start_line("POST /mcp?a=b HTTP/1.1"), start_line("POST http://localhost/mcp HTTP/1.1"),
    start_line("POST /mcp HTTP/1.2"), meta(logLevel="debug"), meta(progressToken=0),
    meta(clientInfo={"name": "a", "version": "b"}), param(unknown=1), member(id="7"), member(id=0),
    member(id=-(10**20)), member(id="")])
def test_what_the_rules_allow_passes_the_ladder(run: Running, spoil: Spoil) -> None:
    """MUST (Streamable HTTP › Sending Messages): every legal spelling is served, and its id comes back as it was."""
    draft = spoiled(spoil)
    reply = run.exchange(draft.octets())
    wanted = draft.message["id"]
    assert (reply.status, reply.message["id"], type(reply.message["id"])) == (200, wanted, type(wanted)), reply.body
    assert calls(run) == ["tools/call"]


def test_every_refusal_is_one_line_in_the_log(run: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a refusal is one line on stderr, without a traceback, whatever octets led to it."""
    for row in ROWS:
        capsys.readouterr()
        with contextlib.suppress(ConnectionError):
            run.exchange(spoiled(row.spoil).octets())
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("[ref] "), (row, lines)


@pytest.mark.parametrize("spoil", [
    start_line(f"POST /{'x' * 8000} HTTP/1.1"), start_line(f"{'X' * 8000} /mcp HTTP/1.1"),
    start_line(f"{'X' * 8000} /nowhere HTTP/1.1"), field("Authorization", f"Bearer {'x' * 8000}"),
    named("tools/call", "name", "x" * 2000), member(id="x" * 7000)],
    ids=["path", "verb", "both", "user", "name", "id"])
def test_what_is_long_does_not_hide_the_outcome(run: Running, log: Lines, spoil: Spoil) -> None:
    """Choice: each part of a line is cut by itself, so that status and reason stay in sight."""
    reply = run.exchange(spoiled(spoil).octets())
    [line] = log.lines()
    assert len(line) < 800 and re.search(r" -> (complete|\d{3}, .+)$", line) and "…" not in line
    assert reply.status in (200, 404, 405)


@pytest.mark.parametrize("spoil", [notification, lambda draft: None], ids=["notification", "request"])
def test_a_method_of_a_mebibyte_is_cut_in_the_log(log: Lines, spoil: Spoil) -> None:
    """Choice: a line of the log is no longer than a screenful, whatever is named in it."""
    with running(Spy()) as run:
        for name in ("x" * 1_000_000, "\x1b" * 100_000):
            draft = spoiled(spoil, lambda draft, name=name: draft.message.update(method=name), without("Mcp-Method"))
            draft.lines = [line for line in draft.lines if not line[0].startswith("Mcp-")]
            assert run.exchange(draft.octets()).status in (202, 400)
    assert len(log.lines()) == 2 and max(map(len, log.lines())) < 2100 and log.text.replace("\n", "").isprintable()
