"""The response stream: when an answer becomes one, what goes over the wire, and what a tool may put into it."""

import asyncio
import contextlib
import itertools
import json
import math
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import PATIENCE, TASKS, Connection, Lines, Reply, Running, eventually, message, octets, running

from reference_server import LOG_LEVELS, Cancelled, Rejection, Request, Server, ToolError
from sse import KEEP_ALIVE

Script = Callable[[Request], Any]


class Stage(Running):
    """A server whose one tool does what the test has written for it."""

    scripts: dict[str, Script]
    numbers: Iterator[int]
    open: int  # connections that a test holds

    @contextlib.contextmanager
    def connect(self) -> Iterator[Connection]:  # type: ignore[override]
        """A connection whose end the server has seen before the test goes on."""
        self.open += 1
        with super().connect() as connection:
            yield connection
        self.open -= 1
        assert self.open or eventually(lambda: not self.http.connections)

    def request(self, script: Script, id: Any = 1, **metadata: Any) -> dict[str, Any]:
        """The tools/call that runs the script."""
        name = f"script {next(self.numbers)}"
        self.scripts[name] = script
        return message("tools/call", {"name": "play", "arguments": {"script": name}}, id, **metadata)

    def play(self, script: Script, **metadata: Any) -> Reply:
        """Runs the script and returns the whole answer."""
        return self.exchange(octets(self.request(script, **metadata)))

    def raw(self, script: Script, version: str = "HTTP/1.1", **metadata: Any) -> tuple[bytes, bytes]:
        """The answer's head and everything after it, as it came."""
        with self.connect() as connection:
            connection.send(octets(self.request(script, **metadata), version=version, connection="close"))
            head, _, body = connection.read_to_end().partition(b"\r\n\r\n")
            return head, body


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """The server of this file."""
    server = Server("stage", "1")
    scripts: dict[str, Script] = {}

    @server.tool("play", "Does what the test has written.", {"type": "object"})
    def play(arguments: dict[str, Any], request: Request) -> Any:
        return scripts[arguments["script"]](request) or "the end"

    with running(server) as one:
        stage = Stage(*one)
        stage.scripts, stage.numbers, stage.open = scripts, itertools.count(), 0
        yield stage


def split_chunks(body: bytes) -> list[bytes]:
    """The chunks of a body, the empty last one too; nothing may follow it."""
    chunks = []
    while not chunks or chunks[-1]:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        assert body[int(size, 16):][:2] == b"\r\n"
        body = body[int(size, 16) + 2:]
    assert body == b""
    return chunks


def data_of(event: bytes) -> Any:
    """The message of an event that is one `data:` line and a blank line, and nothing else."""
    assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2 and b"\r" not in event
    return json.loads(event[6:])


def steps(count: int) -> Script:
    """A script that reports so many steps."""
    def script(request: Request) -> None:
        for step in range(1, count + 1):
            request.progress(step, count)
    return script


# ------------------------------------------------------------------------------------------------ JSON or a stream

DECISIONS: list[Any] = [
    pytest.param(lambda request: None, {}, False, id="nothing to say first"),
    pytest.param(lambda request: None, {"progressToken": 1, "log_level": "debug"}, False, id="asked, but not said"),
    pytest.param(steps(3), {}, False, id="progress that nobody asked for"),
    pytest.param(steps(3), {"progressToken": "t"}, True, id="progress"),
    pytest.param(steps(1), {"progressToken": 0}, True, id="progress for token 0"),
    pytest.param(lambda request: request.log("error", "x"), {}, False, id="a log message that nobody asked for"),
    pytest.param(lambda request: request.log("info", "x"), {"log_level": "notice"}, False, id="a log message too low"),
    pytest.param(lambda request: request.log("notice", "x"), {"log_level": "notice"}, True, id="a log message"),
    pytest.param(lambda request: request.sleep(0), {"progressToken": 1}, False, id="a sleep that is no silence"),
    pytest.param(lambda request: request.progress(math.nan), {"progressToken": 1}, False, id="progress of no number"),
]


@pytest.mark.parametrize("script, metadata, streamed", DECISIONS)
def test_an_answer_is_a_stream_only_if_there_is_something_to_say_first(
        stage: Stage, script: Script, metadata: dict[str, Any], streamed: bool) -> None:
    """MUST (Streamable HTTP › Sending Messages): one or the other; which one is a choice that DESIGN fixes."""
    reply = stage.play(script, **metadata)
    assert reply.fields["content-type"] == ("text/event-stream" if streamed else "application/json")
    assert reply.status == 200 and reply.ended and (len(reply.messages) > 1) == streamed
    assert reply.message["result"]["content"] == [{"type": "text", "text": "the end"}]
    assert all("id" not in one for one in reply.messages[:-1])


def test_an_error_before_the_first_event_keeps_its_status(stage: Stage) -> None:
    """Choice: as long as nothing has been sent, a rejection is answered like any other."""
    def script(request: Request) -> None:
        request.require({"sampling": {}})

    reply = stage.play(script, progressToken=1)
    assert (reply.status, reply.fields["content-type"]) == (400, "application/json")
    assert reply.message["error"]["code"] == -32021


def test_one_keep_alive_interval_of_silence_makes_it_a_stream(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a proxy that waits for a head gives up like one that waits for octets."""
    monkeypatch.setattr(stage.http, "keep_alive", 0.01)
    reply = stage.play(lambda request: request.sleep(0.03))
    assert reply.fields["content-type"] == "text/event-stream"
    assert len(reply.messages) == 1 and reply.body.startswith(KEEP_ALIVE) and reply.ended


def test_silence_counts_from_when_the_request_came(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a connection that was idle for an interval or two has not been silent about this request."""
    monkeypatch.setattr(stage.http, "keep_alive", 0.2)
    due: list[float] = []

    def script(request: Request) -> None:
        due.append(request.exchange.comment_due())
        request.sleep(0.001)

    with stage.connect() as connection:
        assert not select.select([connection.socket], [], [], 0.22)[0]
        connection.send(octets(stage.request(script)))
        assert connection.reply().fields["content-type"] == "application/json"
    assert min(due) > 0.1


def test_a_subscription_is_a_stream_from_its_first_octet(stage: Stage) -> None:
    """MUST (Subscriptions › Acknowledgment): acknowledged is the first message."""
    with stage.connect() as connection:
        connection.send(octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "s")))
        status, fields = connection.head()
        assert (status, fields["content-type"]) == (200, "text/event-stream")
        first = next(connection.events())
        assert first["method"] == "notifications/subscriptions/acknowledged"
        assert first["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": "s"}


# ------------------------------------------------------------------------------------------------------ on the wire


def test_a_stream_says_that_nobody_may_keep_it(stage: Stage) -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): X-Accel-Buffering: no; and no cache, and no length."""
    reply = stage.play(steps(1), progressToken="t")
    assert {name: reply.fields.get(name) for name in (
        "content-type", "cache-control", "x-accel-buffering", "transfer-encoding", "content-length", "connection")} == {
        "content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no",
        "transfer-encoding": "chunked", "content-length": None, "connection": None}


@pytest.mark.parametrize("count", [1, 2, 20])
def test_each_event_is_a_chunk_and_one_last_chunk_ends_the_stream(stage: Stage, count: int) -> None:
    """RFC 9112 §7.1: chunked-body = *chunk last-chunk trailer-section CRLF; each event leaves at once, in its own."""
    head, body = stage.raw(steps(count), progressToken="t")
    *events, last = split_chunks(body)
    assert b"\r\nTransfer-Encoding: chunked" in head and last == b""
    assert body.endswith(b"\r\n0\r\n\r\n") and body.count(b"0\r\n\r\n") == 1
    messages = [data_of(event) for event in events]
    assert [one["method"] for one in messages[:-1]] == ["notifications/progress"] * count
    assert messages[-1]["id"] == 1 and messages[-1]["result"]["resultType"] == "complete"


def test_the_stream_of_http_1_0_ends_with_the_connection(stage: Stage) -> None:
    """RFC 9112 §6.1: no transfer coding to an HTTP/1.0 client; the events are the body."""
    head, body = stage.raw(steps(2), version="HTTP/1.0", progressToken="t")
    assert b"Transfer-Encoding" not in head and b"Content-Length" not in head
    assert b"Content-Type: text/event-stream\r\n" in head and b"Connection: close\r\n" in head
    assert body.endswith(b"\n\n")
    assert [data_of(one + b"\n\n").get("id") for one in body[:-2].split(b"\n\n")] == [None, None, 1]


def test_an_event_is_flushed_at_once(stage: Stage) -> None:
    """Choice: each event is written and flushed by itself, because progress that comes late is none."""
    gates = [threading.Event() for _ in range(3)]

    def script(request: Request) -> None:
        for step, gate in enumerate(gates):
            request.progress(step)
            assert gate.wait(PATIENCE)

    with stage.connect() as connection:
        connection.send(octets(stage.request(script, progressToken="t")))
        assert connection.head()[0] == 200
        events = connection.events()
        for step, gate in enumerate(gates):
            assert next(events)["params"]["progress"] == step
            gate.set()
        assert next(events)["id"] == 1


def test_text_stays_on_one_line_and_in_utf_8(stage: Stage) -> None:
    """RFC 8259 §7: control characters are escaped, so that no text can end a line or an event; nothing else is."""
    text = "a\nb\r\nc\rd\0e\u2028f\x85g é😀 data: x\n\nid: 7\n\n:"

    def script(request: Request) -> str:
        request.log("info", text)
        return text

    _, body = stage.raw(script, log_level="info")
    events = split_chunks(body)[:-1]
    assert data_of(events[0])["params"]["data"] == text and "é😀".encode() in events[0]
    assert data_of(events[1])["result"]["content"][0]["text"] == text


def test_after_a_stream_the_connection_takes_the_next_request(stage: Stage) -> None:
    """RFC 9112 §9.3: persistent unless somebody says close; the requests share nothing but the connection."""
    with stage.connect() as connection:
        for number in range(3):
            connection.send(octets(stage.request(steps(2), number, progressToken=number)))
            reply = connection.reply()
            assert [one["params"]["progressToken"] for one in reply.messages[:-1]] == [number] * 2
            assert reply.message["id"] == number
            connection.send(octets(stage.request(steps(2), "later")))  # no token: no progress, whatever came before
            assert connection.reply().fields["content-type"] == "application/json"


def test_nothing_resumes_a_stream_and_nothing_is_a_session(stage: Stage) -> None:
    """Choice: Last-Event-ID and Mcp-Session-Id are ignored and not echoed, like any field that means nothing."""
    fields = {"Last-Event-ID": "7-secret", "Mcp-Session-Id": "secret-session"}
    for metadata in ({}, {"progressToken": "t"}):
        reply = stage.exchange(octets(stage.request(steps(1), **metadata), **fields))
        assert reply.status == 200 and reply.message["result"]
        assert not {"last-event-id", "mcp-session-id"} & reply.fields.keys()
        assert "secret" not in str(reply.fields) and b"secret" not in reply.body
        assert b"\nid:" not in reply.body and b"\nretry:" not in reply.body and not reply.body.startswith(b"id:")
    assert stage.exchange(octets(b"", verb="GET", accept="text/event-stream", **fields)).status == 405


def test_two_streams_carry_only_what_is_theirs(stage: Stage) -> None:
    """MUST (Streamable HTTP › Receiving Messages): notifications relate to the originating request."""
    meeting = threading.Barrier(2)

    def script(request: Request) -> None:
        for step in range(1, 6):
            meeting.wait(PATIENCE)
            request.progress(step)
            request.log("info", request.meta["progressToken"])

    with stage.connect() as one, stage.connect() as other:
        for name, connection in (("one", one), ("other", other)):
            connection.send(octets(stage.request(script, "same id", progressToken=name, log_level="info")))
        for name, connection in (("one", one), ("other", other)):
            *told, last = connection.reply().messages
            assert [one["params"].get("progressToken", one["params"].get("data")) for one in told] == [name] * 10
            assert last["id"] == "same id"


# ------------------------------------------------------------------------------------------------------ keep-alive


def read_comments(connection: Connection, count: int) -> None:
    """Reads so many chunks, each of which must be a comment."""
    for _ in range(count):
        assert connection.read_until(b"\r\n") == b"3\r\n"
        assert connection.read_until(b"\r\n") == b":\n\n\r\n"


def test_a_quiet_subscription_carries_comments_and_no_events(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: as Streamable HTTP › Receiving Messages encourages, a comment now and then keeps the stream open."""
    monkeypatch.setattr(stage.http, "keep_alive", 0.05)
    with stage.connect() as connection:
        connection.send(octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "s")))
        connection.head()
        assert next(connection.events())["method"] == "notifications/subscriptions/acknowledged"
        assert connection.read_until(b"\r\n") == b"\r\n"
        read_comments(connection, 3)
        stage.server.list_changed("tools")
        assert next(connection.events())["method"] == "notifications/tools/list_changed"


def test_comments_come_between_events_and_never_after_the_last(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: the connection's own thread writes comments while it waits, so that none can fall into an event."""
    monkeypatch.setattr(stage.http, "keep_alive", 0.03)
    gates = [threading.Event() for _ in range(2)]

    def script(request: Request) -> None:
        for step, gate in enumerate(gates):
            while not gate.is_set():
                request.sleep(0.01)
            request.progress(step, message="x" * 300_000)

    with stage.connect() as connection:
        connection.send(octets(stage.request(script, progressToken="t"), connection="close"))
        assert connection.head()[1]["content-type"] == "text/event-stream"
        for step, gate in enumerate(gates):
            read_comments(connection, 2)
            gate.set()
            while (size := connection.read_until(b"\r\n")) == b"3\r\n":
                assert connection.read_until(b"\r\n") == b":\n\n\r\n"
            event = connection.read_until(b"\n\n\r\n")
            assert len(event) == int(size, 16) + 2 and data_of(event[:-2])["params"]["progress"] == step
        *comments, last, end = split_chunks(connection.read_to_end())
        assert set(comments) <= {KEEP_ALIVE} and data_of(last)["id"] == 1 and end == b""


def test_a_stream_that_is_busy_needs_no_comments(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: the interval is one of silence; each event begins it anew."""
    monkeypatch.setattr(stage.http, "keep_alive", PATIENCE)
    due: list[float] = []

    def script(request: Request) -> None:
        for step in range(20):
            request.exchange.quiet_since -= PATIENCE - 1  # as if so much time had passed
            request.sleep(0.001)
            request.progress(step)
            due.append(request.exchange.comment_due())

    assert KEEP_ALIVE not in stage.play(script, progressToken="t").body
    assert len(due) == 20 and min(due) > PATIENCE / 2


# ------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("reported, sent", [
    ([1, 2, 3], [1, 2, 3]),
    ([1, 1, 0.5, 2, 1.9, 2, 3], [1, 2, 3]),
    ([0, 0, 0.1, -1], [0, 0.1]),
    ([-5, -6, 0], [-5, 0]),
    ([math.nan, 1, math.inf, 2, -math.inf, math.nan, 3], [1, 2, 3]),
    ([2**60, 2**60 + 1], [2**60, 2**60 + 1]),
])
def test_progress_only_ever_increases(stage: Stage, reported: list[float], sent: list[float]) -> None:
    """MUST (Progress › Progress Flow): the value increases with each notification; what does not is dropped."""
    def script(request: Request) -> None:
        for value in reported:
            request.progress(value)

    reply = stage.play(script, progressToken="t")
    assert [one["params"]["progress"] for one in reply.messages[:-1]] == sent
    assert b"NaN" not in reply.body and b"Infinity" not in reply.body


@pytest.mark.parametrize("token", [0, -1, 7, 2**53 - 1, "", "0", "t", "a b\n\u2028😀"])
def test_progress_carries_exactly_the_token(stage: Stage, token: str | int) -> None:
    """MUST (Progress › Behavior Requirements): only tokens that were provided; 0 and "" are tokens, 0 is not "0"."""
    reply = stage.play(steps(2), progressToken=token)
    assert [one["method"] for one in reply.messages[:-1]] == ["notifications/progress"] * 2
    for one in reply.messages[:-1]:
        assert one["params"]["progressToken"] == token and type(one["params"]["progressToken"]) is type(token)


@pytest.mark.parametrize("token", [None, True, 1.5, [], {}])
def test_what_is_no_token_is_refused(stage: Stage, token: Any) -> None:
    """MUST (Progress › Progress Flow): progress tokens are strings or integers."""
    reply = stage.play(steps(1), progressToken=token)
    assert (reply.status, reply.message["error"]["code"]) == (400, -32602)


def test_total_and_message_are_left_out_if_there_are_none(stage: Stage) -> None:
    """Choice: what a tool does not say is left out, because the schema knows no null for total and message."""
    def script(request: Request) -> None:
        request.progress(1)
        request.progress(2.5, 10, "half")

    told = [one["params"] for one in stage.play(script, progressToken="t").messages[:-1]]
    assert told == [{"progressToken": "t", "progress": 1},
                    {"progressToken": "t", "progress": 2.5, "total": 10, "message": "half"}]


# ------------------------------------------------------------------------------------------------------------- log


@pytest.mark.parametrize("wanted", LOG_LEVELS)
def test_a_log_level_lets_through_itself_and_what_is_worse(stage: Stage, wanted: str) -> None:
    """MUST (Logging › Per-request log level): nothing below the level that this request asked for."""
    def script(request: Request) -> None:
        for level in LOG_LEVELS:
            request.log(level, {"about": level})

    told = [one["params"] for one in stage.play(script, log_level=wanted).messages[:-1]]
    assert [one["level"] for one in told] == list(LOG_LEVELS[LOG_LEVELS.index(wanted):])
    assert all(one["data"] == {"about": one["level"]} for one in told)


@pytest.mark.parametrize("level", ["", "INFO", "warn", "verbose", 3, None])
def test_an_unknown_log_level_is_refused(stage: Stage, level: Any) -> None:
    """SHOULD (Logging › Error Handling): reject a request whose log level is not recognized, with -32602."""
    reply = stage.play(lambda request: None, log_level=level)
    assert (reply.status, reply.message["error"]["code"]) == (400, -32602)


def test_a_log_level_is_forgotten_with_its_request(stage: Stage) -> None:
    """MUST (Logging › Per-request log level): nothing without logLevel, whatever this connection asked for before."""
    with stage.connect() as connection:
        for metadata, count in (({"log_level": "debug"}, 2), ({}, 1)):
            connection.send(octets(stage.request(lambda request: request.log("emergency", "x"), **metadata)))
            assert len(connection.reply().messages) == count


def test_log_messages_stay_off_other_requests_streams(stage: Stage) -> None:
    """MUST (Logging › Per-request log level): not on a subscriptions/listen stream, even if that one asked for all."""
    listen = message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "s", log_level="debug")
    with stage.connect() as connection:
        connection.send(octets(listen))
        connection.head()
        events = connection.events()
        next(events)
        assert len(stage.play(lambda request: request.log("alert", "x"), log_level="debug").messages) == 2
        stage.server.list_changed("tools")
        assert next(events)["method"] == "notifications/tools/list_changed"


# ---------------------------------------------------------------------------------------------- how a stream ends


def fails(problem: Exception) -> Script:
    """A script that reports a step and then raises."""
    def script(request: Request) -> None:
        request.progress(1)
        raise problem
    return script


def test_a_fault_after_events_is_an_internal_error_without_detail(stage: Stage, log: Lines) -> None:
    """Choice: the last event is -32603 and tells nothing of this server's inside; the traceback goes to stderr."""
    reply = stage.play(fails(RuntimeError("the password is xyzzy")), progressToken="t")
    assert (reply.status, reply.ended, len(reply.messages)) == (200, True, 2)
    assert reply.message == {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "Internal error"}}
    assert b"xyzzy" not in reply.body and b"RuntimeError" not in reply.body
    assert "RuntimeError: the password is xyzzy" in log.text and "Traceback" in log.text


def nan_in_result(request: Request) -> dict[str, Any]:
    return {"structuredContent": {"value": math.nan}}


def nan_in_log(request: Request) -> None:
    request.log("info", [math.inf])


def nan_as_total(request: Request) -> None:
    request.progress(9, math.nan)


@pytest.mark.parametrize("events", [0, 2])
@pytest.mark.parametrize("script", [nan_in_result, nan_in_log, nan_as_total])
def test_what_json_cannot_say_is_an_internal_error(stage: Stage, log: Lines, script: Script, events: int) -> None:
    """RFC 8259 §6: there is no NaN and no Infinity; not half an event of such a message leaves the server."""
    def both(request: Request) -> Any:
        steps(events)(request)
        return script(request)

    reply = stage.play(both, progressToken="t", log_level="info")
    assert (reply.status, reply.ended) == (200, True)
    assert len(reply.messages) == events + 1
    assert reply.message == {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "Internal error"}}
    assert b"NaN" not in reply.body and b"Infinity" not in reply.body


def test_a_tool_error_after_events_is_a_result(stage: Stage) -> None:
    """Choice: as in Tools › Error Handling, a failure that a model can act on is a result, in the last event too."""
    reply = stage.play(fails(ToolError("no such month")), progressToken="t")
    assert reply.message["result"]["isError"] is True and len(reply.messages) == 2
    assert reply.message["result"]["content"] == [{"type": "text", "text": "no such month"}]


def test_a_rejection_after_events_is_the_last_event(stage: Stage) -> None:
    """Choice: the status has gone out already, so the error's code has to do."""
    rejection = Rejection(-32021, "Needs sampling", {"requiredCapabilities": {"sampling": {}}})
    reply = stage.play(fails(rejection), progressToken="t")
    assert (reply.status, reply.ended, len(reply.messages)) == (200, True, 2)
    assert reply.message["error"] == {
        "code": -32021, "message": "Needs sampling", "data": {"requiredCapabilities": {"sampling": {}}}}


@pytest.mark.parametrize("id", [0, -7, 2**53 - 1, "", "1", "a\nb 😀"])
def test_the_response_carries_the_requests_id_as_it_was(stage: Stage, id: Any) -> None:
    """MUST (Overview › Result Responses): the same id as the request, type and all, in JSON and in a stream."""
    for metadata in ({}, {"progressToken": 1}):
        reply = stage.exchange(octets(stage.request(steps(1), id, **metadata)))
        assert reply.message["id"] == id and type(reply.message["id"]) is type(id)


class Stop(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize("events", [0, 1])
@pytest.mark.parametrize("problem", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(),
                                     Stop("x"), Cancelled("of its own accord"), StopIteration()],
                         ids=lambda problem: type(problem).__name__)
def test_whatever_a_tool_raises_its_client_is_answered(
        stage: Stage, log: Lines, problem: BaseException, events: int) -> None:
    """MUST (Overview › Error Responses): -32603, in JSON or as the last event; the connection and the server go on."""
    def script(request: Request) -> None:
        steps(events)(request)
        raise problem

    with stage.connect() as connection:
        for _ in range(2):
            connection.send(octets(stage.request(script, progressToken="t")))
            reply = connection.reply()
            assert (reply.status, reply.ended, len(reply.messages)) == (200, True, events + 1)
            assert reply.message["error"] == {"code": -32603, "message": "Internal error"}
    assert log.text.count(f"[ref] {type(problem).__qualname__}") + log.text.count(
        f"{type(problem).__module__}.{type(problem).__qualname__}") >= 2, log.text


def test_what_cannot_become_a_task_is_answered(stage: Stage, log: Lines) -> None:
    """MUST (Overview › Error Responses): only a call can; a prompt or resource that tries is an author's fault."""
    def turn(arguments: Any, request: Request) -> str:
        request.as_task()
        return "never"

    stage.server.prompt("turns", "Tries to become a task.")(turn)
    stage.server.resource("test://turns", "turns")(turn)
    declared = {"extensions": {TASKS: {}}}
    for method, params in (("prompts/get", {"name": "turns"}), ("resources/read", {"uri": "test://turns"})):
        reply = stage.call(method, params, capabilities=declared)
        assert (reply.status, reply.message["error"]["code"]) == (200, -32603)


def test_a_rejection_that_json_cannot_say_is_an_internal_error(stage: Stage, log: Lines) -> None:
    """Choice: an author's data in an error is as much the author's fault as in a result."""
    for data in ({"value": math.nan}, {"value": object()}, {1, 2}):
        def script(request: Request, data: Any = data) -> None:
            raise Rejection(-32602, "Wrong", data, rule="choice: a test")

        with stage.connect() as connection:
            for _ in range(2):
                connection.send(octets(stage.request(script)))
                reply = connection.reply()
                assert (reply.status, reply.message["error"]["code"]) == (200, -32603)


# ------------------------------------------------------------------------------------------------ after the answer


class Leftover:
    """A thread that a tool leaves behind; the test tells it when to report, and hears how that went."""

    def __init__(self) -> None:
        self.report, self.reported = threading.Semaphore(0), threading.Semaphore(0)
        self.problems: list[BaseException] = []
        self.thread: threading.Thread | None = None

    def leave(self, request: Request) -> None:
        """A script that returns while its thread lives on."""
        self.thread = threading.Thread(target=self.run, args=[request])
        self.thread.start()

    def run(self, request: Request) -> None:
        for number in range(3):
            if not self.report.acquire(timeout=PATIENCE):
                return
            try:
                request.progress(10 + number, message="left behind")
                request.log("emergency", "left behind")
                request.emit({"method": "notifications/message", "params": {"level": "info", "data": "left behind"}})
                request.exchange.keep_alive()
            except BaseException as problem:
                self.problems.append(problem)
            self.reported.release()

    def go_on(self) -> None:
        """Lets it report once, and waits until it has."""
        self.report.release()
        assert self.reported.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("streamed", [True, False], ids=["a stream", "JSON"])
def test_what_a_tool_leaves_behind_is_not_heard_after_the_answer(
        stage: Stage, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """MUST (Streamable HTTP › Receiving Messages): the response ends the stream; nor may the next answer carry it."""
    leftover, gate, waits = Leftover(), threading.Event(), threading.Event()

    def script(request: Request) -> None:
        leftover.leave(request)
        steps(int(streamed))(request)

    def waiting(request: Request) -> None:
        request.progress(1)
        waits.set()
        assert gate.wait(PATIENCE)
        request.progress(2)

    with stage.connect() as connection:
        connection.send(octets(stage.request(script, 1, progressToken="old", log_level="debug")))
        assert connection.reply().message["id"] == 1
        with monkeypatch.context() as patch:
            patch.setattr(stage.http, "keep_alive", 0.0)  # a comment is due at any time
            leftover.go_on()
            assert not select.select([connection.socket], [], [], 0.02)[0], "octets that nobody asked for"
        connection.send(octets(stage.request(waiting, 2, progressToken="new", log_level="debug")))
        assert waits.wait(PATIENCE)
        leftover.go_on()
        gate.set()
        reply = connection.reply()
        assert b"left behind" not in reply.body and reply.message["id"] == 2
        assert [one["params"]["progressToken"] for one in reply.messages[:-1]] == ["new"] * 2
    leftover.go_on()
    assert leftover.problems == [] and leftover.thread
    leftover.thread.join(PATIENCE)


def test_what_a_tool_leaves_behind_is_silent_after_a_hang_up(stage: Stage, log: Lines) -> None:
    """Choice: only the thread that runs the method is told by an exception that nobody waits; others return."""
    leftover, cancelled = Leftover(), threading.Event()

    def script(request: Request) -> None:
        leftover.leave(request)
        try:
            request.progress(1)
            request.sleep(PATIENCE)
        finally:
            cancelled.set()

    with stage.connect() as connection:
        connection.send(octets(stage.request(script, progressToken="t")))
        connection.head()
    assert cancelled.wait(PATIENCE)
    for _ in range(3):
        leftover.go_on()
    assert leftover.problems == []


def test_a_request_that_was_cancelled_is_not_thrown_into_a_later_one(stage: Stage, log: Lines) -> None:
    """Choice: a tool that keeps an old request, and reports to it from the same worker thread, is none the wiser."""
    kept: list[Request] = []

    def first(request: Request) -> None:
        kept.append(request)
        request.progress(1)
        request.sleep(PATIENCE)

    def second(request: Request) -> None:
        kept.append(request)
        kept[0].progress(50)
        kept[0].emit({"method": "notifications/message", "params": {"level": "info", "data": "old"}})

    with stage.connect() as connection:
        connection.send(octets(stage.request(first, progressToken="t")))
        connection.head()
    assert eventually(lambda: stage.http.workers.idle > 0 and bool(kept) and kept[0].exchange.over)
    for _ in range(20):  # until it is the same worker
        reply = stage.play(second, progressToken="t")
        assert reply.message["result"] and len(reply.messages) == 1
        if kept[-1].exchange.thread == kept[0].exchange.thread:
            return
