"""Over HTTP the closed response stream is the cancellation: whoever hangs up, however, is worked for no longer."""

import queue
import random
import re
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import PATIENCE, Connection, Lines, Running, eventually, message, octets, running

from reference_server import READ_AHEAD, Cancelled, Endpoint, Request, Server

ANYTHING: dict[str, Any] = {"type": "object"}


class Call:
    """One run of the tool, as the test sees it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.go = threading.Event()  # set by the test: the tool may return
        self.begun, self.stopped = threading.Event(), threading.Event()
        self.cancelled = False


class Recorder(Endpoint):
    """An endpoint that keeps what it has handed to the kernel."""

    sent: list[bytes]

    def put(self, octets: bytes) -> None:
        super().put(octets)
        self.sent.append(octets)


class Slow(Running):
    """A server with tools whose runs the test holds in its hand."""

    calls: queue.Queue[Call]

    def begin(self, connection: Connection, **arguments: Any) -> Call:
        """Sends a call and waits until the tool has done its steps."""
        connection.send(slow_call(**arguments))
        return self.next_call()

    def next_call(self) -> Call:
        call = self.calls.get(timeout=PATIENCE)
        assert call.begun.wait(PATIENCE)
        return call


def slow_call(name: str = "build_report", id: Any = 1, token: Any = None, level: str | None = None,
              **arguments: Any) -> bytes:
    """A tools/call as octets, with a progress token or a log level if given."""
    metadata = ({} if token is None else {"progressToken": token}) | ({} if level is None else {"log_level": level})
    return octets(message("tools/call", {"name": name, "arguments": arguments}, id, **metadata))


def slow_server(calls: queue.Queue[Call]) -> Server:
    server = Server("slow", "1")

    def run(request: Request, work: Callable[[Call], None]) -> str:
        call = Call(request)
        calls.put(call)
        try:
            work(call)
            return "finished"
        except Cancelled:
            call.cancelled = True
            raise
        finally:
            call.stopped.set()

    @server.tool("build_report", "Reports its steps, then waits.", ANYTHING)
    def build_report(arguments: dict[str, Any], request: Request) -> str:
        def work(call: Call) -> None:
            request.log("info", "begun")
            for step in range(1, arguments.get("steps", 0) + 1):
                request.progress(step, 10)
            call.begun.set()
            for _ in range(int(PATIENCE / 0.02)):
                if call.go.is_set():
                    return
                try:
                    request.sleep(0.02)
                except Exception:  # a careless tool: it swallows whatever is an Exception
                    continue

        return run(request, work)

    @server.tool("listens", "Waits for the event alone and returns, cancelled or not.", ANYTHING)
    def listens(arguments: dict[str, Any], request: Request) -> str:
        def work(call: Call) -> None:
            request.progress(1)
            call.begun.set()
            assert request.cancelled.wait(PATIENCE)
            assert call.go.wait(PATIENCE)

        return run(request, work)

    @server.tool("floods", "Reports more than any buffer holds.", ANYTHING)
    def floods(arguments: dict[str, Any], request: Request) -> str:
        def work(call: Call) -> None:
            call.begun.set()
            for step in range(1, 2000):
                request.progress(step, message="x" * 65536)

        return run(request, work)

    @server.tool("steps", "Steps of a few milliseconds until it is told to stop.", ANYTHING)
    def steps(arguments: dict[str, Any], request: Request) -> str:
        def work(call: Call) -> None:
            for step in range(1, 100_000):
                request.progress(step)
                call.begun.set()
                request.sleep(0.05)

        return run(request, work)

    @server.tool("quick", "Answers at once.", ANYTHING)
    def quick(arguments: dict[str, Any], request: Request) -> str:
        return "at once"

    return server


def serving(**settings: Any) -> Iterator[Slow]:
    """A running server, with these settings of its own."""
    calls: queue.Queue[Call] = queue.Queue()
    recording = type("Recording", (Recorder,), {"sent": []})
    with running(slow_server(calls), RequestHandlerClass=recording, **settings) as one:
        slow = Slow(*one)
        slow.calls = calls
        yield slow


@pytest.fixture(scope="module")
def slow() -> Iterator[Slow]:
    """The server as it is on this machine: with epoll or kqueue."""
    yield from serving()


@pytest.fixture(scope="module")
def slow_with_select() -> Iterator[Slow]:
    """The server on a system that has nothing better than select."""
    yield from serving(selecting=selectors.SelectSelector)


@pytest.fixture(params=["default", "select"])
def any_slow(request: pytest.FixtureRequest) -> Slow:
    """Each kind of selector."""
    chosen = request.getfixturevalue("slow" if request.param == "default" else "slow_with_select")
    assert isinstance(chosen, Slow)
    return chosen


def close(connection: Connection) -> None:
    """FIN: an orderly close."""
    connection.socket.close()


def reset(connection: Connection) -> None:
    """RST: the client's process was killed, or gave up with octets unread."""
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.socket.close()


HANG_UPS = pytest.mark.parametrize("hang_up", [close, reset])


def check_stopped(slow: Slow, call: Call, log: Lines, line: str) -> None:
    """The tool was told and stopped, its connection is gone, and its last line, its only one, says so."""
    assert call.stopped.wait(PATIENCE)
    assert call.cancelled and call.request.cancelled.is_set()
    assert call.request.reason == "stream closed"
    assert log.wait_for(line)
    assert eventually(lambda: not slow.http.connections)
    assert log.lines()[-1] == line
    assert len([one for one in log.lines() if "build_report" in one]) == 1


CALLS = [
    pytest.param({"token": "t", "steps": 2}, 2, 3, id="while it streams progress"),
    pytest.param({"level": "debug"}, 1, 1, id="while it streams, without a progress token"),
    pytest.param({"token": 0}, 0, 1, id="with a progress token, before the first octet"),
    pytest.param({"steps": 4}, 0, 5, id="for what would be a JSON answer"),
]


@HANG_UPS
@pytest.mark.parametrize("arguments, events, step", CALLS)
def test_a_hang_up_stops_the_tool(slow: Slow, log: Lines, hang_up: Callable[[Connection], None],
                                  arguments: dict[str, Any], events: int, step: int) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): a disconnect cancels, whatever has been sent so far."""
    with slow.connect() as connection:
        call = slow.begin(connection, **arguments)
        if events:
            assert connection.head()[0] == 200
            stream = connection.events()
            assert [next(stream)["method"] for _ in range(events)]
        sent = len(slow.http.RequestHandlerClass.sent)  # type: ignore[attr-defined]
        hang_up(connection)
        check_stopped(slow, call, log, f"[ref] build_report cancelled at step {step} (stream closed)")
        assert len(slow.http.RequestHandlerClass.sent) == sent  # type: ignore[attr-defined]


@HANG_UPS
@pytest.mark.parametrize("arguments, events", [({"token": "t"}, 1), ({}, 0)])
def test_the_loop_sees_it_without_epoll_too(any_slow: Slow, log: Lines, hang_up: Callable[[Connection], None],
                                             arguments: dict[str, Any], events: int) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): on every system, streaming or silent."""
    test_a_hang_up_stops_the_tool(any_slow, log, hang_up, arguments | {"steps": 1}, events, 2)


def test_a_silent_stream_is_watched_too(slow: Slow, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """MUST (Streamable HTTP › Cancellation): closing a stream that has carried nothing but comments cancels."""
    monkeypatch.setattr(slow.http, "keep_alive", 0.02)
    with slow.connect() as connection:
        call = slow.begin(connection)
        assert connection.head()[1]["content-type"] == "text/event-stream"
        assert connection.read_until(b":\n\n\r\n")
        close(connection)
        check_stopped(slow, call, log, "[ref] build_report cancelled at step 1 (stream closed)")


@pytest.mark.parametrize("arguments, events", [({"token": 7, "steps": 3}, 3), ({"steps": 3}, 0)])
def test_a_half_closed_stream_ends_without_another_octet(
        slow: Slow, log: Lines, arguments: dict[str, Any], events: int) -> None:
    """MUST (Streamable HTTP › Cancellation): no further messages; a client that still reads sees the connection end."""
    with slow.connect() as connection:
        call = slow.begin(connection, **arguments)
        if events:
            assert connection.head()[0] == 200
            stream = connection.events()
            assert [next(stream)["params"]["progress"] for _ in range(events)] == [1, 2, 3]
            connection.read_until(b"\r\n")
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.read_to_end() == b""
        check_stopped(slow, call, log, "[ref] build_report cancelled at step 4 (stream closed)")


def test_a_half_closed_client_is_answered_if_the_answer_comes_at_once(slow: Slow, log: Lines) -> None:
    """Choice: only a call that waits is watched, so that `printf … | nc` gets its answer."""
    with slow.connect() as connection:
        connection.send(slow_call("quick"))
        connection.socket.shutdown(socket.SHUT_WR)
        reply = connection.reply()
        assert (reply.status, reply.message["result"]["content"][0]["text"]) == (200, "at once")
        assert connection.read_to_end() == b""
    assert log.lines() == ["[ref] tools/call quick user=anonymous id=1 -> complete"]


@HANG_UPS
def test_nothing_is_written_for_a_tool_that_returns_in_spite_of_it(
        slow: Slow, log: Lines, hang_up: Callable[[Connection], None]) -> None:
    """MUST (Streamable HTTP › Cancellation): no further messages, not even a result that is ready."""
    with slow.connect() as connection:
        call = slow.begin(connection, name="listens", token="t")
        assert connection.head()[0] == 200
        assert next(connection.events())["params"]["progress"] == 1
        sent = len(slow.http.RequestHandlerClass.sent)  # type: ignore[attr-defined]
        hang_up(connection)
        assert call.request.cancelled.wait(PATIENCE)
        call.go.set()
        assert log.wait_for("[ref] listens cancelled at step 2 (stream closed)")
        assert eventually(lambda: not slow.http.connections)
        assert not call.cancelled  # the tool itself was not interrupted
        assert len(slow.http.RequestHandlerClass.sent) == sent  # type: ignore[attr-defined]
        assert len(log.lines()) == 1


@HANG_UPS
def test_a_hang_up_after_earlier_requests_on_the_connection_is_seen(
        slow: Slow, log: Lines, hang_up: Callable[[Connection], None]) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): also on a kept connection, which was watched before."""
    with slow.connect() as connection:
        for number in range(3):
            assert connection.call("tools/call", {"name": "quick", "arguments": {}}, id=number).status == 200
            first = slow.begin(connection, id=f"streamed {number}", token=number, steps=1)
            first.go.set()
            assert connection.reply().message["result"]["content"][0]["text"] == "finished"
            assert not first.request.cancelled.is_set()
        with log.condition:
            log.text = ""
        call = slow.begin(connection, id=9, steps=1)
        hang_up(connection)
        check_stopped(slow, call, log, "[ref] build_report cancelled at step 2 (stream closed)")


@HANG_UPS
@pytest.mark.parametrize("token", [None, "t"])
def test_a_pipelined_request_does_not_hide_the_hang_up_and_is_not_served(
        slow: Slow, log: Lines, hang_up: Callable[[Connection], None], token: str | None) -> None:
    """MUST (Streamable HTTP › Cancellation): the octets of a next request, unread in the socket, change nothing."""
    with slow.connect() as connection:
        call = slow.begin(connection, token=token, steps=1)
        connection.send(slow_call("quick", id=2) * 2)
        assert not call.stopped.is_set() and not call.request.cancelled.is_set()
        if token:
            assert connection.head()[0] == 200
            assert next(connection.events())["params"]["progress"] == 1
        hang_up(connection)
        check_stopped(slow, call, log, "[ref] build_report cancelled at step 2 (stream closed)")
        assert log.lines() == ["[ref] build_report cancelled at step 2 (stream closed)"]


def test_a_pipelined_request_is_no_hang_up(any_slow: Slow, log: Lines) -> None:
    """RFC 9112 §9.3.2: a client may send the next request early; both are answered, in order."""
    with any_slow.connect() as connection:
        call = any_slow.begin(connection, token="t", steps=1)
        connection.send(slow_call("quick", id=2))
        call.go.set()
        assert connection.reply().message["result"]["content"][0]["text"] == "finished"
        assert connection.reply().message["id"] == 2
    assert not call.request.cancelled.is_set()


def test_other_requests_go_on(slow: Slow, log: Lines) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): of that request, and of no other with its id."""
    with slow.connect() as one, slow.connect() as other:
        call, second = slow.begin(one, token="t", steps=1), slow.begin(other, token="t", steps=1)
        close(one)
        assert log.wait_for("[ref] build_report cancelled at step 2 (stream closed)")
        assert call.cancelled and not second.request.cancelled.is_set()
        second.go.set()
        assert other.reply().message["result"]["content"][0]["text"] == "finished"


@HANG_UPS
def test_a_hang_up_ends_a_subscription(slow: Slow, log: Lines, hang_up: Callable[[Connection], None]) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): a subscription is a request like any other."""
    with slow.connect() as connection:
        connection.send(octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "s")))
        assert connection.head()[0] == 200
        assert next(connection.events())["method"] == "notifications/subscriptions/acknowledged"
        hang_up(connection)
        assert log.wait_for("[ref] subscriptions/listen ended (stream closed)")
        assert eventually(lambda: not slow.http.connections and not slow.server.subscriptions.open)
        assert len(log.lines()) == 1


def connect_with_a_small_window(port: int) -> Connection:
    """A client that can be sent little ahead of its reading."""
    connection = Connection(port)
    connection.socket.close()
    connection.socket = socket.socket()
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.socket.settimeout(PATIENCE)
    connection.socket.connect(("127.0.0.1", port))
    return connection


def test_a_client_that_does_not_read_for_the_write_timeout_has_hung_up(
        slow: Slow, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a write that blocks for the write timeout cancels, because such a client may as well be dead."""
    monkeypatch.setattr(slow.http, "write_timeout", 0.1)
    with connect_with_a_small_window(slow.port) as connection:
        call = slow.begin(connection, name="floods", token="t")
        assert call.stopped.wait(PATIENCE)
        assert call.cancelled and call.request.cancelled.is_set() and call.request.reason == "stream closed"
        close(connection)
        assert eventually(lambda: not slow.http.connections)
        assert len(log.lines()) == 1
        assert re.fullmatch(r"\[ref] floods cancelled at step \d+ \(stream closed\)", log.lines()[0])


@HANG_UPS
def test_a_hang_up_frees_a_tool_whose_write_blocks(
        slow: Slow, log: Lines, hang_up: Callable[[Connection], None]) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): a client with octets unread resets when it goes."""
    with connect_with_a_small_window(slow.port) as connection:
        call = slow.begin(connection, name="floods", token="t")
        assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200")
        hang_up(connection)
        assert call.stopped.wait(PATIENCE)
        assert call.cancelled and call.request.reason == "stream closed"
        assert eventually(lambda: not slow.http.connections)
        assert len(log.lines()) == 1


def test_a_client_that_leaves_in_the_middle_of_its_request_starts_nothing(slow: Slow, log: Lines) -> None:
    """RFC 9112 §8: an incomplete request is not served, and asks for no line in the log."""
    for count in (5, -1):
        with slow.connect() as connection:
            connection.send(slow_call()[:count])
    assert eventually(lambda: not slow.http.connections)
    assert slow.calls.empty() and log.lines() == []


def test_two_hundred_hang_ups_while_a_hundred_streams_are_open(slow: Slow, log: Lines) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): not one request runs on, whatever its step was at."""
    others = [slow.connect() for _ in range(100)]
    kept = [slow.begin(one, name="listens", token=number) for number, one in enumerate(others)]
    for _ in range(4):
        connections = [slow.connect() for _ in range(50)]
        for number, connection in enumerate(connections):
            connection.send(slow_call("steps", token=number if number % 2 else None))
        calls = [slow.next_call() for _ in connections]
        random.shuffle(connections)
        for connection in connections:  # each in some other moment of its step
            random.choice([close, reset])(connection)
        assert all(call.stopped.wait(PATIENCE) for call in calls)
        assert all(call.cancelled and call.request.reason == "stream closed" for call in calls)
    assert eventually(lambda: len(slow.http.connections) == len(others))
    assert eventually(lambda: len(log.lines()) == 200)
    assert all(re.fullmatch(r"\[ref] steps cancelled at step \d+ \(stream closed\)", line) for line in log.lines())
    assert not any(call.request.cancelled.is_set() for call in kept)
    for call, connection in zip(kept, others, strict=True):
        call.go.set()
        close(connection)
    assert all(call.stopped.wait(PATIENCE) for call in kept)


@HANG_UPS
@pytest.mark.parametrize("size", [1 << 10, 1 << 20, 3 << 20], ids=["1 KiB", "1 MiB", "3 MiB"])
def test_octets_behind_a_call_are_bounded_and_hide_no_hang_up(
        any_slow: Slow, log: Lines, hang_up: Callable[[Connection], None], size: int) -> None:
    """Choice: at most one further message is read ahead; more ends the request, or its client's end is never seen."""
    with any_slow.connect() as connection:
        call = any_slow.begin(connection)
        [held] = any_slow.http.connections
        connection.socket.setblocking(False)
        behind, sent = b"x" * size, 0
        while sent < size and select.select([], [connection.socket], [], 0.2)[1]:
            try:
                sent += connection.socket.send(behind[sent:])
            except ConnectionError:
                break
        too_much = size > any_slow.http.max_body + READ_AHEAD
        assert not too_much or call.stopped.wait(PATIENCE)
        assert len(held.inbox.received) <= any_slow.http.max_body + READ_AHEAD + 65536
        assert call.stopped.is_set() == too_much
        hang_up(connection)
        assert call.stopped.wait(PATIENCE)
    assert call.cancelled and call.request.reason == ("too much sent behind it" if too_much else "stream closed")
    assert eventually(lambda: not any_slow.http.connections)
    assert len(log.lines()) == 1
