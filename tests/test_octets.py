"""HTTP on literal octets: what a client may send, and in what pieces, and exactly what comes back.

Everything goes over a raw socket, because HTTP libraries refuse to send some of it and repair the rest.
"""

import contextlib
import json
import os
import select
import selectors
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from support import META, PATIENCE, Connection, Running, eventually, running

import reference_server
from reference_server import HttpServer, Request, Server, takes
from sse import LAST_CHUNK

BODY = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {
    "name": "note", "arguments": {"text": "é"}, "_meta": META}}, ensure_ascii=False).encode()
FIELDS = (b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nAccept: application/json, text/event-stream\r\n"
          b"MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\n")
NAME = b"Mcp-Name: note\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
START = b"POST /mcp HTTP/1.1\r\n"
HEAD = START + FIELDS + NAME
GOOD = HEAD + LENGTH + b"\r\n" + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE_CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


class Notes(Server):
    """A server whose tools record what they were called with."""

    def __init__(self) -> None:
        super().__init__("notes", "1.0.0")
        self.notes: list[str] = []
        self.endings: list[str] = []
        self.tool("note", "Records a text.", takes(text={"type": "string"}))(self.note)
        self.tool("report", "Reports progress in an event of this size.", takes(size={"type": "integer"}))(self.report)
        self.tool("wait", "Waits until its client is gone.", takes())(self.wait)
        self.tool("flood", "Writes until nobody reads.", takes())(self.flood)

    def note(self, arguments: dict[str, Any], request: Request) -> str:
        """Answers at once."""
        self.notes.append(arguments["text"])
        return str(arguments["text"])

    def report(self, arguments: dict[str, Any], request: Request) -> str:
        """Answers with a stream."""
        request.progress(1, message="x" * arguments["size"])
        request.progress(2)
        return "reported"

    def wait(self, arguments: dict[str, Any], request: Request) -> str:
        """Writes nothing of its own accord."""
        self.notes.append("waits")
        try:
            request.sleep(60)
        finally:
            self.endings.append("wait")
        return "nobody left"

    def flood(self, arguments: dict[str, Any], request: Request) -> str:
        """Writes more than any buffer takes."""
        try:
            for number in range(10_000):
                request.progress(number, message="x" * 100_000)
        finally:
            self.endings.append("flood")
        return "all was read"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for all tests that need no limits of their own."""
    with running(Notes()) as run:
        yield run


@pytest.fixture
def run(shared: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The shared server, without notes; limits set with `monkeypatch` are undone afterwards."""
    server(shared).notes.clear()
    server(shared).endings.clear()
    return shared


def server(run: Running) -> Notes:
    """The server behind a port."""
    assert isinstance(run.server, Notes)
    return run.server


def call(name: str, arguments: dict[str, Any], version: bytes = b"HTTP/1.1") -> bytes:
    """A tools/call with a progress token, as octets."""
    params = {"name": name, "arguments": arguments, "_meta": META | {"progressToken": 1}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    lines = b"Mcp-Name: %b\r\nContent-Length: %d\r\n\r\n" % (name.encode(), len(body))
    return START.replace(b"HTTP/1.1", version) + FIELDS + lines + body


def assert_refused(run: Running, octets: bytes, status: int) -> None:
    """One answer with this status, in JSON or empty, then the end of the connection; nothing was executed."""
    with run.connect() as client:
        client.send(octets)
        reply = client.reply()
        assert reply.status == status, reply.body
        assert reply.fields["connection"] == "close"
        assert reply.fields.get("content-type", "application/json") == "application/json"
        assert client.ended(), "one request has one answer"
    assert server(run).notes == []


# --------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("line", [
    b"X-A : 1", b"X-A\t: 1", b"no colon", b": no name", b" X-A: folded", b"\tX-A: folded", b"X-A: 1\r\n folded",
    b"X-A: 1\rContent-Length: 0", b"X-A: 1\nContent-Length: 0", b"X-A: a\0b", b"X-A: a\x0bb", b"X-A: a\x7fb",
    b"X\0A: 1",
    "X-Ä: 1".encode(), b"X A: 1", b"X(A): 1", b"X/A: 1", b"\x00", b"X-A\r: 1", b"X-A: 1\r", b"\rX-A: 1"],
    ids=repr)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_line_that_is_no_field_line_is_refused(run: Running, line: bytes, place: str) -> None:
    """RFC 9112 §5: what breaks the grammar of a field line is answered with 400, and no field after it is lost."""
    lines = line + b"\r\n" + FIELDS if place == "first" else FIELDS + line + b"\r\n"
    assert_refused(run, START + lines + NAME + LENGTH + b"\r\n" + BODY, 400)


@pytest.mark.parametrize("line", [
    b"X-A:1", b"X-A:", b"X-A: \t ", b"X-A: \x80\xff", b"!#$%&'*+-.^_`|~09aZ: 1", b"X-A: a: b", b"X-A:\t1\t",
    b"x-a: 1\r\nX-A: 2"], ids=repr)
def test_a_legal_field_line_is_taken_however_odd(run: Running, line: bytes) -> None:
    """RFC 9112 §5: any token is a name; a value has visible characters, white space inside, and octets over 127."""
    reply = run.exchange(START + FIELDS + line + b"\r\n" + NAME + LENGTH + b"\r\n" + BODY)
    assert (reply.status, server(run).notes) == (200, ["é"])


@pytest.mark.parametrize(("value", "status"), [
    (b"note", 200), (b" \t note \t", 200), (b"note\xa0", 400), (b"\x85note", 400), (b"note\x1c", 400),
    (b"note\x0c", 400)], ids=repr)
def test_only_spaces_and_tabs_around_a_value_are_not_the_values_own(run: Running, value: bytes, status: int) -> None:
    """RFC 9110 §5.6.3: OWS is SP and HTAB; whatever else Python calls white space is the value's own or illegal."""
    reply = run.exchange(START + FIELDS + b"Mcp-Name:" + value + b"\r\n" + LENGTH + b"\r\n" + BODY)
    assert (reply.status, server(run).notes) == (status, ["é"] if status == 200 else [])


@pytest.mark.parametrize("line", [b"Host: 127.0.0.1\r\n", b"Host: localhost\r\n", LENGTH, b"Content-Length: 3\r\n",
                                  b"Transfer-Encoding: chunked\r\n"], ids=repr)
def test_a_field_that_must_be_single_is_single(run: Running, line: bytes) -> None:
    """RFC 9112 §3.2, §6.3: a second Host, a second length, or a length beside a coding is answered with 400."""
    assert_refused(run, HEAD + LENGTH + line + b"\r\n" + BODY, 400)


@pytest.mark.parametrize(("line", "status"), [
    (b"GET /mcp", 400), (b"GET  /mcp HTTP/1.1", 400), (b"GET /mcp  HTTP/1.1", 400), (b" GET /mcp HTTP/1.1", 400),
    (b"GET\t/mcp\tHTTP/1.1", 400), (b"GET /mcp HTTP/1.1 ", 400), (b"GET /a b HTTP/1.1", 400),
    (b"GET /mcp http/1.1", 400),
    (b"GET /mcp HTTP/1", 400), (b"GET /mcp HTTP/1.10", 400), (b"GET /mcp HTTP/01.1", 400), (b"GET /mcp HTTP/x.y", 400),
    (b"GET /mcp\xa0 HTTP/1.1", 400), (b"G(T /mcp HTTP/1.1", 400), (b"GET HTTP/1.1", 400), (b"/mcp HTTP/1.1", 400),
    (b"GET /mcp HTTP/0.9", 505), (b"GET /mcp HTTP/2.0", 505), (b"PRI * HTTP/2.0", 505), (b"GET /mcp HTTP/9.1", 505),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400), (b"\0", 400), (b"{\"jsonrpc\": \"2.0\"}", 400)], ids=repr)
def test_whatever_the_request_line_the_answer_has_a_status_line(run: Running, line: bytes, status: int) -> None:
    """RFC 9112 §3: one grammar; 505 for another major version; no answer goes out in the manner of HTTP/0.9."""
    assert_refused(run, line + b"\r\nHost: localhost\r\n\r\n", status)
    assert_refused(run, line + b"\r\n\r\n", status)


@pytest.mark.parametrize("head", [
    b"GET /healthz HTTP/1.1\nHost: localhost\n\n", b"GET /healthz HTTP/1.1\r\nHost: localhost\n\r\n", b"\n",
    b"\nGET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03", b"\x80"], ids=repr)
def test_what_no_head_can_begin_with_is_refused_before_its_end(run: Running, head: bytes) -> None:
    """RFC 9112 §2.2: a bare LF ends no line here; a TLS hello on this port is answered at once, not timed out."""
    assert_refused(run, head, 400)


def test_empty_lines_before_a_request_are_ignored(run: Running) -> None:
    """RFC 9112 §2.2: SHOULD ignore at least one empty line before the request line."""
    with run.connect() as client:
        for _ in range(2):
            client.send(b"\r\n\r\n" + GOOD)
            assert client.reply().status == 200


# --------------------------------------------------------------------------------------------------------- limits


def test_lines_and_fields_have_limits_that_are_reached_exactly(run: Running) -> None:
    """RFC 9112 §3, RFC 6585 §5: 8 KiB a line and 64 fields are taken; 414 and 431 answer one octet or field more."""
    target = 8192 - len(b"GET /healthz? HTTP/1.1")
    value = 8192 - len(b"X: ")
    for size, count, octets, status in (
            (target, 1, value, 200), (target + 1, 1, 1, 414), (1, 1, value + 1, 431), (1, 63, 1, 200), (1, 64, 1, 431)):
        head = b"GET /healthz?%b HTTP/1.1\r\nHost: localhost\r\n" % (b"a" * size)
        head += b"X: %b\r\n" % (b"x" * octets) * count
        if status == 200:
            assert run.exchange(head + b"\r\n").status == 200
        else:
            assert_refused(run, head + b"\r\n", status)


@pytest.mark.parametrize(("octets", "status"), [
    (b"GET /" + b"a" * 10_000, 414), (b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000, 431), (b"G" * 10_000, 414),
    (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 1000, 431), (b"GET / HTTP/1.1\r\n" + b"X: %b\r\n" % (b"x" * 8000) * 9, 431)],
    ids=["request line", "field line", "no line at all", "many fields", "all in all"])
def test_a_head_that_grows_too_large_is_refused_before_its_end(run: Running, octets: bytes, status: int) -> None:
    """RFC 9112 §3, RFC 6585 §5: no head is waited for that cannot be taken any more."""
    assert_refused(run, octets, status)


@pytest.mark.parametrize("value", [
    b"+5", b"-1", b"1_0", b"0x5", b"5.0", b"1e1", b"", b"5 5", b"5, 5", b"5;", "٣".encode(), b"\xb2"], ids=repr)
def test_a_length_is_ascii_digits(run: Running, value: bytes) -> None:
    """RFC 9110 §8.6: Content-Length = 1*DIGIT; whatever else int() takes is answered with 400."""
    assert_refused(run, HEAD + b"Content-Length: " + value + b"\r\n\r\n" + BODY + GOOD, 400)


@pytest.mark.parametrize("value", [str(1 << 20 | 1), "9" * 19, "9" * 5000], ids=["one more", "19 digits", "many"])
def test_a_length_over_the_limit_is_refused_unseen(run: Running, value: str) -> None:
    """RFC 9110 §15.5.14: 413 from the head alone, however long the number is."""
    assert_refused(run, HEAD + f"Content-Length: {value}\r\n\r\n".encode(), 413)


def test_the_limit_of_a_body_is_an_option(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a message of exactly the limit is taken, with a length or in chunks; one octet more is 413."""
    for limit, status in ((len(BODY), 200), (len(BODY) - 1, 413)):
        monkeypatch.setattr(run.http, "max_body", limit)
        for octets in (GOOD, CHUNKED + WHOLE_CHUNK,
                       CHUNKED + b"".join(b"1\r\n%c\r\n" % octet for octet in BODY) + b"0\r\n\r\n"):
            assert run.exchange(octets).status == status


# ------------------------------------------------------------------------------------------------- request bodies


@pytest.mark.parametrize("octets", [GOOD, CHUNKED + b"%x;a=b\r\n%b\r\n0\r\nX: 1\r\n\r\n" % (len(BODY), BODY)],
                         ids=["length", "chunked"])
def test_a_request_may_be_cut_anywhere(run: Running, octets: bytes) -> None:
    """RFC 9112 §2.2: a message is a sequence of octets; where they are cut on the way means nothing."""
    with run.connect() as client:
        for cut in range(1, len(octets)):
            client.send(octets[:cut])
            client.send(octets[cut:])
            assert client.reply().status == 200, cut
    assert server(run).notes == ["é"] * (len(octets) - 1)


class OneOctetAtATime:
    """A socket that gives one octet at a time, and is otherwise itself."""

    def __init__(self, connection: Any) -> None:
        self.whole = connection

    def recv(self, size: int) -> bytes:
        """One octet of those that were asked for."""
        octets: bytes = self.whole.recv(1)
        return octets

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


@pytest.mark.parametrize(("octets", "statuses"), [
    (GOOD * 2, [200, 200]), (b"\r\n" + GOOD, [200]), (CHUNKED + b"5\r\n%b\r\n%x\r\n%b\r\n00\r\n\r\n" % (
        BODY[:5], len(BODY) - 5, BODY[5:]) + GOOD, [200, 200]),
    (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + GOOD, [200, 200]), (b"GET /mcp HTTP/2.0\r\n\r\n", [505]),
    (HEAD + b"X : 1\r\n\r\n", [400])], ids=["two", "empty line", "chunked", "health", "version", "field"])
def test_each_octet_may_come_alone(
        run: Running, monkeypatch: pytest.MonkeyPatch, octets: bytes, statuses: list[int]) -> None:
    """RFC 9112 §2.2: octet by octet a request means what it means in one piece."""
    made = reference_server.Connection.__init__

    def make(self: Any, server: Any, connection: Any, place: bool) -> None:
        made(self, server, OneOctetAtATime(connection), place)

    monkeypatch.setattr(reference_server.Connection, "__init__", make)
    with run.connect() as client:
        client.send(octets)
        assert [client.reply().status for _ in statuses] == statuses


CODED = [
    [b"%x\r\n%b\r\n" % (len(BODY), BODY)], [b"%X\r\n%b\r\n" % (len(BODY), BODY)],
    [b"00%x ; name=\"va;lue\"\r\n%b\r\n" % (len(BODY), BODY)], [b"1\r\n%c\r\n" % octet for octet in BODY]]


@pytest.mark.parametrize("chunks", CODED, ids=["one", "upper case", "extension", "one octet each"])
@pytest.mark.parametrize("ending", [
    b"0\r\n\r\n", b"000\r\n\r\n", b"0;last\r\n\r\n", b"0\r\nTrailer: 1\r\nOther: 2\r\n\r\n"], ids=repr)
def test_a_chunked_body_is_decoded_and_the_next_request_found(run: Running, chunks: list[bytes], ending: bytes) -> None:
    """RFC 9112 §7.1: chunks, extensions and trailers, to the octet."""
    with run.connect() as client:
        client.send(CHUNKED + b"".join(chunks) + ending + GOOD)
        assert [client.reply().status, client.reply().status] == [200, 200]
    assert server(run).notes == ["é", "é"]


@pytest.mark.parametrize("chunks", [
    b"\r\n", b"x\r\n", b"-1\r\n", b"+1\r\n", b"0x1\r\n", b"1_0\r\n", b" 1\r\n{\r\n", b"1\n{\n0\n\n",
    b"1\r\n{}\r\n0\r\n\r\n", b"3\r\n{}\r\n0\r\n\r\n", b"1" * 17 + b"\r\n", b"1;\x00\r\n{\r\n", b"a" * 9000,
    b"1\r\n{\r\r0\r\n\r\n"],
    ids=lambda one: repr(one[:20]))
def test_broken_chunks_end_the_connection(run: Running, chunks: bytes) -> None:
    """RFC 9112 §7.1: where a chunk's end cannot be found the next request cannot be either: 400, close."""
    assert_refused(run, CHUNKED + chunks, 400)


@pytest.mark.parametrize("size", [b"100001", b"fffffff", b"f" * 16], ids=repr)
def test_a_chunk_over_the_limit_is_refused_before_it_has_come(run: Running, size: bytes) -> None:
    """RFC 9110 §15.5.14: 413 as soon as a chunk announces too much."""
    assert_refused(run, CHUNKED + size + b"\r\n", 413)


@pytest.mark.parametrize(("line", "status"), [
    (b"gzip", 501), (b"chunked, chunked", 501), (b"gzip, chunked", 501), (b"chunked;q=1", 501), (b"identity", 501),
    (b"xchunked", 501), (b"", 501), (b"\x0bchunked", 400), (b"CHUNKED", 200), (b" chunked\t", 200)], ids=repr)
def test_chunked_is_the_only_transfer_coding(run: Running, line: bytes, status: int) -> None:
    """RFC 9112 §6.1: SHOULD answer 501 to a coding that is not understood; the coding's name has no case."""
    octets = HEAD + b"Transfer-Encoding:" + line + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    if status == 200:
        assert run.exchange(octets).status == 200
    else:
        assert_refused(run, octets + GOOD, status)


def test_two_lines_of_transfer_coding_are_a_list(run: Running) -> None:
    """RFC 9110 §5.3: lines of one field are one value, so `chunked` twice is two codings."""
    assert_refused(run, HEAD + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 501)


# -------------------------------------------------------------------------------------------------- expectations

EXPECTING = HEAD + LENGTH + b"Expect: 100-continue\r\n"


@pytest.mark.parametrize("line", [b"100-continue", b"100-Continue"], ids=repr)
@pytest.mark.parametrize("framing", [LENGTH, b"Transfer-Encoding: chunked\r\n"], ids=["length", "chunked"])
def test_100_comes_at_once_and_the_answer_after_the_body(run: Running, line: bytes, framing: bytes) -> None:
    """RFC 9110 §10.1.1: a client that waits for 100 gets it as soon as the head is found good."""
    with run.connect() as client:
        for _ in range(2):
            client.send(HEAD + framing + b"Expect: " + line + b"\r\n\r\n")
            assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(BODY if framing == LENGTH else WHOLE_CHUNK)
            assert client.reply().status == 200


@pytest.mark.parametrize(("head", "status"), [
    (HEAD + b"Origin: http://evil.example\r\n" + LENGTH, 403), (HEAD.replace(b"/mcp", b"/other") + LENGTH, 404),
    (HEAD.replace(b"POST", b"PUT") + LENGTH, 405),
    (HEAD.replace(b"application/json\r\nA", b"text/plain\r\nA") + LENGTH, 415),
    (HEAD.replace(b"text/event-stream", b"text/plain") + LENGTH, 406), (HEAD + b"Authorization: x\r\n" + LENGTH, 401),
    (HEAD + b"Content-Length: 1000000000000\r\n", 413), (HEAD + b"Content-Length: x\r\n", 400)],
    ids=["origin", "path", "verb", "content type", "accept", "user", "size", "framing"])
def test_a_head_that_is_refused_gets_its_final_status_and_no_100(run: Running, head: bytes, status: int) -> None:
    """RFC 9110 §10.1.1: a request that its head alone condemns is answered before its body."""
    with run.connect() as client:
        client.send(head + b"Expect: 100-continue\r\n\r\n")
        reply = client.reply()
        assert (reply.status, reply.fields["connection"]) == (status, "close")
        assert client.ended()


@pytest.mark.parametrize("value", [b"tea", b"100-continue, tea", b"", b"100-continue=1"], ids=repr)
def test_any_other_expectation_cannot_be_met(run: Running, value: bytes) -> None:
    """RFC 9110 §10.1.1: 417 for an expectation that is not known here."""
    assert_refused(run, HEAD + LENGTH + b"Expect: " + value + b"\r\n\r\n" + BODY, 417)


def test_a_body_that_is_already_there_needs_no_100(run: Running) -> None:
    """RFC 9110 §10.1.1: MAY omit 100 when octets of the body have come."""
    with run.connect() as client:
        client.send(EXPECTING + b"\r\n" + BODY)
        assert client.reply().status == 200
        client.send(CHUNKED + WHOLE_CHUNK)
        assert client.reply().status == 200


@pytest.mark.parametrize("value", [b"100-continue", b"tea"], ids=repr)
def test_http_1_0_has_no_expectations(run: Running, value: bytes) -> None:
    """RFC 9110 §10.1.1: MUST ignore Expect in HTTP/1.0."""
    octets = (HEAD + LENGTH + b"Expect: " + value + b"\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    with run.connect() as client:
        client.send(octets + BODY)
        assert client.read_to_end().startswith(b"HTTP/1.1 200 ")


# --------------------------------------------------------------------------------------- one connection, many requests


def test_pipelined_requests_are_answered_in_order(run: Running) -> None:
    """RFC 9112 §9.3.2: MUST send the responses in the order in which the requests came."""
    texts = [f"text {number}" for number in range(10)]
    with run.connect() as client:
        client.send(b"".join(call("note", {"text": text}) for text in texts))
        assert [client.reply().message["result"]["content"][0]["text"] for _ in texts] == texts
    assert server(run).notes == texts


@pytest.mark.parametrize("system", ["epoll", "select"])
@pytest.mark.parametrize("before", [True, False], ids=["with the call", "while it runs"])
def test_a_pipelined_request_is_no_hang_up_and_hides_none(
        monkeypatch: pytest.MonkeyPatch, system: str, before: bool) -> None:
    """Choice: octets that wait behind a running call do not cancel it; the end of file behind them does."""
    chosen = selectors.DefaultSelector if system == "epoll" else selectors.SelectSelector
    with running(Notes(), selecting=chosen) as run:
        with run.connect() as client:
            client.send(call("report", {"size": 3}) + GOOD)
            assert [client.reply().message["result"]["content"][0]["text"] for _ in range(2)] == ["reported", "é"]
            client.send(call("wait", {}) + GOOD * before)
            assert eventually(lambda: server(run).notes == ["é", "waits"])
            client.send(GOOD)
            with run.connect() as other:
                other.send(call("wait", {}))
                assert eventually(lambda: server(run).notes == ["é", "waits", "waits"])
            assert eventually(lambda: server(run).endings == ["wait"]), "the other one's hang-up was not seen"
            assert server(run).endings == ["wait"], "octets were taken for a hang-up"
        assert eventually(lambda: server(run).endings == ["wait", "wait"]), "octets hid a hang-up"
        assert eventually(lambda: not run.http.connections)
        assert server(run).notes[3:] == [], "what came behind a call that was cancelled is not served"


def test_a_stream_is_followed_by_the_next_answer(run: Running) -> None:
    """RFC 9112 §7.1: the last chunk ends a stream, and the connection goes on."""
    with run.connect() as client:
        for _ in range(3):
            client.send(call("report", {"size": 10}))
            reply = client.reply()
            assert (reply.ended, len(reply.messages)) == (True, 3)
            client.send(GOOD)
            assert client.reply().fields["content-type"] == "application/json"


@pytest.mark.parametrize("refused", [
    GOOD.replace(b"/mcp", b"/other"), GOOD.replace(b"POST", b"PUT"), GOOD.replace(b"POST", b"GET"),
    GOOD.replace(b"Host", b"Origin: null\r\nHost"), GOOD.replace(b"application/json\r\nA", b"text/plain\r\nA"),
    GOOD.replace(b"Host", b"Authorization: x\r\nHost"), GOOD.replace(b'"2.0"', b'"1.0"'), GOOD.replace(BODY[-1:], b"!"),
    CHUNKED.replace(b"POST", b"DELETE") + WHOLE_CHUNK],
    ids=["path", "PUT", "GET", "origin", "content type", "user", "jsonrpc", "no JSON", "DELETE in chunks"])
def test_the_body_of_a_refused_request_is_not_taken_for_a_request(run: Running, refused: bytes) -> None:
    """RFC 9112 §9.3: an early answer does not leave the body to be read as the next request."""
    with run.connect() as client:
        client.send(refused + GOOD)
        assert client.reply().status >= 400
        assert client.reply().status == 200
    assert server(run).notes == ["é"]


@pytest.mark.parametrize(("line", "version", "stays"), [
    (b"", b"HTTP/1.1", True), (b"Connection: close\r\n", b"HTTP/1.1", False),
    (b"Connection: Close\r\n", b"HTTP/1.1", False),
    (b"Connection: x, close\r\n", b"HTTP/1.1", False), (b"Connection: x\r\nConnection: close\r\n", b"HTTP/1.1", False),
    (b"Connection: keep-alive\r\n", b"HTTP/1.1", True), (b"Connection: closed\r\n", b"HTTP/1.1", True),
    (b"Connection: not-close\r\n", b"HTTP/1.1", True), (b"", b"HTTP/1.0", False), (b"", b"HTTP/1.2", True)])
def test_a_connection_stays_unless_it_is_told_to_close(run: Running, line: bytes, version: bytes, stays: bool) -> None:
    """RFC 9112 §9.3: persistent unless the option `close`, a token of its own, or HTTP/1.0 says otherwise."""
    with run.connect() as client:
        client.send((HEAD + line + LENGTH + b"\r\n" + BODY).replace(b"HTTP/1.1", version))
        reply = client.reply()
        assert (reply.status, reply.fields.get("connection") != "close") == (200, stays)
        if stays:
            client.send(GOOD)
            assert client.reply().status == 200
        else:
            assert client.ended()


# ------------------------------------------------------------------------------------------------------- HTTP/1.0


def test_http_1_0_gets_json_and_needs_no_host(run: Running) -> None:
    """RFC 9112 §3.2: Host is required of HTTP/1.1 only; the answer ends with the connection."""
    octets = GOOD.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Host: 127.0.0.1\r\n", b"")
    with run.connect() as client:
        client.send(octets)
        reply = client.reply()
        assert (reply.status, reply.ended, reply.message["id"]) == (200, True, 1)
        assert client.ended()


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(run: Running) -> None:
    """RFC 9112 §6.1: MUST NOT send Transfer-Encoding to an HTTP/1.0 client."""
    with run.connect() as client:
        client.send(call("report", {"size": 5}, b"HTTP/1.0"))
        reply = client.reply()
    assert (reply.status, reply.fields["content-type"]) == (200, "text/event-stream")
    assert reply.fields["connection"] == "close"
    assert not {"transfer-encoding", "content-length"} & reply.fields.keys()
    assert reply.body.count(b"data: ") == len(reply.messages) == 3 and reply.body.endswith(b"\n\n")
    assert "result" in reply.message


def test_http_1_0_has_no_chunks(run: Running) -> None:
    """RFC 9112 §6.1: a transfer coding in HTTP/1.0 is a framing that cannot be trusted."""
    assert_refused(run, CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", 400)


# --------------------------------------------------------------------------------------------------- what is sent


@pytest.mark.parametrize(("octets", "status"), [
    (GOOD, 200), (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200), (GOOD.replace(b'"2.0"', b'"1.0"'), 400),
    (GOOD.replace(b"/mcp", b"/x"), 404), (b"HEAD /mcp HTTP/1.1\r\nHost: [::1]\r\n\r\n", 405),
    (b"OPTIONS /mcp HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n\r\n", 204), (b"\0", 400)],
    ids=["answer", "health", "error", "path", "HEAD", "preflight", "framing"])
def test_head_and_body_are_one_write(run: Running, octets: bytes, status: int) -> None:
    """Choice: one segment for one answer, so that no timer of TCP comes between head and body."""
    with run.connect() as client:
        client.send(octets)
        answer = client.socket.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0].startswith(b"HTTP/1.1 %d " % status)
    fields = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines[1:])}
    assert len(fields) == len(lines) - 1, "no field twice"
    assert len(body) == (0 if octets.startswith(b"HEAD") else int(fields.get(b"content-length", b"0")))
    assert fields[b"server"] == b"mcp-reference-server" and b"ython" not in head
    assert fields[b"date"].endswith(b" GMT")


def test_every_event_is_one_write_and_the_last_one_ends_the_stream(run: Running) -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): an event is flushed at once, in a chunk of its own."""
    with run.connect() as client:
        client.send(call("report", {"size": 10}))
        stream = client.read_until(LAST_CHUNK)
    head, _, chunks = stream.partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head and b"Content-Length" not in head
    assert b"Cache-Control: no-cache" in head and b"X-Accel-Buffering: no" in head
    found = []
    while chunks != LAST_CHUNK:
        size, _, chunks = chunks.partition(b"\r\n")
        found.append(chunks[:int(size, 16)])
        assert chunks[int(size, 16):][:2] == b"\r\n"
        chunks = chunks[int(size, 16) + 2:]
    assert all(one.startswith(b"data: {") and one.endswith(b"}\n\n") and one.count(b"\n") == 2 for one in found)
    assert [sorted(json.loads(one[6:]))[-1] for one in found] == ["params", "params", "result"]


def test_small_answers_wait_for_no_acknowledgement(run: Running) -> None:
    """Choice: TCP_NODELAY on every connection."""
    with run.connect() as client:
        client.send(GOOD)
        assert client.reply().status == 200
        (accepted,) = run.http.connections
        assert accepted.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# ------------------------------------------------------------------------------------------------ ends and hang-ups


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_client_that_sends_all_of_a_refused_body_can_still_read_why(run: Running, framing: str) -> None:
    """RFC 9112 §9.6: the server reads on for a while before it closes, so that no reset destroys its answer."""
    size = 32 << 20  # more than the buffers of TCP hold, so that a server that does not read on resets the connection
    body = b"x" * size
    octets = (HEAD + b"Content-Length: %d\r\n\r\n" % size + body if framing == "length"
              else CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, body))
    with run.connect() as client:
        client.send(octets)
        received = b""
        while piece := client.socket.recv(65536):  # a reset would raise here
            received += piece
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("sent", [
    b"", b"P", HEAD, HEAD + LENGTH + b"\r\n", GOOD[:-1], CHUNKED + b"5\r\n{", b"\r\n"], ids=[
    "nothing", "one octet", "half a head", "no body", "one octet less", "half a chunk", "an empty line"])
@pytest.mark.parametrize("end", ["close", "half-close", "reset"])
def test_a_client_may_leave_at_any_point_of_a_request(
        run: Running, capsys: pytest.CaptureFixture[str], sent: bytes, end: str) -> None:
    """Choice: who leaves before the request is complete gets no answer, and one line in the log at most."""
    with run.connect() as client:
        client.send(sent)
        if end == "reset":
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif end == "half-close":
            client.socket.shutdown(socket.SHUT_WR)
            assert client.read_to_end() == b""
    assert eventually(lambda: not run.http.connections)
    assert len(capsys.readouterr().err.splitlines()) <= 1
    assert server(run).notes == []


def test_an_idle_connection_is_closed_without_a_word(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9112 §9.8: MAY close an idle connection; there is no request that could be answered."""
    monkeypatch.setattr(run.http, "idle_timeout", 0.05)
    with run.connect() as fresh:
        assert fresh.read_to_end() == b""
    with run.connect() as used:
        used.send(GOOD)
        assert used.reply().status == 200
        assert used.read_to_end() == b""


def test_a_client_that_does_not_read_is_given_up(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a write that is blocked for the write timeout cancels the request and ends the connection."""
    monkeypatch.setattr(run.http, "write_timeout", 0.05)
    with run.connect() as client:
        client.send(call("flood", {}))
        assert eventually(lambda: server(run).endings == ["flood"])
    assert eventually(lambda: not run.http.connections)


def test_300_connections_at_once_are_all_answered(run: Running) -> None:
    """Choice: a backlog that takes a burst; each connection is accepted and served."""
    assert HttpServer.request_queue_size >= 128
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(300)]
        for one in sockets:
            one.setblocking(False)
            assert one.connect_ex(("127.0.0.1", run.port)) in (0, 115, 36, 10035)  # in progress
        clients = []
        for one in sockets:
            assert select.select([], [one], [], PATIENCE)[1], "not accepted"
            one.settimeout(PATIENCE)
            client = Connection.__new__(Connection)
            client.socket, client.buffer = one, b""
            clients.append(client)
            client.send(GOOD)
        assert [client.reply().status for client in clients] == [200] * 300
    assert server(run).notes == ["é"] * 300


def test_more_connections_than_the_limit_are_told_to_come_back(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9110 §15.6.4: 503 with Retry-After, while those that are there are served."""
    assert eventually(lambda: not run.http.connections)
    monkeypatch.setattr(run.http, "max_connections", 2)
    with run.connect() as first, run.connect() as second:
        for client in (first, second):
            client.send(GOOD)
            assert client.reply().status == 200
        reply = run.exchange(GOOD)
        assert (reply.status, reply.fields["retry-after"], reply.fields["connection"]) == (503, "1", "close")
        first.send(GOOD)
        assert first.reply().status == 200
    assert eventually(lambda: not run.http.connections)
    assert run.exchange(GOOD).status == 200


def test_at_shutdown_a_stream_ends_properly_and_an_idle_connection_ends() -> None:
    """Choice: a shutdown wakes every connection; what is being answered is ended, not cut."""
    with running(Notes()) as run, run.connect() as idle, run.connect() as waiting:
        idle.send(GOOD)
        assert idle.reply().status == 200
        waiting.send(call("wait", {}))
        assert eventually(lambda: "waits" in server(run).notes)
        run.http.stop()
        assert idle.read_to_end() == b""
        assert waiting.read_to_end() == b""
        assert server(run).endings == ["wait"]
    assert not run.http.connections


# -------------------------------------------------------------------------------------------------- whatever comes


def test_no_octets_lead_to_an_answer_without_a_status_line(run: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """RFC 9112 §4: an answer begins with a status line, a request has one answer; here with single octets changed."""
    executed = 0
    for place in range(len(HEAD + b"Content-Length:")):  # another length would make a second request of the rest
        for octet in (b"\0", b"\r", b"\n", b" ", b":", b"\xff"):
            if GOOD[place:place + 1] == octet:
                continue
            octets = GOOD[:place] + octet + GOOD[place + 1:]
            with run.connect() as client:
                client.send(octets)
                client.socket.shutdown(socket.SHUT_WR)
                answer = client.read_to_end()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 "), octets
            assert answer.count(b"HTTP/1.1 ") <= 1, octets
            executed += answer.startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in capsys.readouterr().err
    assert len(server(run).notes) == executed


def test_random_octets_do_not_end_the_server(run: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: noise gets a refusal or nothing, and the next request its answer."""
    for size in (1, 2, 10, 100, 1000, 20_000):
        for _ in range(5):
            with run.connect() as client, contextlib.suppress(ConnectionError):
                client.send(os.urandom(size))
                client.socket.shutdown(socket.SHUT_WR)
                answer = client.read_to_end()
                assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert run.exchange(GOOD).status == 200
    assert "Traceback" not in capsys.readouterr().err
