"""The stdio transport: a message a line, all requests on one channel, and an end that comes when the input ends."""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, ROOT, SERVER_MODULE, HastyClock, Lines, eventually, killed_at_last, message

import reference_server
from reference_server import (
    MAX_MESSAGE,
    Cancelled,
    Rejection,
    Request,
    Server,
    StdioExchange,
    StdioTransport,
    Store,
    Wire,
    demo_server,
)

ANYTHING: dict[str, Any] = {"type": "object"}


class Pipes:
    """A transport over a pair of pipes, and the client's ends of them. Every read is bounded by PATIENCE."""

    def __init__(self, server: Server, user: str = "anonymous") -> None:
        (self.source, self.input), (self.output, self.sink) = os.pipe(), os.pipe()
        self.server, self.received = server, b""
        self.transport = StdioTransport(server, self.source, self.sink, user)
        self.thread = threading.Thread(target=self.transport.serve, daemon=True)  # a failed test holds up nobody
        self.thread.start()

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.input, data):]

    def send(self, *messages: dict[str, Any]) -> None:
        """Messages, a line each, in one write."""
        self.write(b"".join(json.dumps(one).encode() + b"\n" for one in messages))

    def line(self) -> bytes:
        """The next line of the output, with its LF."""
        while b"\n" not in self.received:
            assert select.select([self.output], [], [], PATIENCE)[0], "no line within the time that a test may take"
            data = os.read(self.output, 65536)
            assert data, "the output has ended"
            self.received += data
        line, self.received = self.received.split(b"\n", 1)
        return line + b"\n"

    def next(self) -> Any:
        """The next message."""
        return json.loads(self.line())

    def call(self, name: str, arguments: dict[str, Any] | None = None, id: Any = 1, **metadata: Any) -> None:
        """Sends one tools/call."""
        self.send(call(name, arguments, id, **metadata))

    def end(self) -> list[Any]:
        """Ends the input, waits for the transport to return, and returns the messages that were still to come."""
        os.close(self.input)
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the transport did not return"
        os.close(self.sink)
        while data := os.read(self.output, 65536):
            self.received += data
        os.close(self.output)
        os.close(self.source)
        self.server.store.close()
        lines, self.received = self.received, b""
        assert not lines or lines.endswith(b"\n")
        return [json.loads(one) for one in lines.splitlines()]


def call(name: str, arguments: dict[str, Any] | None = None, id: Any = 1, **metadata: Any) -> dict[str, Any]:
    return message("tools/call", {"name": name, "arguments": arguments or {}}, id, **metadata)


def cancel(id: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id, "reason": "enough"}}


def listen(id: Any) -> dict[str, Any]:
    return message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, id)


class Gated(Server):
    """A server with a tool that echoes, and one that waits for the test."""

    def __init__(self) -> None:
        super().__init__("gated", "1")
        self.begun = threading.Semaphore(0)  # one for each call of build_report that waits
        self.go, self.cancelled = threading.Event(), threading.Event()
        self.seen = False  # what `wait` saw when it looked whether it was cancelled

        @self.tool("echo", "Says it again.", ANYTHING)
        def echo(arguments: dict[str, Any], request: Request) -> str:
            request.progress(1, message=arguments["text"])
            return str(arguments["text"])

        @self.tool("build_report", "Waits for the test.", ANYTHING)
        def build_report(arguments: dict[str, Any], request: Request) -> str:
            try:
                request.progress(1)
                self.begun.release()
                while not self.go.is_set():
                    request.sleep(0.005)
            except Cancelled:
                self.cancelled.set()
                raise
            return "finished"

        @self.tool("wait", "Waits for the test; looks only then whether it is cancelled.", ANYTHING)
        def wait(arguments: dict[str, Any], request: Request) -> str:
            self.begun.release()
            assert self.go.wait(PATIENCE)
            self.seen = request.cancelled.is_set()
            return "finished"

    def wait_until_it_waits(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE)


@pytest.fixture
def gated() -> Gated:
    """The server of one test."""
    return Gated()


@pytest.fixture
def pipes(gated: Gated, log: Lines) -> Iterator[Pipes]:
    """The server over pipes; after the test nothing more may have come."""
    pipes = Pipes(gated)
    yield pipes
    gated.go.set()
    assert pipes.end() == []


def text_of(response: dict[str, Any]) -> Any:
    return response["result"]["content"][0]["text"]


def request_of(one: dict[str, Any]) -> Any:
    """The id of the request that a message is about, if its token is the same as its id."""
    return one["id"] if "id" in one else one["params"]["progressToken"]


# ------------------------------------------------------------------------------------------------------------ lines


@pytest.mark.parametrize("text", ["plain", "two\nlines\r\nand\rmore", "é 😀 \u2028\x85\0", '"\\', "", "\ud800"])
def test_a_message_is_one_line_of_utf_8_whatever_is_in_it(pipes: Pipes, text: str) -> None:
    """MUST (stdio › stdio): messages are delimited by newlines and contain none."""
    pipes.call("echo", {"text": text}, progressToken="t")
    lines = [pipes.line(), pipes.line()]
    for line in lines:
        assert line.count(b"\n") == 1 and line.endswith(b"}\n") and b"\r" not in line
        if text != "\ud800":
            assert json.dumps(text, ensure_ascii=False).encode() in line.replace(b"\\u0085", "\x85".encode())
    assert json.loads(lines[0])["params"]["message"] == text and text_of(json.loads(lines[1])) == text


@pytest.mark.parametrize("before, after", [
    (b"", b"\r\n"), (b"\n\n", b"\n"), (b"\r\n \t\r\n", b"\n"), (b"  ", b" \t\n"), (b"", b"\n\n\r\n\n")])
def test_blank_lines_and_crlf_are_tolerated(pipes: Pipes, before: bytes, after: bytes) -> None:
    """Choice: a terminal and a careless client may send them, and they can mean only one thing."""
    for number in range(2):
        pipes.write(before + json.dumps(call("echo", {"text": "x"}, number)).encode() + after)
        assert text_of(pipes.next()) == "x"


def test_lines_come_apart_wherever_the_pipe_cuts_them(pipes: Pipes) -> None:
    """MUST (stdio › stdio): only a newline delimits, not the end of a read; UTF-8 may be cut anywhere."""
    data = "".join(json.dumps(call("echo", {"text": f"é😀{number}"}, number), ensure_ascii=False) + "\n"
                   for number in range(3)).encode()
    for index in range(len(data)):
        pipes.write(data[index:index + 1])
    answers = {one["id"]: text_of(one) for one in (pipes.next() for _ in range(3))}
    assert answers == {0: "é😀0", 1: "é😀1", 2: "é😀2"}


def test_the_last_line_needs_no_newline(gated: Gated, log: Lines) -> None:
    """Choice: end of input ends the last line, so that `printf '…' | server` is answered."""
    pipes = Pipes(gated)
    pipes.write(json.dumps(call("echo", {"text": "x"})).encode())
    assert [text_of(one) for one in pipes.end()] == ["x"]


BAD_LINES = [
    (b"{", -32700), (b"hello", -32700), (b"\xff\xfe", -32700), (b"[" * 100_000, -32700),
    (b'{"jsonrpc":"2.0","id":1,"id":1,"method":"x"}', -32700), (b'{"jsonrpc":"2.0","id":NaN,"method":"x"}', -32700),
    (b"[]", -32600), (b"null", -32600), (b"[" + json.dumps(message("tools/list")).encode() + b"]", -32600),
    (b'{"jsonrpc":"2.0","id":1,"result":{}}', -32600), (b'{"jsonrpc":"2.0","id":null,"method":"tools/list"}', -32600),
    (b'{"jsonrpc":"2.0","id":1.5,"method":"x"}', -32600), (b'{"jsonrpc":"2.0","id":true,"method":"x"}', -32600),
    (b'{"id":7,"method":"tools/list"}', -32600),
]


@pytest.mark.parametrize("line, code", BAD_LINES, ids=[str(line[:30]) for line, _ in BAD_LINES])
def test_a_bad_line_gets_an_error_and_the_next_is_served(pipes: Pipes, line: bytes, code: int) -> None:
    """MUST (Overview › Error Responses): an error has the request's id, unless it could not be read."""
    pipes.write(line + b"\n")
    error = pipes.next()
    assert error["error"]["code"] == code
    readable = type(json.loads(line).get("id")) is int if code == -32600 and line[:1] == b"{" else False
    assert error.get("id", "none") == (json.loads(line)["id"] if readable else "none")
    pipes.call("echo", {"text": "next"}, "after")
    assert text_of(pipes.next()) == "next"


VALUES: list[Any] = [None, True, 1, 1.5, "x", "\ud800", [], ["x"], {}, {"a": []}]


@pytest.mark.parametrize("member", ["name", "uri", "taskId", "ref", "arguments", "cursor", "notifications", "_meta",
                                    "requestState", "inputResponses", "requestId", "reason"])
def test_whatever_a_params_member_is_the_reader_goes_on(pipes: Pipes, log: Lines, member: str) -> None:
    """MUST (Overview › Error Responses): each request is answered, whatever type a member has; no traceback."""
    methods = ["tools/call", "prompts/get", "resources/read", "tasks/get", "tasks/update", "completion/complete",
               "tools/list", "subscriptions/listen", "server/discover", "notifications/cancelled", "no/such"]
    requests = [message(method, {member: value}, number) for number, (method, value) in enumerate(
        (method, value) for method in methods for value in VALUES)]
    if member == "_meta":
        for one, value in zip(requests, VALUES * len(methods), strict=True):
            one["params"]["_meta"] = value
    pipes.send(*requests)
    answered: set[int] = set()
    while len(answered) < len(requests):
        one = pipes.next()
        if "id" in one:
            answered.add(one["id"])
        elif one["method"] == "notifications/subscriptions/acknowledged":
            answered.add(one["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"])
    assert "Traceback" not in log.text
    for number in answered:
        pipes.send(cancel(number))  # the subscriptions among them


def test_a_fault_of_the_reader_costs_one_line(pipes: Pipes, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: whatever goes wrong with a line, the next one is read, and may have the same id."""
    with monkeypatch.context() as patch:
        patch.setattr(pipes.server, "is_quick", None)
        pipes.send(message("tools/list", id=1))
        assert pipes.next()["error"]["code"] == -32603
    for id in (1, 2):
        pipes.send(message("tools/list", id=id))
        assert "result" in pipes.next()


def test_a_line_that_never_ends_costs_no_memory(pipes: Pipes) -> None:
    """Choice: a line has at most as many octets as an HTTP body; what is too long is skipped, not kept."""
    block = b"x" * 65536
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(128):
            pipes.write(block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < 3 * MAX_MESSAGE
    pipes.write(b"\n")
    error = pipes.next()
    assert "id" not in error and error["error"]["code"] in (-32700, -32600)
    pipes.call("echo", {"text": "next"})
    assert text_of(pipes.next()) == "next"


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_a_line_is_exact(pipes: Pipes, over: int) -> None:
    """Choice: a message of exactly the limit is served."""
    empty = json.dumps(call("echo", {"text": ""})).encode()
    text = "x" * (MAX_MESSAGE + over - len(empty))
    writer = threading.Thread(target=pipes.send, args=[call("echo", {"text": text})])
    writer.start()
    assert ("error" in pipes.next()) == bool(over)
    writer.join(PATIENCE)
    assert not writer.is_alive()


# ----------------------------------------------------------------------------------------------------- side by side


def test_requests_run_side_by_side(pipes: Pipes, gated: Gated) -> None:
    """MUST (stdio › Receiving Messages): responses are correlated by id, so that the quick overtake the slow."""
    for id in (1, "1"):
        pipes.call("build_report", {}, id)
        gated.wait_until_it_waits()
    pipes.call("echo", {"text": "quick"}, 2)
    answer = pipes.next()
    assert (answer["id"], text_of(answer)) == (2, "quick")
    gated.go.set()
    slow = [pipes.next(), pipes.next()]
    assert sorted((one["id"] for one in slow), key=str) in ([1, "1"], ["1", 1])
    assert [text_of(one) for one in slow] == ["finished"] * 2


def test_lines_of_different_requests_never_mix(pipes: Pipes) -> None:
    """MUST (stdio › Receiving Messages): all share one channel; a line longer than a pipe holds stays whole."""
    for id in range(8):
        pipes.call("echo", {"text": str(id) * 200_000}, id, progressToken=id)
    for _ in range(16):
        one = pipes.next()
        text = text_of(one) if "id" in one else one["params"]["message"]
        assert text == str(request_of(one)) * 200_000


def test_progress_and_log_come_before_the_response_if_asked_for(pipes: Pipes, gated: Gated) -> None:
    """MUST (Progress › Behavior Requirements): the same rules as over HTTP."""
    gated.go.set()
    pipes.call("build_report", {}, 1)
    assert pipes.next()["id"] == 1
    pipes.call("build_report", {}, 2, progressToken=0)
    told = pipes.next()
    assert told["method"] == "notifications/progress" and told["params"] == {"progressToken": 0, "progress": 1}
    assert pipes.next()["id"] == 2


def test_an_id_in_use_is_refused_and_the_first_request_is_answered(pipes: Pipes, gated: Gated) -> None:
    """MUST (Overview › Requests): the id matches no other request that has not been answered; "1" is not 1."""
    pipes.call("build_report", {}, 1)
    gated.wait_until_it_waits()
    pipes.call("echo", {"text": "twice"}, 1)
    error = pipes.next()
    assert (error["id"], error["error"]["code"]) == (1, -32600)
    pipes.call("echo", {"text": "other type"}, "1")
    assert text_of(pipes.next()) == "other type"
    gated.go.set()
    assert text_of(pipes.next()) == "finished"
    pipes.call("echo", {"text": "again"}, 1)  # answered: the id is free
    assert text_of(pipes.next()) == "again"


# ----------------------------------------------------------------------------------------------------- cancellation


@pytest.mark.parametrize("id", [1, 0, -5, "1", "", "é\n"])
def test_a_notification_cancels_the_request_that_it_names(pipes: Pipes, gated: Gated, log: Lines, id: Any) -> None:
    """MUST (stdio › Cancellation): no further messages for it; the server stops the work as soon as practical."""
    pipes.call("build_report", {}, id, progressToken="t")
    assert pipes.next()["params"]["progress"] == 1
    pipes.send(cancel(id))
    assert gated.cancelled.wait(PATIENCE)
    assert log.wait_for("[ref] build_report cancelled at step 2 (notifications/cancelled: enough)")
    pipes.call("echo", {"text": "next"}, "after")
    assert pipes.next()["id"] == "after"
    assert [line for line in log.lines() if "build_report" in line] == [
        "[ref] build_report cancelled at step 2 (notifications/cancelled: enough)"]


@pytest.mark.parametrize("id, other", [
    (1, "1"), (1, True), (1, 1.0), (1, 2), (1, None), (1, [1]), (1, {"id": 1}), ("1", 1), (0, False), (0, ""),
    (0, -0.0)])
def test_another_id_or_type_cancels_nothing(pipes: Pipes, gated: Gated, id: Any, other: Any) -> None:
    """SHOULD (Cancellation › Error Handling): unknown ids and malformed notifications are ignored, without a word."""
    pipes.call("build_report", {}, id)
    gated.wait_until_it_waits()
    pipes.send(cancel(other), call("echo", {"text": "read"}, "after"))
    assert pipes.next()["id"] == "after"  # so the cancellation has been read
    assert not gated.cancelled.is_set()
    gated.go.set()
    assert text_of(pipes.next()) == "finished"
    assert not gated.cancelled.is_set()


@pytest.mark.parametrize("note", [
    cancel(1), cancel("unknown"), {"jsonrpc": "2.0", "method": "notifications/cancelled"},
    {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {}},
    {"jsonrpc": "2.0", "method": "notifications/initialized"}, {"jsonrpc": "2.0", "method": "notifications/no such"},
], ids=["answered", "unknown", "no params", "no requestId", "legacy", "unknown method"])
def test_a_notification_is_never_answered(pipes: Pipes, note: dict[str, Any]) -> None:
    """MUST (Overview › Notifications): the receiver sends no response, whatever it thinks of it."""
    pipes.call("echo", {"text": "before"}, 1)
    assert pipes.next()["id"] == 1
    pipes.send(note, call("echo", {"text": "after"}, 2))
    assert pipes.next()["id"] == 2


@pytest.mark.parametrize("name", ["build_report", "echo", "wait"])
def test_a_cancellation_right_behind_its_request_is_in_time(pipes: Pipes, gated: Gated, name: str) -> None:
    """MUST (stdio › Cancellation): also when both come in one write, before the worker has begun."""
    gated.go.set()
    for id in range(30):
        request = call(name, {"text": "x"}, id, progressToken=id)
        pipes.send(request, cancel(id), message("tools/list", id="after"))
        before = list(iter(lambda: request_of(pipes.next()), "after"))
        assert set(before) <= {id}  # sent before the cancellation was read, or never


def test_a_cancelled_request_that_has_not_begun_stops_at_its_first_step(pipes: Pipes, gated: Gated, log: Lines) -> None:
    """MUST (stdio › Cancellation): nothing at all is sent for it, and the log says why."""
    pipes.send(call("build_report", {}, 1), cancel(1))
    line = re.compile(r"\[ref\] build_report cancelled at step [12] \(notifications/cancelled: enough\)")
    assert gated.cancelled.wait(PATIENCE)
    pipes.call("echo", {"text": "next"}, "after")
    assert pipes.next()["id"] == "after"
    with log.condition:
        assert log.condition.wait_for(lambda: any(map(line.fullmatch, log.lines())), PATIENCE)


def test_a_tool_that_does_not_look_is_not_heard_any_more(pipes: Pipes, gated: Gated) -> None:
    """MUST (stdio › Cancellation): no further messages for it, even if it comes to an end by itself."""
    pipes.call("wait", {}, 1)
    gated.wait_until_it_waits()
    pipes.send(cancel(1), call("echo", {"text": "read"}, 2))
    assert pipes.next()["id"] == 2
    gated.go.set()
    pipes.call("echo", {"text": "after"}, 3)
    assert pipes.next()["id"] == 3
    assert eventually(lambda: gated.seen)  # it was told as soon as it asked


def test_a_cancelled_subscription_says_nothing_more(pipes: Pipes, gated: Gated, log: Lines) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): subscriptions/listen is cancelled like any request."""
    for id in (7, "7"):
        pipes.send(listen(id))
        assert pipes.next()["method"] == "notifications/subscriptions/acknowledged"
    pipes.send(cancel(7))
    assert log.wait_for("[ref] subscriptions/listen ended (notifications/cancelled: enough)")
    gated.list_changed("tools")
    change = pipes.next()
    assert change["method"] == "notifications/tools/list_changed"
    assert change["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": "7"}
    pipes.send(cancel("7"))
    assert log.wait_for("[ref] subscriptions/listen ended (notifications/cancelled: enough)", 2)


def test_an_end_that_comes_late_leaves_the_next_request_with_the_same_id_alone(gated: Gated) -> None:
    """SHOULD (Cancellation › Error Handling): what races with a cancellation is ignored; a new request is not that."""
    source, sink = os.pipe()
    try:
        transport = StdioTransport(gated, source, sink, "alice")
        key = int, 7
        ended = StdioExchange(transport, key)
        current = transport.exchanges[key] = StdioExchange(transport, key)
        ended.cancel("notifications/cancelled")
        ended.end(b"{}")  # the keeper's, which had begun before
        assert transport.exchanges == {key: current}
        current.end(b"{}")
        assert transport.exchanges == {}
    finally:
        gated.store.close()
        os.close(source)
        os.close(sink)


# --------------------------------------------------------------------------------------------------- end of input


def test_end_of_input_answers_what_was_read(gated: Gated, log: Lines) -> None:
    """SHOULD (stdio › Shutdown): exit promptly at end of file; choice: after what was asked has been answered."""
    pipes = Pipes(gated)
    pipes.send(*(call("echo", {"text": str(id)}, id) for id in range(50)))
    answers = {one["id"]: text_of(one) for one in pipes.end()}
    assert answers == {id: str(id) for id in range(50)}


def test_end_of_input_ends_subscriptions_with_their_result(gated: Gated, log: Lines) -> None:
    """SHOULD (Subscriptions › Graceful Closure): the result of subscriptions/listen, with its subscriptionId."""
    pipes = Pipes(gated)
    for id in (1, "s"):
        pipes.send(listen(id))
        assert pipes.next()["method"] == "notifications/subscriptions/acknowledged"
    rest = pipes.end()
    results = {one["id"]: one["result"] for one in rest if "id" in one}
    assert results.keys() == {1, "s"}
    for id, result in results.items():
        assert result["resultType"] == "complete"
        assert result["_meta"]["io.modelcontextprotocol/subscriptionId"] == id
    assert {one["method"] for one in rest if "id" not in one} <= {"notifications/cancelled"}


def test_output_that_nobody_takes_does_not_keep_the_server(
        gated: Gated, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHOULD (stdio › Shutdown): promptly, even while a worker is stuck in the middle of a line."""
    monkeypatch.setattr(reference_server, "time", HastyClock())
    pipes = Pipes(gated)
    pipes.send(*(call("echo", {"text": "x" * 10_000}, id) for id in range(20)))
    os.close(pipes.input)
    pipes.thread.join(PATIENCE)
    stuck = pipes.thread.is_alive()
    os.close(pipes.output)  # frees the worker
    assert not stuck
    check_all_ended(pipes)


def test_a_request_that_gets_no_thread_is_refused_and_the_next_is_served(
        pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: as over HTTP, one request is lost, not the server; its id is free again."""
    def no_more(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(pipes.transport.workers, "run", no_more)
        pipes.call("echo", {"text": "x"}, 5)
        refused = pipes.next()
    assert refused["id"] == 5 and refused["error"]["code"] == -32603
    pipes.call("echo", {"text": "y"}, 5)
    assert text_of(pipes.next()) == "y"


def test_output_that_is_closed_ends_the_server(gated: Gated, log: Lines) -> None:
    """Choice: nobody can be answered any more; the calls in progress are cancelled, and nothing is said about it."""
    pipes = Pipes(gated)
    pipes.call("build_report")
    gated.wait_until_it_waits()
    os.close(pipes.output)
    pipes.call("echo", {"text": "x"}, 2)
    pipes.thread.join(PATIENCE)
    assert not pipes.thread.is_alive()
    assert gated.cancelled.wait(PATIENCE)
    os.close(pipes.input)
    check_all_ended(pipes)
    assert "Traceback" not in log.text


def serve_all(server: Server, source: int, sink: int, wire: Wire | None = None) -> int:
    """The exit status of a transport that reads to the end; nobody reads or writes these descriptors afterwards."""
    transport = StdioTransport(server, source, sink, "anonymous", wire)
    status = transport.serve()
    assert eventually(lambda: not transport.exchanges and not transport.outbox.behind)
    assert eventually(lambda: "stdio reader" not in {one.name for one in threading.enumerate()})
    for descriptor in (source, sink):
        os.close(descriptor)
    server.store.close()
    return status


def test_output_that_is_closed_on_a_writer_in_the_middle_of_a_line_ends_the_server(gated: Gated, log: Lines) -> None:
    """Choice: whoever finds out, and although nothing more is to be sent; the loss is told, and the status is 1."""
    pipes = Pipes(gated)
    pipes.call("echo", {"text": "x" * 500_000})
    assert select.select([pipes.output], [], [], PATIENCE)[0]
    assert eventually(lambda: bool(pipes.transport.outbox.behind))
    os.close(pipes.output)
    pipes.thread.join(PATIENCE)
    assert not pipes.thread.is_alive()
    assert log.lines()[-1] == "[ref] stdout cannot be written: what was to be sent is lost"
    os.close(pipes.input)
    check_all_ended(pipes)


def check_all_ended(pipes: Pipes) -> None:
    """No worker has anything left to write."""
    assert eventually(lambda: not pipes.transport.exchanges)
    os.close(pipes.sink)
    pipes.server.store.close()


# ------------------------------------------------------------------------------------------------- as a process

PRINTS = """
import os, subprocess, sys
from reference_server import Server, serve_stdio

server = Server("prints", "1")

@server.tool("prints", "Prints wherever it can.", {"type": "object"})
def prints(arguments, request):
    print("print")
    sys.stdout.write("sys.stdout\\n")
    sys.__stdout__.flush()
    os.write(1, b"descriptor 1\\n")
    child = "import sys; print('child'); print(repr(sys.stdin.read()), file=sys.stderr)"
    heard = subprocess.run([sys.executable, "-c", child], stderr=subprocess.PIPE, timeout=5).stderr
    return "the child heard " + heard.decode().strip()

serve_stdio(server)
print("after the end")
"""


@contextlib.contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server over its real stdin and stdout; killed if it takes longer than PATIENCE."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-X", "dev", *arguments], cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe,
                          env=os.environ | {"PYTHONPATH": str(ROOT)} | environment) as one, killed_at_last(one):
        yield one


SERVER = ("-W", "error", *SERVER_MODULE, "--stdio")


def exchange(server: subprocess.Popen[bytes], *messages: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Sends the messages, ends the input; all of stdout as messages, all of stderr as lines. The exit status is 0."""
    data = b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in messages)
    out, err = server.communicate(data, timeout=PATIENCE)
    assert server.returncode == 0, err
    assert out == b"" or out.endswith(b"\n")
    return [json.loads(line) for line in out.decode("utf-8").splitlines()], err.decode("utf-8").splitlines()


def test_nothing_but_messages_ever_goes_to_stdout() -> None:
    """MUST (stdio › stdio): not what a tool prints, not what its child prints; and the child reads no messages."""
    with process("-c", PRINTS) as server:
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(call("prints", {}, 1)).encode() + b"\n")
        server.stdin.flush()
        assert text_of(json.loads(server.stdout.readline())) == "the child heard ''"
        [answer], stderr = exchange(server, message("tools/list", id=2))
    assert answer["id"] == 2
    for text in ("print", "sys.stdout", "descriptor 1", "child", "after the end"):
        assert text in stderr


def test_octets_are_utf_8_whatever_the_locale() -> None:
    """MUST (stdio › stdio): in and out, with LF alone; Python's idea of the locale must not matter."""
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with process(*SERVER, **ascii_only) as server:
        out, err = server.communicate("\r\n".join(["", json.dumps(
            call("get_weather", {"location": "Zürich 😀"}), ensure_ascii=False), ""]).encode(), timeout=PATIENCE)
    assert server.returncode == 0 and b"Traceback" not in err
    assert out.count(b"\n") == 1 and b"\r" not in out and "Zürich 😀".encode() in out


def test_the_environment_names_the_user(tmp_path: Path, log: Lines) -> None:
    """Choice: over stdio the user is $MCP_USER; another user's cart is answered like none."""
    state = str(tmp_path / "state")
    with process(*SERVER, "--state", state, MCP_USER="ann") as server:
        [cart], stderr = exchange(server, call("create_cart"))
    assert stderr == ["[ref] tools/call create_cart user=ann id=1 -> complete"]
    item = {"cartId": cart["result"]["structuredContent"]["cartId"], "sku": "tea"}
    for user, refused in (("bob", True), ("ann", False)):
        pipes = Pipes(demo_server(store=Store(state)), user)
        pipes.send(call("add_to_cart", item))
        [result] = pipes.end()
        assert result["result"].get("isError", False) == refused


def end_with_a_slow_call_and_a_subscription() -> tuple[list[Any], bytes]:
    """What a process still wrote to stdout and to stderr. TimeoutExpired if it did not end within two seconds."""
    with process(*SERVER) as server:
        assert server.stdin and server.stdout and server.stderr
        messages = [listen("s"), call("build_report", {"month": "May"}, 1, progressToken="t")]
        server.stdin.write(b"".join(json.dumps(one).encode() + b"\n" for one in messages))
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["method"] == "notifications/subscriptions/acknowledged"
        server.stdin.close()
        assert server.wait(2) == 0
        return [json.loads(line) for line in server.stdout], server.stderr.read()


@pytest.fixture(scope="module", autouse=True)
def ending() -> Iterator[Future[tuple[list[Any], bytes]]]:
    """That end takes its time; the other tests go on meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(end_with_a_slow_call_and_a_subscription)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_quietly(number: signal.Signals) -> None:
    """Choice: exit status 0 and no traceback; SIGTERM is what a client sends when closing the input is not enough."""
    with process(*SERVER) as server:
        assert server.stdin and server.stdout and server.stderr
        server.stdin.write(json.dumps(listen(1)).encode() + b"\n")
        server.stdin.flush()
        assert json.loads(server.stdout.readline())["method"] == "notifications/subscriptions/acknowledged"
        server.send_signal(number)
        assert server.wait(PATIENCE) == 0
        assert [line for line in server.stderr.read().splitlines() if not line.startswith(b"[ref] ")] == []


def test_a_closed_stdout_ends_the_process_with_a_sentence() -> None:
    """Choice: status 1, because an answer is lost; no traceback at the very end either."""
    with process(*SERVER) as server:
        assert server.stdin and server.stdout and server.stderr
        server.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps(message("tools/list")).encode() + b"\n")
            server.stdin.flush()
        assert server.wait(PATIENCE) == 1
        lines = server.stderr.read().splitlines()
        assert lines.count(b"[ref] stdout cannot be written: what was to be sent is lost") == 1
        assert [line for line in lines if not line.startswith(b"[ref] ")] == []


def test_end_of_input_ends_the_process_even_with_a_slow_call_and_a_subscription(
        ending: Future[tuple[list[Any], bytes]]) -> None:
    """SHOULD (stdio › Shutdown): promptly, here within two seconds, and with exit status 0."""
    rest, stderr = ending.result(PATIENCE)
    assert [one["result"]["resultType"] for one in rest if one.get("id") == "s"] == ["complete"]
    assert not any(one.get("id") == 1 for one in rest)
    assert b"Traceback" not in stderr


# ------------------------------------------------------------------------------------ whatever a parent hands over


BLANK = b" " * 4095 + b"\n"


@pytest.fixture
def gone(gated: Gated, log: Lines) -> Iterator[Pipes]:
    """The server over pipes whose output is full from the start; the test empties it."""
    pipes = Pipes(gated)
    os.set_blocking(pipes.sink, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipes.sink, BLANK)
    os.set_blocking(pipes.sink, True)
    yield pipes
    gated.go.set()


@pytest.mark.parametrize("line", [b"this is no JSON", b"[]", json.dumps(message("server/discover", id=9)).encode(),
                                  json.dumps(call("echo", {"text": "x" * 100_000}, 9)).encode()], ids=[
                                      "no JSON", "an array", "a quick request", "a long answer"])
def test_a_full_output_keeps_nobody_from_reading(gone: Pipes, gated: Gated, log: Lines, line: bytes) -> None:
    """MUST (stdio › Cancellation): whoever reads the input never waits for the output, so a cancellation is heard."""
    gone.call("build_report", {}, 1)
    gated.wait_until_it_waits()
    gone.write((line + b"\n") * 3)
    gone.send(cancel(1))
    assert gated.cancelled.wait(PATIENCE)
    answers = [json.loads(next(one for one in iter(gone.line, b"") if one != BLANK)) for _ in range(3)]
    assert all("error" in one or one["id"] == 9 for one in answers)
    assert gone.end() == []


def test_a_method_that_says_more_than_is_read_waits(
        gone: Pipes, gated: Gated, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: what waits for a reader is bounded, whoever says it; a cancellation ends that wait too."""
    monkeypatch.setattr(reference_server, "MAX_WAITING", 100_000)
    stopped = threading.Event()

    @gated.tool("floods", "Reports without end.", ANYTHING)
    def floods(arguments: dict[str, Any], request: Request) -> str:
        try:
            for step in range(1, 100_000):
                request.progress(step, message="x" * 10_000)  # a hundred at once
        finally:
            stopped.set()
        return "all was taken"

    gone.call("floods", {}, 1, progressToken="t")
    assert eventually(lambda: gone.transport.outbox.weight > 100_000)
    assert not stopped.wait(0.05) and gone.transport.outbox.weight < 120_000
    gone.transport.exchanges[int, 1].cancel("enough")
    assert stopped.wait(PATIENCE)
    taker = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(gone.output, 65536), b"")])
    taker.start()
    os.close(gone.input)
    gone.thread.join(PATIENCE)
    assert not gone.thread.is_alive()
    os.close(gone.sink)
    taker.join(PATIENCE)
    os.close(gone.output)
    os.close(gone.source)
    gone.server.store.close()


def test_at_the_end_of_input_answers_wait_for_a_reader_that_comes_late(gone: Pipes, log: Lines) -> None:
    """Choice: a thousand calls from a file, and a reader that begins when they have all been read, lose nothing."""
    count = 1000
    gone.send(*(call("echo", {"text": "x" * 200}, id) for id in range(count)))
    os.close(gone.input)
    assert gone.transport.over.wait(PATIENCE)
    lines = b""
    while lines.count(b"}\n") < count:
        assert select.select([gone.output], [], [], PATIENCE)[0]
        lines += os.read(gone.output, 65536)
    answers = [json.loads(one) for one in lines.split(b"\n") if one.strip()]
    assert sorted(one["id"] for one in answers) == list(range(count))
    gone.thread.join(PATIENCE)
    assert not gone.thread.is_alive() and gone.transport.outbox.behind == 0
    os.close(gone.sink)
    os.close(gone.output)
    os.close(gone.source)
    gone.server.store.close()


def test_what_a_reader_never_takes_is_told_and_the_status_is_not_0(
        gone: Pipes, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: bounded, with a line on stderr; who started it sees that something is missing."""
    server, source = Gated(), os.open(os.devnull, os.O_RDONLY)
    transport = StdioTransport(server, source, gone.sink, "anonymous")
    transport.write(b"an answer\n")
    with monkeypatch.context() as patch:
        patch.setattr(reference_server, "time", HastyClock())
        assert transport.serve() == 1
    assert log.wait_for("[ref] nobody reads the output: 1 pieces of it are lost")
    while b"answer" not in gone.line():  # frees the writer
        pass
    os.close(source)
    server.store.close()
    assert gone.end() == []


@pytest.mark.parametrize("problem", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), Cancelled("mine")],
                         ids=lambda problem: type(problem).__name__)
def test_whatever_a_tool_raises_its_id_is_answered_and_free_again(
        pipes: Pipes, gated: Gated, log: Lines, problem: BaseException) -> None:
    """MUST (Overview › Error Responses): -32603 with the request's id, which the next request may have."""
    @gated.tool("raises", "Raises.", ANYTHING)
    def raises(arguments: dict[str, Any], request: Request) -> str:
        raise problem

    @gated.tool("unsayable", "Rejects with what JSON cannot say.", ANYTHING)
    def unsayable(arguments: dict[str, Any], request: Request) -> str:
        raise Rejection(-32602, "Wrong", {"value": float("nan")}, rule="choice: a test")

    for name in ("raises", "raises", "unsayable", "unsayable"):
        pipes.call(name, {}, 1)
        assert pipes.next() == {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "Internal error"}}
    assert eventually(lambda: not pipes.transport.exchanges)


def test_what_a_tool_leaves_behind_is_not_heard_after_its_response(pipes: Pipes, gated: Gated, log: Lines) -> None:
    """MUST (stdio › Receiving Messages): notifications relate to a request in progress; after its response nothing."""
    report, reported = threading.Semaphore(0), threading.Semaphore(0)
    problems: list[BaseException] = []

    def run(request: Request) -> None:
        while report.acquire(timeout=PATIENCE) and not gated.go.is_set():
            try:
                request.progress((request.reported or 0) + 1)
                request.log("emergency", "left behind")
                request.exchange.keep_alive()
            except BaseException as problem:
                problems.append(problem)
            reported.release()

    @gated.tool("leaves", "Leaves a thread behind.", ANYTHING)
    def leaves(arguments: dict[str, Any], request: Request) -> str:
        threads.append(threading.Thread(target=run, args=[request]))
        threads[0].start()
        return "left"

    threads: list[threading.Thread] = []
    pipes.call("leaves", {}, 1, progressToken="t", log_level="debug")
    assert text_of(pipes.next()) == "left"
    for id in (1, 2):  # the same id in use, or another
        pipes.call("build_report", {}, id, progressToken="new")
        assert pipes.next()["params"]["progressToken"] == "new"
        report.release()
        assert reported.acquire(timeout=PATIENCE)
        pipes.send(cancel(id), call("echo", {"text": "x"}, "after"))
        assert pipes.next()["id"] == "after"
    gated.go.set()
    report.release()
    threads[0].join(PATIENCE)
    assert problems == []


def test_non_blocking_pipes_are_served_like_others(gated: Gated, log: Lines) -> None:
    """Choice: O_NONBLOCK may come from a parent, which shares it; nobody sets or clears it, and none fails."""
    pipes = Pipes(gated)
    for descriptor in (pipes.source, pipes.sink):
        os.set_blocking(descriptor, False)
    for id in range(3):
        pipes.call("echo", {"text": "x" * 300_000}, id)
        assert len(text_of(pipes.next())) == 300_000
    assert not os.get_blocking(pipes.source) and not os.get_blocking(pipes.sink)
    assert pipes.end() == []


def test_an_input_that_cannot_be_read_ends_with_a_sentence(log: Lines) -> None:
    """Choice: a descriptor for writing, for example; the exit status is 1."""
    source, sink = os.open(os.devnull, os.O_WRONLY), os.open(os.devnull, os.O_WRONLY)
    assert serve_all(Gated(), source, sink) == 1
    assert log.text.startswith("[ref] stdin cannot be read: ") and len(log.lines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_an_output_without_space_ends_with_a_sentence(log: Lines) -> None:
    """Choice: an answer that cannot be written is a loss, so the exit status is 1; it is told once."""
    (source, to_server), sink = os.pipe(), os.open("/dev/full", os.O_WRONLY)
    os.write(to_server, json.dumps(call("echo", {"text": "x"})).encode() + b"\n{\n{\n")
    os.close(to_server)
    assert serve_all(Gated(), source, sink) == 1
    assert log.lines().count("[ref] stdout cannot be written: what was to be sent is lost") == 1


def test_the_wire_is_shown_over_stdio_too(gated: Gated, log: Lines) -> None:
    """Choice: --wire, on stderr; each message as it crosses, with the number of its request."""
    (source, to_server), (from_server, sink) = os.pipe(), os.pipe()
    os.write(to_server, json.dumps(call("echo", {"text": "x"}, 5, progressToken="t")).encode() + b"\n")
    os.close(to_server)
    assert serve_all(gated, source, sink, Wire()) == 0
    shown = [line for line in log.lines() if not line.startswith("[ref]")]
    arrows = [re.fullmatch(r"(-->|<--) #1 +[0-9.]+ ms  (.+)", line) for line in shown]
    assert [found and (found[1], json.loads(found[2]).get("id", "none")) for found in arrows] == [
        ("-->", 5), ("<--", "none"), ("<--", 5)]
    os.close(from_server)
