"""The parts of the carriers, each without a socket: inbox, outbox, workers, the exchange; and without a capability."""

import contextlib
import importlib.util
import json
import os
import select
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import PATIENCE, Lines, Recorder, eventually, message, octets, running

import reference_server
from headers import BadHead
from reference_server import Cancelled, Exchange, Inbox, Outbox, Request, Server, Wire, Workers
from reference_server import respond as respond_on

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def hurry() -> Iterator[None]:
    """Threads change places as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


# ------------------------------------------------------------------------------------------------------- the inbox

BODY = b'{"jsonrpc": "2.0"}'
HEAD = b"POST /mcp HTTP/1.1\r\nHost: a"
WHOLE = HEAD + b"\r\nContent-Length: %d" % len(BODY)
CODED = HEAD + b"\r\nTransfer-Encoding: chunked"
GET = b"GET /healthz HTTP/1.1\r\nHost: a"
Taken = list[tuple[bytes, bytes]]
REQUESTS: list[tuple[str, bytes, Taken]] = [
    ("a length", WHOLE + b"\r\n\r\n" + BODY, [(WHOLE, BODY)]),
    ("chunks", CODED + b"\r\n\r\n5\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nT: 1\r\n\r\n" % (
        BODY[:5], len(BODY[5:]), BODY[5:]), [(CODED, BODY)]),
    ("no body", GET + b"\r\n\r\n", [(GET, b"")]),
    ("empty lines before", b"\r\n\r\n" + GET + b"\r\n\r\n", [(GET, b"")]),
    ("two", WHOLE + b"\r\n\r\n" + BODY + GET + b"\r\n\r\n", [(WHOLE, BODY), (GET, b"")]),
    ("no length", HEAD + b"\r\nContent-Length: 0\r\n\r\n", [(HEAD + b"\r\nContent-Length: 0", b"")]),
]
TRAILING = [b"", b"\r\n", b"POS", GET + b"\r\n", WHOLE + b"\r\n\r\n" + BODY[:-1]]


def take(inbox: Inbox, pieces: list[bytes]) -> Taken:
    """The requests that come out of these pieces."""
    found = []
    for piece in pieces:
        inbox.received += piece
        while (one := inbox.next_request()) is not None:
            found.append((one[0].octets, one[1]))
    return found


@pytest.mark.parametrize("trailing", TRAILING, ids=repr)
@pytest.mark.parametrize("what, data, requests", REQUESTS, ids=[what for what, _, _ in REQUESTS])
def test_an_inbox_finds_the_same_requests_however_octets_are_cut(
        what: str, data: bytes, requests: Taken, trailing: bytes) -> None:
    """RFC 9112 §2.2: whole, octet by octet, in two pieces cut anywhere; what comes behind stays where it is."""
    both = data + trailing
    cuts = [[both], [both[index:index + 1] for index in range(len(both))]]
    cuts += [[both[:index], both[index:]] for index in range(len(both))]
    for pieces in cuts:
        inbox = Inbox(1000)
        assert take(inbox, pieces) == requests
        assert inbox.begun() == bool(trailing.strip(b"\r\n")) and not inbox.expected
        rest = {b"": b"", b"\r\n": b""}.get(trailing, trailing.partition(b"\r\n\r\n")[2] or trailing)
        assert bytes(inbox.received) == rest


@pytest.mark.parametrize("data, status", [
    (b"GET /\n", 400), (b"\x16", 400), (HEAD + b"\r\nX : 1\r\n\r\n", 400), (HEAD + b"\r\n\r\n", 411),
    (HEAD + b"\r\nContent-Length: 1001\r\n\r\n", 413), (CODED + b"\r\n\r\nx\r\n", 400),
    (CODED + b"\r\n\r\n3e9\r\n", 413), (b"GET /" + b"x" * 9000, 414), (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000, 431),
    (WHOLE + b"\r\nExpect: tea\r\n\r\n", 417)])
def test_an_inbox_refuses_broken_framing_however_octets_are_cut(data: bytes, status: int) -> None:
    """RFC 9112 §2.2: the same status, whether it comes whole or octet by octet, or with a request behind it."""
    for pieces in ([data], [data[index:index + 1] for index in range(len(data))], [data + GET + b"\r\n\r\n"]):
        with pytest.raises(BadHead) as refused:
            take(Inbox(1000), pieces)
        assert refused.value.status == status and str(refused.value)


def test_an_inbox_knows_who_waits_for_100() -> None:
    """RFC 9110 §10.1.1: from the head until the body is whole, and in HTTP/1.1 alone."""
    for version, expected in (("1.1", True), ("1.0", False)):
        inbox, head = Inbox(1000), WHOLE.replace(b"1.1", version.encode()) + b"\r\nExpect: 100-Continue\r\n\r\n"
        assert take(inbox, [head]) == [] and inbox.expected == expected
        assert len(take(inbox, [BODY])) == 1 and not inbox.expected


# ------------------------------------------------------------------------------------------------------ the outbox


class Sink:
    """What takes octets: `room` at once without waiting, everything from one who waits."""

    def __init__(self, room: Callable[[int], int]) -> None:
        self.room, self.taken, self.writers = room, bytearray(), 0
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def send_some(self, octets: bytes) -> int:
        if self.broken:
            raise BrokenPipeError
        size = min(len(octets), self.room(len(octets)))
        self.taken += octets[:size]
        return size

    def send_all(self, octets: bytes) -> None:
        assert self.gate.wait(PATIENCE)
        if self.broken:
            raise TimeoutError
        self.writers += 1
        assert self.writers == 1, "two writers at a time"
        for index in range(0, len(octets), 7):
            self.taken += octets[index:index + 7]
        self.writers -= 1


@pytest.mark.parametrize("room", [0, 1, 5, 10**9])
def test_an_outbox_sends_everything_in_order(room: int) -> None:
    """Choice: what is not taken at once is sent by one writer, before anything that is put later."""
    sink, workers = Sink(lambda size: room), Workers()
    outbox = Outbox(sink.send_some, sink.send_all, workers.run, lambda: None)
    sink.gate.clear()
    pieces = [b"<%d>" % number for number in range(50)]
    for piece in pieces:
        outbox.put(piece)
    assert (outbox.behind > 0) == (room < 3) and outbox.weight <= 50 * 4
    assert b"".join(pieces).startswith(bytes(sink.taken))
    sink.gate.set()
    assert eventually(lambda: not outbox.behind)
    assert bytes(sink.taken) == b"".join(pieces) and outbox.weight == 0 and not outbox.lost


def test_no_octet_of_many_threads_is_lost_doubled_or_reordered(hurry: None) -> None:
    """Choice: the queue counts as empty only when the writer has nothing in hand, or a put would overtake it."""
    count, names = 400, range(8)
    sizes = [0, 3, 10**9, 1, 0, 10**9, 7]
    calls = iter(range(10**9))
    sink, workers = Sink(lambda size: sizes[next(calls) % len(sizes)]), Workers()
    outbox = Outbox(sink.send_some, sink.send_all, workers.run, lambda: None)

    def put(name: int) -> None:
        for number in range(count):
            outbox.put(b"<%d:%d>" % (name, number))

    threads = [threading.Thread(target=put, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert eventually(lambda: not outbox.behind)
    found = bytes(sink.taken).removeprefix(b"<").removesuffix(b">").split(b"><")
    assert len(found) == count * len(names)
    for name in names:
        assert [one for one in found if one.startswith(b"%d:" % name)] == [b"%d:%d" % (name, n) for n in range(count)]


def test_an_outbox_tells_when_it_has_caught_up(hurry: None) -> None:
    """Choice: whoever waits for the end of an answer is called by the writer, after its last octet."""
    for _ in range(200):
        sink, workers, drained = Sink(lambda size: 1), Workers(), threading.Event()
        outbox = Outbox(sink.send_some, sink.send_all, workers.run, lambda: None)
        outbox.put(b"an answer")
        outbox.caught_up = drained.set
        if outbox.behind:  # as the loop asks, in this order
            assert drained.wait(PATIENCE)
        assert bytes(sink.taken) == b"an answer" and outbox.behind == 0


@pytest.mark.parametrize("waiting", [True, False], ids=["while it waits", "at once"])
def test_an_outbox_whose_reader_is_gone_says_so_from_then_on(waiting: bool) -> None:
    """Choice: once lost, nothing is kept and every put fails, whatever way the loss was found."""
    sink, workers = Sink(lambda size: 0 if waiting else 10**9), Workers()
    outbox, caught_up = Outbox(sink.send_some, sink.send_all, workers.run, lambda: None), threading.Event()
    outbox.caught_up = caught_up.set
    sink.broken = not waiting
    sink.gate.clear()
    with contextlib.nullcontext() if waiting else pytest.raises(OSError):
        outbox.put(b"first")
    sink.broken = True
    sink.gate.set()
    assert not waiting or caught_up.wait(PATIENCE)
    assert outbox.lost and outbox.behind == 0
    for _ in range(3):
        with pytest.raises(OSError):
            outbox.put(b"later")
    assert outbox.behind == 0 and bytes(sink.taken) == b""


def test_an_outbox_without_a_thread_is_lost() -> None:
    """Choice: half an answer is worse than none; the connection ends."""
    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    outbox = Outbox(lambda octets: 1, lambda octets: None, none_left, lambda: None)
    with pytest.raises(OSError):
        outbox.put(b"first")
    assert outbox.lost


# ----------------------------------------------------------------------------------------------------- the workers


def test_workers_do_every_job_once_and_are_used_again(hurry: None) -> None:
    """Choice: a thread whose job is done takes the next; a job is never left to one that has given up."""
    workers, done = Workers(), []
    before = set(threading.enumerate())  # some of which may end meanwhile
    for number in range(300):
        workers.run(done.append, number)
    assert eventually(lambda: len(done) == 300) and sorted(done) == list(range(300))
    assert eventually(lambda: workers.idle == len(set(threading.enumerate()) - before))
    idle = workers.idle
    for number in range(50):
        workers.run(done.append, number)
        assert eventually(lambda: len(done) == 301 + number and workers.idle == idle)  # noqa: B023


def test_a_worker_survives_a_job_that_fails(log: Lines) -> None:
    """Choice: the fault is logged, and the thread takes the next job."""
    workers, done = Workers(), threading.Event()

    def fails() -> None:
        raise ValueError("x\ny")

    workers.run(fails)
    assert log.wait_for("[ref] ValueError: x\\ny") and eventually(lambda: workers.idle == 1)
    threads = threading.active_count()
    workers.run(done.set)
    assert done.wait(PATIENCE) and threading.active_count() == threads


def test_a_job_promised_to_a_worker_that_gives_up_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: between the end of its patience and its leave, a worker looks whether it has been counted on."""
    workers, done, jobs = Workers(), threading.Event(), []

    class Impatient:
        """A queue whose first wait ends in vain, while a job comes."""

        def put(self, job: Any) -> None:
            jobs.append(job)

        def get(self, timeout: float | None = None) -> Any:
            if timeout is not None and not jobs:
                workers.run(done.set)
                raise reference_server.queue.Empty
            return jobs.pop(0)

    monkeypatch.setattr(workers, "jobs", Impatient())
    workers.run(lambda: None)
    assert done.wait(PATIENCE)


# ---------------------------------------------------------------------------------------------------- the exchange


def answered(script: Callable[[Request], Any], exchange: Exchange) -> dict[str, Any] | None:
    """The response to a call of this tool, without a transport."""
    server = Server("any", "1")
    server.tool("play", "Plays.", {"type": "object"})(lambda arguments, request: script(request) or "the end")
    try:
        answer = respond_on(server, message("tools/call", {"name": "play"}, progressToken="t"), exchange, "anonymous")
    finally:
        server.store.close()
    return json.loads(answer.body) if answer else None


def test_an_exchange_carries_what_any_thread_of_the_tool_reports(hurry: None) -> None:
    """Choice: its lock keeps messages whole and in order; progress only ever increases."""
    exchange = Recorder()

    def script(request: Request) -> None:
        threads = [threading.Thread(target=lambda name=name: [
            request.emit({"method": "x", "params": {"name": name, "n": n}}) for n in range(100)]) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)

    assert answered(script, exchange)
    assert len(exchange.messages) == 400
    for name in range(4):
        assert [one["params"]["n"] for one in exchange.messages if one["params"]["name"] == name] == list(range(100))


def test_after_its_end_an_exchange_is_silent_from_every_thread() -> None:
    """Choice: also for the thread that ran the method, which may run another by now."""
    exchange = Recorder()
    kept: list[Request] = []
    assert answered(kept.append, exchange)
    exchange.over = True  # the carrier has sent the answer
    exchange.cancel("stream closed")
    kept[0].emit({"method": "x"})
    kept[0].progress(1)
    thread = threading.Thread(target=kept[0].progress, args=[2])
    thread.start()
    thread.join(PATIENCE)
    assert exchange.messages == []


def test_only_the_methods_thread_is_told_by_an_exception_that_nobody_waits(log: Lines) -> None:
    """Choice: Cancelled unwinds the method; elsewhere it would only be an uncaught exception."""
    exchange, problems = Recorder(), []

    def elsewhere(request: Request) -> None:
        try:
            request.emit({"method": "x"})
        except BaseException as problem:
            problems.append(problem)

    def script(request: Request) -> None:
        exchange.cancel("stream closed")
        thread = threading.Thread(target=elsewhere, args=[request])
        thread.start()
        thread.join(PATIENCE)
        with pytest.raises(Cancelled, match="stream closed"):
            request.emit({"method": "x"})

    assert answered(script, exchange) is None
    assert problems == [] and exchange.messages == []
    assert log.lines() == ["[ref] play cancelled at step 1 (stream closed)"]


def test_cancelled_is_set_whenever_somebody_first_looks(hurry: None) -> None:
    """Choice: the event is made when it is looked at; a cancellation at that moment is not lost."""
    for _ in range(500):
        exchange, start = Exchange(), threading.Barrier(2)

        def cancel(exchange: Exchange = exchange, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            exchange.cancel("gone")

        thread = threading.Thread(target=cancel)
        thread.start()
        start.wait(PATIENCE)
        assert exchange.cancelled.wait(PATIENCE)
        thread.join(PATIENCE)
        assert exchange.reason == "gone"


# -------------------------------------------------------------------------------------------------------- the wire


def shown(log: Lines, text: str) -> str:
    """What --wire shows of a text."""
    with log.condition:
        log.text = ""
    Wire().show("-->", Exchange(), text)
    return log.text


@pytest.mark.parametrize("line", [
    "Authorization: Bearer s3cret", "authorization:s3cret", "AUTHORIZATION : s3cret", "Authorization s3cret",
    "Authorization=s3cret", "Authorization\ts3cret: s3cret", "Proxy-Authorization: Basic s3cret", "Cookie: a=s3cret",
    "Cookie: a=b; s3cret=s3cret", "Set-Cookie: s3cret", "Cookie2: s3cret", "X-Api-Key: s3cret", "X-Auth-Token: s3cret",
    " Authorization: s3cret", f"{' ' * 30}Authorization: s3cret", "X-Forwarded-Authorization: s3cret",
    "Authorization: Bearer\r\n s3cret", "Authorization:\r\n\ts3cret\r\n s3cret",
    "Authorization: s3cret\r\nAuthorization: s3cret",
    "X-Something-Long-Enough: aaaaaaaaaaaaaaaa\rAuthorization: s3cret", "\x1b[1mAuthorization: s3cret",
    "Authorization: \x00s3cret", "Authorization\x00: s3cret"], ids=repr)
def test_no_value_that_authenticates_is_shown(log: Lines, line: str) -> None:
    """Choice: whoever shows a screen shows no secret, however its line is spelled, folded, broken or repeated."""
    text = shown(log, f"POST /mcp HTTP/1.1\r\nHost: a\r\n{line}\r\nX-After: visible\r\n\n{{\"a\":1}}")
    assert "s3cret" not in text and "***" in text
    assert "POST /mcp HTTP/1.1" in text and "X-After: visible" in text and '{"a":1}' in text


@pytest.mark.parametrize("line", [
    'data: {"progressToken":"t","authorization":"none"}', "WWW-Authenticate: Bearer", "Mcp-Name: cookie",
    "Access-Control-Allow-Headers: Content-Type, Authorization", '{"jsonrpc":"2.0","method":"cookie"}'])
def test_what_does_not_authenticate_is_shown(log: Lines, line: str) -> None:
    """Choice: a lesson shows everything else."""
    assert shown(log, line).rstrip("\n").endswith(line)


@pytest.mark.parametrize("octets_", [
    b"POST /mcp HTTP/1.1\r\nHost: a\r\nAuthorization : s3cret\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer\r\n s3cret\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\nHost: a\r\nAuthorization s3cret\r\n\r\n", b"GET /\nAuthorization: s3cret\n",
    b"POST /mcp HTTP/1.1\r\nHost: a\r\nCookie: s3cret\r\nContent-Length: 2\r\n\r\n{}"], ids=repr)
def test_neither_the_wire_nor_the_log_shows_a_secret_of_a_refused_head(log: Lines, octets_: bytes) -> None:
    """Choice: a malformed line is shown too, and may hold the same secret."""
    with running(Server("any", "1"), wire=Wire()) as run:
        assert run.exchange(octets_).status >= 400
    assert "-->" in log.text and "***" in log.text and "s3cret" not in log.text


# ------------------------------------------------------------------------------------------- platforms with less


@pytest.fixture
def poorer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The server as it is on a system that has neither poll, epoll, kqueue, nor PIPE_BUF, and is not POSIX."""
    for module, names in ((select, ("poll", "epoll", "kqueue", "PIPE_BUF")),
                          (selectors, ("PollSelector", "EpollSelector", "KqueueSelector", "DevpollSelector"))):
        for name in names:
            monkeypatch.delattr(module, name, raising=False)
    monkeypatch.setattr(selectors, "DefaultSelector", selectors.SelectSelector)
    spec = importlib.util.spec_from_file_location("poorer_server", ROOT / "reference_server.py")
    assert spec and spec.loader
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    with monkeypatch.context() as system:
        system.setattr(os, "name", "nt")
        spec.loader.exec_module(module)
    sys.path[:] = path
    module.log_writer = reference_server.log_writer  # type: ignore[attr-defined]
    return module


def test_without_poll_and_posix_http_is_served(poorer: ModuleType, log: Lines) -> None:
    """Choice: Windows has select() for sockets alone, and shares no port by SO_REUSEADDR."""
    assert poorer.Selecting is selectors.SelectSelector and poorer.HttpServer.allow_reuse_address is False
    server = poorer.Server("poorer", "1")
    server.tool("long", "Long.", {"type": "object"})(lambda arguments, request: "x" * (8 << 20))
    http = poorer.HttpServer(server)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    with socket.create_connection(("127.0.0.1", http.port), PATIENCE) as client:
        client.sendall(octets(message("tools/call", {"name": "long", "arguments": {}}), connection="close"))
        size = 0
        while piece := client.recv(1 << 20):
            size += len(piece)
    assert size > 8 << 20 and http.max_connections == 400
    http.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    server.store.close()


def test_without_poll_stdio_is_served(poorer: ModuleType, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: where nobody can ask whether a pipe takes octets, the writer alone waits for it, in order."""
    def cannot_ask(*_: object) -> bool:
        raise OSError("an operation was attempted on something that is not a socket")

    monkeypatch.setattr(poorer, "ready_to_send", cannot_ask)
    assert poorer.PIPE_BUF == 512
    (source, to_server), (from_server, sink) = os.pipe(), os.pipe()
    server = poorer.Server("poorer", "1")
    server.tool("echo", "Echoes.", {"type": "object"})(lambda arguments, request: arguments["text"])
    transport = poorer.StdioTransport(server, source, sink, "anonymous")
    thread = threading.Thread(target=transport.serve)
    thread.start()
    calls = [message("tools/call", {"name": "echo", "arguments": {"text": "x" * 30_000}}, id) for id in range(20)]
    writer = threading.Thread(target=lambda: [os.write(to_server, json.dumps(one).encode() + b"\n") for one in calls])
    writer.start()
    received = b""
    while received.count(b"\n") < 20:
        received += os.read(from_server, 65536)
    writer.join(PATIENCE)
    os.close(to_server)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    answers = [json.loads(line) for line in received.splitlines()]
    assert sorted(one["id"] for one in answers) == list(range(20))
    assert all(len(one["result"]["content"][0]["text"]) == 30_000 for one in answers)
    for descriptor in (source, sink, from_server):
        os.close(descriptor)
    server.store.close()


# ------------------------------------------------------------------------------------------------- slow quick tools


@pytest.mark.parametrize("limit, named", [(-1.0, True), (PATIENCE, False)])
def test_a_quick_tool_that_holds_up_everybody_is_named(monkeypatch: pytest.MonkeyPatch, log: Lines, limit: float,
                                                       named: bool) -> None:
    """Choice: the loop waits for a quick tool, so its author is told when it takes too long; here, any time at all."""
    monkeypatch.setattr(reference_server, "SLOW_QUICK", limit)
    server = Server("slow", "1.0")
    server.tool("slow", "Is quick, or so it says.", {"type": "object"}, quick=True)(lambda arguments, request: "ok")
    with running(server) as run:
        assert run.exchange(octets(message("tools/call", {"name": "slow"}))).status == 200
        assert run.exchange(octets(message("tools/list"))).status == 200
    lines = [line for line in log.lines() if "held up everybody" in line]
    assert [line.partition(" is registered as quick")[0] for line in lines] == ["[ref] slow"] * named
