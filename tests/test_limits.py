"""Slow, silent, greedy, many: such clients cost the others next to nothing, and nothing remains of them."""

import contextlib
import gc
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import PATIENCE, ROOT, Connection, Lines, Running, eventually, message, octets, running

import reference_server
from reference_server import RateLimit, Request, Server

QUICK = message("tools/call", {"name": "quick", "arguments": {}})
DISCOVER = message("server/discover")


def small_server(**options: Any) -> Server:
    server = Server("small", "1", **options)

    @server.tool("quick", "Answers at once.", {"type": "object"})
    def quick(arguments: dict[str, Any], request: Request) -> str:
        return "at once"

    @server.tool("long", "Answers at once, with more than any buffer holds.", {"type": "object"})
    def long(arguments: dict[str, Any], request: Request) -> str:
        return "x" * (16 << 20)

    return server


@pytest.fixture(scope="module")
def serving() -> Iterator[Running]:
    """The server of this file; tests change its limits for themselves."""
    with running(small_server()) as one:
        assert one.call("server/discover").status == 200
        gc.collect()
        yield one


@pytest.fixture(autouse=True)
def settled(serving: Running) -> Iterator[None]:
    """No test leaves a connection to the next one."""
    yield
    assert eventually(lambda: not serving.http.connections)


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def nothing_left(serving: Running) -> Iterator[None]:
    """Afterwards there are as few connections, descriptors and busy threads as before."""
    assert eventually(lambda: not serving.http.connections)
    before, threads = descriptors(), set(threading.enumerate())
    yield
    assert eventually(lambda: not serving.http.connections)
    assert eventually(lambda: descriptors() <= before)
    # a worker whose connection has ended may wait five seconds for the next one
    assert eventually(lambda: len(set(threading.enumerate()) - threads) <= serving.http.workers.idle)


# ------------------------------------------------------------------------------------------- clients that take time

WHOLE = octets(DISCOVER)
HEAD_ENDS = WHOLE.index(b"\r\n\r\n") + 4
CHUNKED = octets(DISCOVER, length=False, transfer_encoding="chunked")
STARTED = [
    pytest.param(WHOLE[:1], id="one octet"),
    pytest.param(WHOLE[:9], id="half a request line"),
    pytest.param(WHOLE[:HEAD_ENDS - 2], id="all but the blank line"),
    pytest.param(WHOLE[:HEAD_ENDS], id="a head and no body"),
    pytest.param(WHOLE[:-1], id="all but the last octet"),
    pytest.param(CHUNKED[:CHUNKED.index(b"\r\n\r\n") + 4] + b"5\r\n{", id="half a chunk"),
]


@pytest.mark.parametrize("start", STARTED)
def test_a_request_that_does_not_arrive_in_time_is_answered_408(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """RFC 9110 §15.5.9: the server did not receive a complete request in time, and closes the connection."""
    monkeypatch.setattr(serving.http, "request_timeout", 0.03)
    with nothing_left(serving), serving.connect() as connection:
        assert connection.call("server/discover").status == 200
        connection.send(start)
        reply = connection.reply()
        assert (reply.status, reply.fields["connection"]) == (408, "close")
        assert all("id" not in one and one["error"]["message"] for one in reply.messages)
        assert connection.read_to_end() == b""
    assert len([line for line in log.lines() if "408" in line]) == 1


LONG = octets(b" " * (1 << 20))
LONG_HEAD = octets(b"", **{f"X{number}": "x" * 1900 for number in range(30)})


@pytest.mark.parametrize("request_octets, sent, pause", [
    (LONG_HEAD, 0, 0.01), (LONG, LONG.index(b"\r\n\r\n") + 4, 0.01)], ids=["in the head", "in the body"])
def test_one_octet_now_and_then_is_not_progress(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch,
        request_octets: bytes, sent: int, pause: float) -> None:
    """Choice: what stands still is given up, and fewer than 500 octets a second are no more than that."""
    monkeypatch.setattr(serving.http, "request_timeout", 0.06)
    with nothing_left(serving), serving.connect() as connection:
        connection.send(request_octets[:sent])
        while not select.select([connection.socket], [], [], pause)[0]:
            connection.send(request_octets[sent:sent + 1])
            sent += 1
            assert sent < len(request_octets), "it was served in the end"
        assert connection.reply().status == 408


def test_what_arrives_slowly_but_steadily_is_served(serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a slow line is no attack: each request_timeout that brings enough octets gives as much time again."""
    monkeypatch.setattr(serving.http, "request_timeout", 0.25)
    began = time.monotonic()
    with serving.connect() as connection:
        for start in range(0, len(LONG), 4096):
            assert not select.select([connection.socket], [], [], 0.003)[0], "it was given up"
            connection.send(LONG[start:start + 4096])
        took = time.monotonic() - began
        assert connection.reply().status == 400  # a body of spaces is no JSON
    assert took > 2 * serving.http.request_timeout, "so slow that the time was given again"


@pytest.mark.parametrize("earlier", [0, 2])
def test_an_idle_connection_is_closed_without_a_word(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch, earlier: int) -> None:
    """RFC 9112 §9.5: a server may close an idle connection; it was asked nothing, so it says nothing."""
    with nothing_left(serving), contextlib.ExitStack() as stack:
        if earlier:
            connection = stack.enter_context(serving.connect())
            assert connection.call("server/discover").status == 200
        monkeypatch.setattr(serving.http, "idle_timeout", 0.05)
        if earlier:  # from its answer on, the new time counts
            assert connection.call("server/discover").status == 200
        else:
            connection = stack.enter_context(serving.connect())
        assert connection.read_to_end() == b""
    assert len(log.lines()) == earlier


@pytest.mark.parametrize("between", [b"\r\n", b"\r\n\r\n", b"\r", b"\r\n\r"], ids=repr)
def test_an_empty_line_between_requests_starts_no_clock(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch, between: bytes) -> None:
    """RFC 9112 §2.2: it belongs to no request, so that nothing has begun: no 408, and the idle time goes on."""
    monkeypatch.setattr(serving.http, "request_timeout", 0.02)
    with serving.connect() as connection:
        assert connection.call("server/discover").status == 200
        connection.send(between)
        assert not select.select([connection.socket], [], [], 0.06)[0]
        connection.send((b"\n" if between.endswith(b"\r") else b"") + WHOLE)
        assert connection.reply().status == 200
    with nothing_left(serving):
        monkeypatch.setattr(serving.http, "idle_timeout", 0.05)
        with serving.connect() as connection:
            connection.send(between)
            assert connection.read_to_end() == b""
    assert not any("408" in line for line in log.lines())


def test_the_idle_time_is_not_the_time_for_a_request(serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a client may think for longer than it may dawdle; the clock starts anew with the first octet."""
    monkeypatch.setattr(serving.http, "idle_timeout", 0.1)
    with serving.connect() as connection:
        connection.send(WHOLE[:7])
        assert not select.select([connection.socket], [], [], 0.13)[0]
        connection.send(WHOLE[7:])
        assert connection.reply().status == 200


def test_a_reader_that_never_reads_is_given_up(serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: an answer that nobody takes for the write timeout is dropped, and its thread freed."""
    monkeypatch.setattr(serving.http, "write_timeout", 0.05)
    with nothing_left(serving), socket.create_connection(("127.0.0.1", serving.port), PATIENCE) as client:
        client.sendall(octets(message("tools/call", {"name": "long", "arguments": {}})))
        assert log.wait_for("[ref] an answer is cut: its client has taken nothing for 0.05 s")
    assert log.lines() == ["[ref] tools/call long user=anonymous id=1 -> complete",
                           "[ref] an answer is cut: its client has taken nothing for 0.05 s"]


def test_a_reader_that_reads_slowly_but_steadily_gets_everything(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: the write timeout counts from the last octet that the client took, so that a slow line is no loss."""
    monkeypatch.setattr(serving.http, "write_timeout", 0.1)
    began, size = time.monotonic(), 0
    with nothing_left(serving), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", serving.port))
        client.sendall(octets(message("tools/call", {"name": "long", "arguments": {}}), connection="close"))
        while piece := client.recv(1 << 20):
            size += len(piece)
            threading.Event().wait(0.005)
    assert size > 16 << 20 and time.monotonic() - began > 2 * serving.http.write_timeout, "so slow that it counts"
    assert log.lines() == ["[ref] tools/call long user=anonymous id=1 -> complete"]


def test_a_client_that_is_gone_before_its_answer_leaves_nothing(serving: Running, log: Lines) -> None:
    """Choice: a reset is one quiet line at most, and no traceback."""
    with nothing_left(serving):
        for name in ["long"] + 20 * ["quick"]:
            with serving.connect() as connection:
                connection.send(octets(message("tools/call", {"name": name, "arguments": {}})) * 2)
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert "Traceback" not in log.text
    assert all(line.endswith("-> complete") for line in log.lines())


BAD: list[Callable[[Connection], Any]] = [
    lambda connection: None,
    lambda connection: connection.send(WHOLE[:20]),
    lambda connection: connection.send(WHOLE[:-1]),
    lambda connection: connection.send(octets(message("subscriptions/listen", {"notifications": {}}))),
]


def test_sixty_slow_clients_do_not_keep_the_others_waiting(serving: Running, log: Lines) -> None:
    """Choice: a thread for each connection, so that a slow one takes nobody else's turn."""
    with nothing_left(serving), contextlib.ExitStack() as bad:
        for number in range(60):
            BAD[number % len(BAD)](bad.enter_context(serving.connect()))
        assert eventually(lambda: len(serving.http.connections) == 60)
        for _ in range(20):
            assert serving.call_tool("quick").status == 200
        with serving.connect() as connection:
            for _ in range(20):
                assert connection.call("server/discover").status == 200


# --------------------------------------------------------------------------------------------- too many connections


def test_a_connection_too_many_is_told_so_and_when_to_come_back(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9110 §15.6.4: 503 with Retry-After, as a JSON-RPC error; the socket is not just dropped."""
    monkeypatch.setattr(serving.http, "max_connections", 2)
    with nothing_left(serving), serving.connect() as one, serving.connect() as two:
        assert one.call("server/discover").status == two.call("server/discover").status == 200
        with serving.connect() as three:
            reply = three.call("tools/call", {"name": "quick", "arguments": {}})
            assert (reply.status, reply.fields["connection"], reply.ended) == (503, "close", True)
            assert re.fullmatch("[1-9][0-9]*", reply.fields["retry-after"])
            assert isinstance(reply.message["error"]["code"], int) and reply.message["error"]["message"]
            assert three.read_to_end() == b""
        assert one.call("server/discover").status == 200
        one.socket.close()
        assert eventually(lambda: len(serving.http.connections) == 1)
        assert serving.call_tool("quick").status == 200


def test_each_of_several_bursts_gets_about_as_many_as_there_are_places(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a place is given up with its connection, so that the next burst finds as many; 503 for the rest."""
    monkeypatch.setattr(serving.http, "max_connections", 20)
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(serving.connect()) for _ in range(35)]
            for client in clients:
                client.send(octets(QUICK))
            statuses = [client.reply().status for client in clients]
        assert 15 <= statuses.count(200) <= 20 and statuses.count(200) + statuses.count(503) == 35


def test_a_connection_that_has_had_its_last_answer_gives_up_its_place(
        serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: it lingers until its client hangs up, for whom nobody else need wait."""
    monkeypatch.setattr(serving.http, "max_connections", 1)
    monkeypatch.setattr(serving.http, "linger_timeout", PATIENCE)
    with serving.connect() as one:
        one.send(octets(DISCOVER, connection="close"))
        assert one.reply().status == 200 and one.ended()
        with serving.connect() as two:
            assert two.call("server/discover").status == 200
        assert len(serving.http.connections) >= 1


def test_a_probe_takes_a_place_like_everything_else(serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: or connections without a place would live on by asking for /healthz alone."""
    monkeypatch.setattr(serving.http, "max_connections", 1)
    with serving.connect() as one:
        assert one.call("server/discover").status == 200
        reply = serving.exchange(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (reply.status, reply.fields["connection"]) == (503, "close")


def test_what_comes_beyond_twice_as_many_waits_to_be_accepted(
        serving: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: refusals cost a thread too; from twice the limit on, connections wait in the kernel, undropped."""
    monkeypatch.setattr(serving.http, "max_connections", 1)
    with nothing_left(serving), serving.connect() as one:
        assert one.call("server/discover").status == 200
        with serving.connect() as two, serving.connect() as three:
            assert eventually(lambda: len(serving.http.connections) == 2)
            three.send(octets(QUICK))
            assert one.call("server/discover").status == 200
            assert not select.select([three.socket], [], [], 0.05)[0]
            assert two.call("server/discover").status == 503
            two.socket.close()
            assert three.reply().status in (200, 503)


def test_a_thread_that_cannot_be_started_costs_one_request(
        serving: Running, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: when the system gives no more threads, the answer is 503, and the connection lives on."""
    with nothing_left(serving):
        run, refusals = serving.http.workers.run, [RuntimeError("can't start new thread")]

        def run_later(*arguments: Any) -> None:
            if refusals:
                raise refusals.pop()
            run(*arguments)

        monkeypatch.setattr(serving.http.workers, "run", run_later)
        with serving.connect() as connection:
            refused = connection.call("tools/call", {"name": "quick", "arguments": {}})
            assert (refused.status, refused.fields["retry-after"]) == (503, "1")
            assert connection.call("tools/call", {"name": "quick", "arguments": {}}).status == 200
        assert "Traceback" not in log.text


def test_a_quick_request_takes_no_thread_and_others_take_the_same(serving: Running) -> None:
    """Choice: a thread whose request is answered takes the next, because starting one costs more than most answers."""
    for _ in range(20):
        assert serving.call_tool("quick").status == 200
        assert eventually(lambda: not serving.http.connections and serving.http.workers.idle > 0)
        threads = set(threading.enumerate())
        with serving.connect() as connection:
            assert connection.call("server/discover").status == 200
            assert connection.call("tools/call", {"name": "quick", "arguments": {}}).status == 200
            assert set(threading.enumerate()) <= threads
        assert eventually(lambda: not serving.http.connections)


# ------------------------------------------------------------------------------------------------------- many calls


def test_a_user_who_calls_too_often_waits_and_nobody_else_does() -> None:
    """MUST (Tools › Security Considerations): rate limit tool invocations; 429 says when to come back."""
    with running(small_server(rate=(0.1, 3.0))) as serving:
        for _ in range(3):
            assert serving.call_tool("quick", user="ann").status == 200
        reply = serving.call_tool("quick", user="ann", id="four")
        assert reply.status == 429 and reply.fields["content-type"] == "application/json"
        assert re.fullmatch("[1-9]|10", reply.fields["retry-after"])
        assert reply.message["id"] == "four" and isinstance(reply.message["error"]["code"], int)
        assert serving.call_tool("quick", user="bob").status == 200
        assert serving.call_tool("quick").status == 200
        assert serving.call("tools/list", user="ann").status == 200  # only tool calls are counted


class Clock:
    """Stands in for the module `time`; its monotonic clock only goes on when told to."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_a_bucket_fills_again_up_to_its_brim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a token bucket, so that a burst is fine and a flood is not; Retry-After is never too early."""
    clock = Clock()
    monkeypatch.setattr(reference_server, "time", clock)
    limit = RateLimit(0.5, 2.0)
    assert [limit.seconds_to_wait("ann") for _ in range(4)] == [0, 0, 2, 2]
    clock.now += 1
    assert limit.seconds_to_wait("ann") == 1
    clock.now += 1
    assert [limit.seconds_to_wait("ann") for _ in range(2)] == [0, 2]
    clock.now += 1_000_000
    assert [limit.seconds_to_wait("ann") for _ in range(3)] == [0, 0, 2]


def test_the_buckets_of_users_long_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a full bucket says no more than none, so that invented user names fill no memory."""
    clock = Clock()
    monkeypatch.setattr(reference_server, "time", clock)
    limit = RateLimit(1.0, 2.0)
    for number in range(30_000):
        clock.now += 0.001
        assert limit.seconds_to_wait(f"user {number}") == 0
    assert len(limit.buckets) <= 12_002


# -------------------------------------------------------------------------------------------- out of descriptors


def test_out_of_descriptors_it_says_so_once_waits_and_goes_on() -> None:
    """Choice: connections wait in the kernel until one ends; the log is not filled with what it can read once."""
    command = 'ulimit -n 32; exec "$0" -X dev -W error -m reference_server --port 0'
    server = subprocess.Popen(["sh", "-c", command, sys.executable], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(PATIENCE, server.kill)
    watchdog.start()
    try:
        assert server.stderr
        port = int(re.findall(r":(\d+)/mcp", server.stderr.readline())[0])
        clients = [Connection(port) for _ in range(50)]
        assert server.stderr.readline() == "[ref] out of file descriptors: new connections wait\n"
        assert clients[0].call("server/discover").status == 200  # those that are connected are served
        late = Connection(port)
        late.send(octets(DISCOVER))
        assert not select.select([late.socket], [], [], 0.12)[0]
        for client in clients:
            client.socket.close()
        assert late.reply().status == 200
        late.socket.close()
        with Connection(port) as again:
            assert again.call("server/discover").status == 200
        server.terminate()
        assert server.wait(PATIENCE) == 0
        rest = server.stderr.read().splitlines()
        assert rest.count("[ref] out of file descriptors: new connections wait") <= 1  # once more while they went
        assert [line for line in rest if not line.startswith("[ref] ")] == []
    finally:
        watchdog.cancel()
        server.kill()
        server.wait(PATIENCE)
        assert server.stderr
        server.stderr.close()
