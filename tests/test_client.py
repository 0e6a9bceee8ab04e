"""The client of the lessons, against a server that plays scripted bytes and records what it was asked."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sse import KEEP_ALIVE, LAST_CHUNK, encode_chunk, encode_event, encode_json

LESSONS = Path(__file__).parent / "lessons"
sys.path.insert(0, str(LESSONS))

import client as lesson  # noqa: E402
from client import BrokenStream, Client, McpError, era  # noqa: E402
from terminal import Terminal  # noqa: E402

WAIT = 5.0  # seconds: the bound of every wait
Message = dict[str, Any]
META = "io.modelcontextprotocol/"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Exchange:
    """One connection of the scripted server: the request that came, and how to answer it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive()
        head, _, body = received.partition(b"\r\n\r\n")
        request_line, *lines = head.decode("ascii").split("\r\n")
        self.target = request_line.split(" ")[1]
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        while len(body) < int(self.headers["content-length"]):
            body += self._receive()
        self.message: Message = json.loads(body)
        self.params: Message = self.message["params"]
        self.meta = {key.removeprefix(META): value for key, value in self.params.get("_meta", {}).items()}

    def _receive(self) -> bytes:
        octets = self.connection.recv(1 << 16)
        assert octets, "the client hung up in the middle of its request"
        return octets

    def send(self, octets: bytes) -> None:
        self.connection.sendall(octets)

    def complete(self, message: Message) -> Message:
        """A scripted message, as a JSON-RPC message: responses get the request's id unless they have one."""
        return {"jsonrpc": "2.0"} | ({} if "method" in message else {"id": self.message["id"]}) | message


Answer = Callable[[Exchange], None]


class Server:
    """Answers one connection after the other, each as its script says."""

    def __init__(self, script: list[Answer]) -> None:
        self.script = script
        self.exchanges: list[Exchange] = []
        self.asked = threading.Event()  # the first request has come
        self.came = threading.Semaphore(0)  # once for each request that has come
        self.hung_up = threading.Event()  # the client closed a connection that the script held open
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/mcp"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with self._listener:
            for answer in self.script:
                connection, _ = self._listener.accept()
                with connection:
                    connection.settimeout(WAIT)
                    exchange = Exchange(connection)
                    self.exchanges.append(exchange)
                    self.asked.set()
                    self.came.release()
                    answer(exchange)
                    if answer.__name__ == "hold":
                        self.hung_up.set()

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT + 1)
        assert not self._thread.is_alive()
        assert len(self.exchanges) == len(self.script), "not every scripted answer was asked for"

    def asked_for(self, count: int) -> bool:
        """Whether so many requests come within WAIT each."""
        return all(self.came.acquire(timeout=WAIT) for _ in range(count))

    @property
    def ids(self) -> list[int]:
        return [exchange.message["id"] for exchange in self.exchanges]

    @property
    def methods(self) -> list[str]:
        return [exchange.message["method"] for exchange in self.exchanges]


def serve(*script: Answer) -> Server:
    return Server(list(script))


def reply(message: Message, status: str = "200 OK", kind: str = "application/json") -> Answer:
    """One JSON object."""

    def answer(exchange: Exchange) -> None:
        body = encode_json(exchange.complete(message))
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        exchange.send(head.encode() + body)

    return answer


def result(**members: Any) -> Answer:
    return reply({"result": {"resultType": "complete"} | members})


def error(code: int, status: str = "200 OK", data: Any = None) -> Answer:
    return reply({"error": {"code": code, "message": "no", "data": data}}, status)


def stream(*messages: Message, end: bytes = LAST_CHUNK) -> Answer:
    """A chunked stream; each event is cut in two, between comments."""

    def answer(exchange: Exchange) -> None:
        exchange.send(STREAM_HEAD + encode_chunk(KEEP_ALIVE))
        with suppress(ConnectionError):  # a client that has its response hangs up, whatever is still to come
            for message in messages:
                event = encode_event(exchange.complete(message))
                exchange.send(encode_chunk(event[:9]) + encode_chunk(event[9:]) + encode_chunk(KEEP_ALIVE))
            exchange.send(end)

    return answer


def octets(raw: bytes) -> Answer:
    return lambda exchange: exchange.send(raw)


def plain(status: str, body: str = "", kind: str = "text/plain") -> Answer:
    """An answer of HTTP's, not of MCP's."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return octets((head + body).encode())


def held_open(*messages: Message) -> Answer:
    """A stream that stays open until the client hangs up."""

    def hold(exchange: Exchange) -> None:
        with suppress(ConnectionError):
            if messages:
                stream(*messages, end=b"")(exchange)
            assert exchange.connection.recv(1) == b"", "the client sent something after its request"

    return hold


def progress(done: float, total: float | None = None, message: str | None = None) -> Message:
    params = {"progressToken": 1, "progress": done, "total": total, "message": message}
    return {"method": "notifications/progress", "params": {k: v for k, v in params.items() if v is not None}}


DONE: Message = {"result": {"resultType": "complete", "content": []}}


def patient(server: Server, **options: Any) -> Client:
    """A client that does not wait between two polls."""
    return Client(server.url, wait=lambda seconds: None, **options)


# ------------------------------------------------------------------------------------------ one request


def test_a_request_is_a_post_with_its_metadata_and_its_mirrored_headers() -> None:
    """MUST (Streamable HTTP › Sending Messages): both types in Accept, the request metadata headers."""
    with serve(result(contents=[1])) as server:
        answer = Client(server.url, "bob", {"roots": {}}, {"name": "x", "version": "2"}).request(
            "resources/read", {"uri": "test://ü", "_meta": {"traceparent": "t"}}
        )
    assert answer["contents"] == [1]
    (exchange,) = server.exchanges
    assert exchange.target == "/mcp"
    assert exchange.message["jsonrpc"] == "2.0"
    assert exchange.params["uri"] == "test://ü"
    assert exchange.meta == {
        "traceparent": "t",
        "protocolVersion": "2026-07-28",
        "clientInfo": {"name": "x", "version": "2"},
        "clientCapabilities": {"roots": {}},
    }
    expected = {
        "content-type": "application/json",
        "accept": "application/json, text/event-stream",
        "authorization": "Bearer bob",
        "mcp-protocol-version": "2026-07-28",
        "mcp-method": "resources/read",
        "mcp-name": "=?base64?dGVzdDovL8O8?=",
    }
    assert expected.items() <= exchange.headers.items()


def test_every_request_has_a_new_id() -> None:
    """MUST NOT (Overview › Requests): share an id with a request that still waits. Choice: no id comes twice."""
    with serve(result(), result(), result()) as server:
        client = Client(server.url)
        for _ in range(3):
            client.request("ping")
    assert len(set(server.ids)) == 3
    assert all(type(id) is int for id in server.ids)


def test_a_stream_gives_notifications_and_then_the_result() -> None:
    """MUST (Streamable HTTP › Sending Messages): the client supports a JSON object and a stream."""
    heard: list[Message] = []
    with serve(stream(progress(1), progress(2), DONE)) as server:
        answer = Client(server.url).request("tools/call", {"name": "x"}, on_notification=heard.append)
    assert answer == DONE["result"]
    assert [message["params"]["progress"] for message in heard] == [1, 2]


def test_a_stream_may_end_with_its_connection() -> None:
    """RFC 9112 §6.3: without a length or chunks, the body is what comes until the connection is closed."""
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    with serve(lambda exchange: exchange.send(head + encode_event(exchange.complete(DONE)))) as server:
        assert Client(server.url).request("tools/call", {"name": "x"}) == DONE["result"]


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
def test_an_answer_may_be_the_last_of_its_connection(version: str) -> None:
    """RFC 9112 §9.6: a server may close after an answer; its length says that it is whole."""

    def answer(exchange: Exchange) -> None:
        body = encode_json(exchange.complete(DONE))
        exchange.send(f"{version} 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n"
                      f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    with serve(answer) as server:
        assert Client(server.url).request("tools/call", {"name": "x"}) == DONE["result"]


def test_the_response_ends_a_stream_that_the_server_keeps_open() -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): the response terminates the stream."""
    with serve(held_open(DONE)) as server:
        assert Client(server.url).request("tools/call", {"name": "x"}) == DONE["result"]
        assert server.hung_up.wait(WAIT)


def test_an_absent_result_type_means_complete() -> None:
    """MUST (Overview › ResultType): for backward compatibility, absent is treated as "complete"."""
    with serve(reply({"result": {"x": 1}})) as server:
        assert Client(server.url).request("ping") == {"x": 1}


def test_a_stream_yields_each_message_and_tells_the_status() -> None:
    """Choice: who wants to see every message iterates over them."""
    with serve(stream(progress(1), DONE), error(-32601, "404 Not Found")) as server:
        with Client(server.url).stream("tools/call", {"name": "x"}) as messages:
            kinds = [message.get("method", "response") for message in messages]
        assert (kinds, messages.status) == (["notifications/progress", "response"], 200)
        with Client(server.url).stream("x/y") as messages:
            assert [message["error"]["code"] for message in messages] == [-32601]
        assert messages.status == 404


@pytest.mark.parametrize(
    "stray",
    [
        {"id": 1, "method": "sampling/createMessage", "params": {}},
        {"id": 99, "result": {}},
        {"id": "1", "result": {}},
        {"id": True, "result": {}},
        {"id": 1.0, "result": {}},
        {"id": None, "result": {}},
    ],
)
def test_what_does_not_belong_to_the_request_is_ignored(stray: Message, capsys: pytest.CaptureFixture[str]) -> None:
    """MUST (Overview › Result Responses): a response has its request's id. A server sends no requests at all."""
    with serve(stream(stray, DONE)) as server:
        assert Client(server.url).request("tools/call", {"name": "x"}) == DONE["result"]
    assert capsys.readouterr().err.startswith("ignored what does not belong to request 1: ")


def test_events_of_another_type_or_without_data_are_no_messages() -> None:
    """WHATWG HTML §9.2.6: without a type an event is a message."""
    noise = b"event: ping\ndata: x\n\ndata\n\nid: 7\n\n"
    with serve(
        lambda exchange: exchange.send(
            STREAM_HEAD + encode_chunk(noise + encode_event(exchange.complete(DONE))) + LAST_CHUNK
        )
    ) as server:
        assert Client(server.url).request("tools/call", {"name": "x"}) == DONE["result"]


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("answer", "code", "status", "data"),
    [
        (error(-32602, data={"uri": "x"}), -32602, 200, {"uri": "x"}),
        (error(-32020, "400 Bad Request"), -32020, 400, None),
        (reply({"id": None, "error": {"code": -32700, "message": "x"}}, "400 Bad Request"), -32700, 400, None),
        (reply({"error": {"code": -1, "message": "x"}}, "500 Oh", "text/plain"), -1, 500, None),
        (plain("401 Unauthorized"), None, 401, ""),
        (plain("502 Bad Gateway", "<html>", "text/html"), None, 502, "<html>"),
        (plain("400 Bad Request", '{"', "application/json"), None, 400, '{"'),
        (plain("200 OK", "hello", "text/html"), None, 200, "hello"),
        (plain("202 Accepted"), None, 202, ""),
    ],
)
def test_a_refusal_is_an_error_with_all_that_was_said(answer: Answer, code: int, status: int, data: Any) -> None:
    """MUST (Overview › Error Responses): an error has a code and a message; what is no such error has no code."""
    with serve(answer) as server, pytest.raises(McpError) as caught:
        Client(server.url).request("resources/read", {"uri": "x"}, reissue=3)
    assert (caught.value.code, caught.value.status, caught.value.data) == (code, status, data)


@pytest.mark.parametrize(
    ("method", "response"),
    [
        ("tools/list", {"result": {"resultType": "input_required"}}),
        ("tools/list", {"result": {"resultType": "task"}}),
        ("prompts/get", {"result": {"resultType": "task"}}),
        ("tools/call", {"result": {"resultType": "surprise"}}),
        ("tools/call", {"result": {"resultType": None}}),
        ("tools/call", {"result": []}),
        ("tools/call", {"error": "no"}),
        ("tools/call", {"error": {"code": "-32601", "message": "no"}}),
        ("tools/call", {"error": {"code": True, "message": "no"}}),
        ("tools/call", {"error": {"message": "no"}}),
        ("tools/call", {}),
    ],
)
def test_a_response_that_is_no_result_of_its_method_is_invalid(method: str, response: Message) -> None:
    """MUST (Overview › ResultType): any value unrecognized by the client is considered invalid."""
    with serve(reply(response)) as server, pytest.raises(McpError, match="is no result") as caught:
        Client(server.url).request(method, {"name": "x"})
    assert caught.value.code is None


# ------------------------------------------------------------------------------------------ hanging up


def test_closing_a_stream_hangs_up_at_once() -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): the server takes a disconnect as cancellation."""
    with serve(held_open(progress(1), progress(2))) as server:
        messages = Client(server.url).stream("tools/call", {"name": "x"})
        assert next(iter(messages))["params"]["progress"] == 1
        messages.close()
        assert server.hung_up.wait(WAIT)
        assert list(messages) == []


def test_a_silent_request_can_be_hung_up_before_anything_was_read() -> None:
    """Choice: the request is sent at once, so that closing cancels a tool that has said nothing yet."""
    with serve(held_open()) as server:
        with Client(server.url).stream("tools/call", {"name": "x"}):
            assert server.asked.wait(WAIT)
        assert server.hung_up.wait(WAIT)


@pytest.mark.parametrize("messages", [[], [progress(1)]], ids=["before the head", "in the stream"])
def test_closing_from_another_thread_ends_the_iteration(messages: list[Message]) -> None:
    """Choice: whoever decides to cancel is seldom the thread that reads."""
    heard: list[Message] = []
    reading = threading.Event()
    with serve(held_open(*messages)) as server:
        under_way = Client(server.url).stream("tools/call", {"name": "x"})

        def read() -> None:
            reading.set()
            heard.extend(under_way)

        reader = threading.Thread(target=read)
        reader.start()
        assert server.asked.wait(WAIT) and reading.wait(WAIT)
        under_way.close()
        reader.join(WAIT)
        assert not reader.is_alive()
        assert server.hung_up.wait(WAIT)
    assert len(heard) <= len(messages)


def test_leaving_a_stream_in_the_middle_hangs_up() -> None:
    """Choice: an exception in whoever reads is a reason to cancel like any other."""
    with serve(held_open(progress(1))) as server:
        with pytest.raises(ZeroDivisionError):
            Client(server.url).request("tools/call", {"name": "x"}, on_notification=lambda message: 1 / 0)
        assert server.hung_up.wait(WAIT)


@pytest.mark.parametrize("messages", [[], [progress(1)]], ids=["no answer", "no response"])
def test_a_timeout_hangs_up(messages: list[Message]) -> None:
    """SHOULD (Cancellation › Timeouts): cancel the request and stop waiting for a response."""
    with serve(held_open(*messages)) as server:
        with pytest.raises(TimeoutError):
            Client(server.url).request("tools/call", {"name": "x"}, timeout=0.05, reissue=3)
        assert server.hung_up.wait(WAIT)


def test_a_timeout_does_not_care_what_arrives_meanwhile() -> None:
    """SHOULD (Cancellation › Timeouts): always enforce a maximum timeout, regardless of progress."""

    def hold(exchange: Exchange) -> None:
        exchange.send(STREAM_HEAD)
        with pytest.raises(ConnectionError):
            while True:
                exchange.send(encode_chunk(KEEP_ALIVE))

    with serve(hold) as server:
        with pytest.raises(TimeoutError):
            Client(server.url).request("tools/call", {"name": "x"}, timeout=0.05)
        assert server.hung_up.wait(WAIT)


def test_a_timeout_is_for_the_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHOULD (Cancellation › Timeouts): a maximum timeout; each wait gets only what is left of it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(lesson, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with serve(held_open(progress(1))) as server:
        under_way = Client(server.url).stream("tools/call", {"name": "x"}, timeout=60.0)
        clock.now += 59.95
        with pytest.raises(TimeoutError):
            list(under_way)
        assert server.hung_up.wait(WAIT)


# ------------------------------------------------------------------------------------------ broken streams

def reset(exchange: Exchange) -> None:
    """The start of a stream, then RST instead of FIN."""
    exchange.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.send(STREAM_HEAD)


BROKEN = {
    "a reset": reset,
    "no answer at all": octets(b""),
    "half a head": octets(b"HTTP/1.1 200 OK\r\nContent-"),
    "no HTTP": octets(b"SSH-2.0-x\r\n"),
    "a head and no more": octets(STREAM_HEAD),
    "notifications only": stream(progress(1)),
    "cut between chunks": stream(progress(1), end=b""),
    "cut inside a chunk": stream(progress(1), end=b"ff\r\ndata: {"),
    "an event that is no JSON": stream(end=encode_chunk(b"data: {\n\n")),
    "an event that is no message": stream(end=encode_chunk(b"data: 7\n\n")),
    "an event of another protocol": stream({"jsonrpc": "1.0", "result": {}}),
    "an event nested too deeply": stream(end=encode_chunk(b"data: " + b"[" * 100_000 + b"\n\n")),
    "a JSON object cut off": octets(
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"jsonrpc":"2.0","id":1'
    ),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_stream_is_asked_for_again_with_a_new_id(broken: Answer) -> None:
    """Choice: nothing resumes a stream, so what may be asked twice is asked again, in a request of its own."""
    with serve(broken, broken, result(x=1)) as server:
        assert Client(server.url).request("resources/read", {"uri": "x"}, reissue=2)["x"] == 1
    assert len(set(server.ids)) == 3
    assert server.exchanges[0].params == server.exchanges[2].params


def test_a_request_is_asked_for_again_as_often_as_was_said() -> None:
    """Choice: not at all unless the caller says so."""
    with serve(octets(b""), octets(b""), octets(b"")) as server:
        with pytest.raises(BrokenStream):
            Client(server.url).request("resources/read", {"uri": "x"})
        with pytest.raises(BrokenStream):
            Client(server.url).request("resources/read", {"uri": "x"}, reissue=1)


def test_an_early_refusal_is_read_although_the_request_was_not() -> None:
    """RFC 9112 §9.5: a client that notices a closed connection looks for the response that came with it."""
    refusal = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT)

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)
                connection.sendall(refusal)  # closing with unread data resets the connection

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(McpError) as caught:
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}/").request("x/y", {"text": "x" * 5_000_000})
        thread.join(WAIT)
        assert not thread.is_alive()
    assert caught.value.status == 413


def listed(*tools: Message, **page: Any) -> Answer:
    return result(tools=[{"inputSchema": {"type": "object"}} | tool for tool in tools], **page)


@pytest.mark.parametrize("annotations", [{"idempotentHint": True}, {"readOnlyHint": True}, {}])
def test_a_broken_call_is_not_repeated_whatever_the_tool_says_of_itself(annotations: Message) -> None:
    """MUST (Tools › Tool): annotations are untrusted; after a broken stream nobody knows whether the tool has run."""
    with serve(listed({"name": "x", "annotations": annotations}), octets(b"")) as server:
        client = Client(server.url)
        client.list_tools()
        with pytest.raises(BrokenStream):
            client.call_tool("x")


@pytest.mark.parametrize("option", [[], ["--retry"]])
def test_the_user_may_say_that_a_broken_call_is_repeated(option: list[str]) -> None:
    """Choice: only who calls knows whether a tool may run twice."""
    again = [result(content=[])] if option else []
    with serve(listed({"name": "x"}), octets(b""), *again) as server:
        assert lesson.main([*option, server.url, "x"]) == (0 if option else 1)
    assert len(set(server.ids)) == len(server.ids)


def test_a_caller_may_say_how_often_a_tool_is_called_again() -> None:
    """Choice: the caller knows what its call does."""
    with serve(octets(b""), result(content=[])) as server:
        assert Client(server.url).call_tool("x", reissue=1)["content"] == []


# ------------------------------------------------------------------------------------------ versions and eras


def unsupported(*supported: str) -> Answer:
    return error(-32022, "400 Bad Request", {"supported": supported, "requested": "x"})


def test_an_unsupported_version_is_replaced_by_a_common_one() -> None:
    """SHOULD (Versioning and Compatibility › Protocol Version Negotiation): select a mutually supported version."""
    versions = ("2030-01-01", "2029-01-01", "2026-07-28")
    with serve(unsupported("2025-11-25", "2026-07-28"), result(), result()) as server:
        client = Client(server.url, versions=versions)
        client.request("ping")
        client.request("ping")
    assert [exchange.meta["protocolVersion"] for exchange in server.exchanges] == [
        "2030-01-01", "2026-07-28", "2026-07-28",
    ]  # fmt: skip
    assert [exchange.headers["mcp-protocol-version"] for exchange in server.exchanges][1:] == ["2026-07-28"] * 2
    assert len(set(server.ids)) == 3


NO_LIST: list[Any] = [None, {}, {"supported": None}, {"supported": "2026-07-28"}, {"supported": [None, 7]}, [], "x"]


@pytest.mark.parametrize("data", NO_LIST)
def test_an_error_about_versions_that_lists_none_surfaces(data: Any) -> None:
    """MUST (Versioning and Compatibility › Protocol Version Negotiation): without the list nothing is guessed."""
    with serve(error(-32022, "400 Bad Request", data)) as server, pytest.raises(McpError) as caught:
        Client(server.url, versions=("2030-01-01", "2026-07-28")).request("ping")
    assert caught.value.code == -32022


@pytest.mark.parametrize("answer", [unsupported("2025-11-25"), unsupported("2026-07-28"), unsupported()])
def test_without_a_common_version_the_error_surfaces(answer: Answer) -> None:
    """SHOULD (Versioning and Compatibility › Protocol Version Negotiation): or surface an error to the user."""
    with serve(answer) as server, pytest.raises(McpError) as caught:
        Client(server.url, versions=("2030-01-01", "2027-01-01")).request("ping")
    assert caught.value.code == -32022


DISCOVERED = {"supportedVersions": ["2026-07-28"], "capabilities": {}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (result(**DISCOVERED), "modern"),
        (stream({"result": DISCOVERED}), "modern"),
        (unsupported("2027-01-01"), "modern"),
        (error(-32020, "400 Bad Request"), "modern"),
        (error(-32021, "400 Bad Request"), "modern"),
        (error(-32601, "404 Not Found"), "modern"),
        (error(-32020, "405 Method Not Allowed"), "modern"),
        (error(-32000, "400 Bad Request"), "legacy"),
        (error(-32600, "400 Bad Request"), "legacy"),
        (error(-32001, "404 Not Found"), "legacy"),
        (error(-32601, "400 Bad Request"), "legacy"),
        (error(-32601), "legacy"),
        (reply({"result": {}}), "legacy"),
    ],
)
def test_the_body_tells_a_servers_era(answer: Answer, expected: str) -> None:
    """SHOULD (Streamable HTTP › Backward Compatibility): inspect the response body before falling back."""
    with serve(answer) as server:
        assert era(server.url) == expected
    assert server.methods == ["server/discover"]


OLD = {"result": {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}}


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "405 Method Not Allowed"])
@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (reply(OLD), "legacy"),
        (stream(OLD), "legacy"),
        (error(-32602, "400 Bad Request"), "legacy"),
        (plain("404 Not Found", "not found"), "neither"),
        (octets(b""), "neither"),
    ],
)
def test_a_refusal_without_a_body_is_followed_by_initialize(status: str, second: Answer, expected: str) -> None:
    """SHOULD (Streamable HTTP › Backward Compatibility): fall back to initialize; a bare 404 may be no MCP server."""
    with serve(plain(status, "no"), second) as server:
        verdict, reason = lesson.judge_era(server.url)
    assert (verdict, server.methods) == (expected, ["server/discover", "initialize"])
    assert f"HTTP {status}: no" in reason
    assert "mcp-protocol-version" not in server.exchanges[1].headers


def test_the_command_line_says_the_era_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a verdict without its reason teaches nothing."""
    with serve(result(**DISCOVERED)) as server:
        assert lesson.main(["--era", server.url]) == 0
    assert capsys.readouterr().out == "modern: server/discover says that it speaks 2026-07-28\n"


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "500 Oh", "503 Wait", "200 OK"])
def test_other_answers_say_nothing_about_the_era(status: str) -> None:
    """Choice: only 400, 404 and 405 without a modern error mean a legacy server."""
    with serve(plain(status, "hello")) as server, pytest.raises(McpError):
        era(server.url)


# ------------------------------------------------------------------------------------------ tools

REGION = {"properties": {"region": {"type": "string", "x-mcp-header": "Region"}}, "type": "object"}


def test_listing_tools_follows_every_cursor() -> None:
    """MUST NOT (Pagination › Implementation Guidelines): an empty cursor is not the end of the results."""
    pages = [listed({"name": "a"}, nextCursor="b"), listed(nextCursor=""), listed({"name": "c"})]
    with serve(*pages) as server:
        assert [tool["name"] for tool in Client(server.url).list_tools()] == ["a", "c"]
    assert [exchange.params.get("cursor", "none") for exchange in server.exchanges] == ["none", "b", ""]


def test_a_circle_of_cursors_is_an_error() -> None:
    """Choice: a client must come to an end even if the server does not."""
    pages = [listed(nextCursor="a"), listed(nextCursor="b"), listed(nextCursor="a")]
    with serve(*pages) as server, pytest.raises(McpError, match="circle"):
        Client(server.url).list_tools()


def test_a_tool_with_an_invalid_annotation_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """MUST (Streamable HTTP › Schema Extension): exclude the invalid tool; SHOULD log its name and the reason."""
    bad = {"properties": {"a": {"type": "string", "x-mcp-header": "not a token"}}, "type": "object"}
    with serve(listed({"name": "good"}, {"name": "bad", "inputSchema": bad})) as server:
        client = Client(server.url)
        assert [tool["name"] for tool in client.list_tools()] == ["good"]
    assert list(client.tools) == ["good"]
    assert re.match(r"left out tool 'bad': .+\n$", capsys.readouterr().err)


def test_a_listed_tools_parameters_are_mirrored() -> None:
    """MUST (Streamable HTTP › Client Behavior): append Mcp-Param-{Name} for each annotated value."""
    with serve(listed({"name": "x", "inputSchema": REGION}), result(content=[]), result(content=[])) as server:
        client = Client(server.url)
        client.list_tools()
        client.call_tool("x", {"region": "Zürich"})
        client.call_tool("x", {"region": None})
    assert server.exchanges[1].headers["mcp-param-region"] == "=?base64?WsO8cmljaA==?="
    assert "mcp-param-region" not in server.exchanges[2].headers


MISMATCH = error(-32020, "400 Bad Request")


def test_after_a_header_mismatch_the_tools_are_listed_anew_and_the_call_is_tried_once_more() -> None:
    """SHOULD (Streamable HTTP › Client Behavior): call tools/list to check for changes, then retry."""
    with serve(MISMATCH, listed({"name": "x", "inputSchema": REGION}), result(content=[])) as server:
        Client(server.url).call_tool("x", {"region": "eu"})
    assert server.methods == ["tools/call", "tools/list", "tools/call"]
    assert server.exchanges[2].headers["mcp-param-region"] == "eu"
    assert len(set(server.ids)) == 3


def test_a_second_header_mismatch_surfaces() -> None:
    """Choice: a fresh list that does not help will not help the next time."""
    with serve(MISMATCH, listed({"name": "x"}), MISMATCH) as server, pytest.raises(McpError) as caught:
        Client(server.url).call_tool("x")
    assert caught.value.code == -32020


def test_progress_and_log_messages_are_handed_on() -> None:
    """MUST (Progress › Progress Flow): a progress token is text or an integer. Choice: it is taken from the ids."""
    seen: list[Any] = []
    log = {"method": "notifications/message", "params": {"level": "info", "data": "hello"}}
    other: list[Message] = [{"method": "notifications/other"}, {"method": "notifications/message"},
                            {"method": "notifications/message", "params": []}]
    with serve(stream(progress(1, 3, "one"), log, *other, progress(2.5), DONE)) as server:
        Client(server.url).call_tool("x", progress=lambda *p: seen.append(p), log_level="info", log=seen.append)
    assert seen == [(1, 3, "one"), log["params"], (2.5, None, None)]
    assert type(server.exchanges[0].meta["progressToken"]) is int
    assert server.exchanges[0].meta["logLevel"] == "info"


def test_without_callbacks_nothing_is_asked_for() -> None:
    """Choice: no token and no level, and what comes all the same is ignored."""
    log = {"method": "notifications/message", "params": {"level": "info", "data": "hello"}}
    with serve(stream(progress(1), log, DONE)) as server:
        Client(server.url).call_tool("x", {"a": 1})
    assert set(server.exchanges[0].meta) == {"protocolVersion", "clientInfo", "clientCapabilities"}
    assert server.exchanges[0].params["arguments"] == {"a": 1}


@pytest.mark.parametrize("name", [{}, {"name": None}, {"name": 7}, {"name": ["x"]}])
def test_a_tool_without_a_name_is_left_out(name: Message, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: what cannot be called is no tool, and the others are."""
    with serve(listed(name, {"name": "good"})) as server:
        assert [tool["name"] for tool in Client(server.url).list_tools()] == ["good"]
    assert capsys.readouterr().err == "left out tool '': it has no name\n"


def test_endless_pages_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a client must come to an end even if every page has a new cursor."""
    monkeypatch.setattr(lesson, "MAX_PAGES", 3)
    pages = [listed(nextCursor=str(number)) for number in range(3)]
    with serve(*pages) as server, pytest.raises(McpError, match="more than 3 pages"):
        Client(server.url).list_tools()


def test_a_huge_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: no server fills this client's memory."""
    monkeypatch.setattr(lesson, "MAX_MESSAGE", 1000)
    with serve(result(content=["x" * 2000])) as server, pytest.raises(BrokenStream, match="more than 1000 octets"):
        Client(server.url).call_tool("x")


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": ["integer", "null"]},
        "list": {"type": "array", "items": {"enum": ["a", "b"]}},
        "fixed": {"const": 1},
    },
    "required": ["n"],
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(
    ("structured", "problem"),
    [
        ({"n": 1}, ""),
        ({"n": 1.0, "list": ["a", "b"], "fixed": 1, "more": "x"}, ""),
        ({"n": None}, ""),
        ({"n": "1"}, "structuredContent.n is not of type ['integer', 'null']"),
        ({"n": 1.5}, "structuredContent.n is not of type"),
        ({"n": True}, "structuredContent.n is not of type"),
        ({}, "structuredContent.n is missing"),
        ([], "structuredContent is not of type object"),
        ({"n": 1, "list": ["a", "c"]}, "structuredContent.list[1] is none of ['a', 'b']"),
        ({"n": 1, "fixed": 2}, "structuredContent.fixed is not 1"),
        ({"n": 1, "more": 7}, "structuredContent.more is not of type string"),
    ],
)
def test_a_result_is_checked_against_the_output_schema(structured: Any, problem: str) -> None:
    """SHOULD (Tools › Output Schema): clients validate structured results against this schema."""
    answer = result(content=[], structuredContent=structured)
    with serve(listed({"name": "x", "outputSchema": SCHEMA}), answer) as server:
        client = Client(server.url)
        client.list_tools()
        if problem:
            with pytest.raises(McpError) as caught:
                client.call_tool("x")
            assert problem in str(caught.value)
        else:
            assert client.call_tool("x")["structuredContent"] == structured


@pytest.mark.parametrize(("members", "fine"), [({}, False), ({"isError": True}, True)])
def test_a_tool_with_an_output_schema_returns_something_to_check(members: Message, fine: bool) -> None:
    """MUST (Tools › Output Schema): servers provide structured results; an error is none."""
    with serve(listed({"name": "x", "outputSchema": SCHEMA}), result(content=[], **members)) as server:
        client = Client(server.url)
        client.list_tools()
        if fine:
            assert client.call_tool("x")["isError"]
        else:
            with pytest.raises(McpError, match="structuredContent is missing"):
                client.call_tool("x")


# ------------------------------------------------------------------------------------------ multi round trips

ASK = {"method": "elicitation/create", "params": {"message": "Who?", "requestedSchema": {"properties": {}}}}


def asks(*keys: str, **members: Any) -> Answer:
    requests = {"inputRequests": {key: ASK for key in keys}} if keys else {}
    return reply({"result": {"resultType": "input_required"} | requests | members})


def accept(key: str, input_request: Message) -> Message:
    assert input_request == ASK
    return {"action": "accept", "content": {"name": key}}


def test_input_requests_are_answered_in_a_new_request() -> None:
    """MUST (Multi Round-Trip Requests › Client Requirements (Basic Workflow)): inputs, exact state, new id."""
    state = ' "s\u2028\\ü\n'
    with serve(asks("a", "b", requestState=state), asks("c"), asks(requestState=""), result(content=[7])) as server:
        answer = Client(server.url).call_tool("x", {"n": 1}, answer=accept, log_level="info")
    assert answer["content"] == [7]
    assert len(set(server.ids)) == 4
    first, *retries = [dict(exchange.params) for exchange in server.exchanges]
    for retry in retries:
        assert {name: retry[name] for name in first} == first
    added = [{name: retry[name] for name in retry if name not in first} for retry in retries]
    assert added == [
        {"inputResponses": {"a": accept("a", ASK), "b": accept("b", ASK)}, "requestState": state},
        {"inputResponses": {"c": accept("c", ASK)}},
        {"requestState": ""},
    ]


def test_elicitation_is_declared_by_a_call_that_can_answer() -> None:
    """MUST (Elicitation › Capabilities): declare the capability on each request; here, on those that have it."""
    with serve(result(content=[]), result(content=[]), result(content=[])) as server:
        Client(server.url).call_tool("x", answer=accept)
        Client(server.url).call_tool("x")
        Client(server.url, capabilities={"elicitation": {"url": {}}}).call_tool("x", answer=accept)
    tasks: Message = {"extensions": {META + "tasks": {}}}
    declared = [exchange.meta["clientCapabilities"] for exchange in server.exchanges]
    assert declared == [{"elicitation": {}} | tasks, tasks, {"elicitation": {"url": {}}}]


def test_a_question_that_nobody_can_answer_is_an_error() -> None:
    """Choice: better than a retry that would ask again."""
    with serve(asks("q")) as server, pytest.raises(McpError, match="'q'"):
        Client(server.url).call_tool("x")


def test_a_server_that_wants_an_answer_and_asks_nothing_is_an_error() -> None:
    """MUST (Multi Round-Trip Requests › InputRequiredResult): input requests, a state, or both."""
    with serve(asks()) as server, pytest.raises(McpError, match="asked nothing"):
        Client(server.url).call_tool("x", answer=accept)


def test_a_server_that_never_stops_asking_is_an_error() -> None:
    """Choice: MAY ask on many attempts (Multi Round-Trip Requests), but not for ever."""
    script = [asks("q")] * (lesson.MAX_ROUNDS + 1)
    with serve(*script) as server, pytest.raises(McpError, match="still asks"):
        Client(server.url).call_tool("x", answer=accept)


# ------------------------------------------------------------------------------------------ tasks


def task(status: str = "working", resultType: str = "complete", **members: Any) -> Answer:
    state = {"taskId": "t ü", "status": status, "ttlMs": None, "createdAt": "x", "lastUpdatedAt": "x"}
    return reply({"result": {"resultType": resultType} | state | members})


TASK = task(resultType="task", pollIntervalMs=10)
COMPLETED = task("completed", result={"content": [7]})


def test_a_task_is_polled_at_the_servers_pace_until_it_is_complete() -> None:
    """SHOULD (SEP-2663 › Task Polling): respect pollIntervalMs, which may change; Mcp-Name carries the taskId."""
    waits: list[float] = []
    states: list[str] = []
    with serve(TASK, task(pollIntervalMs=250), task(), COMPLETED) as server:
        client = Client(server.url, wait=waits.append)
        answer = client.call_tool("x", on_task=lambda state: states.append(state["status"]))
    assert answer == {"content": [7]}
    assert waits == [0.1, 0.25, 1.0]
    assert states == ["working", "working", "working", "completed"]
    assert server.methods == ["tools/call", "tasks/get", "tasks/get", "tasks/get"]
    assert {exchange.params["taskId"] for exchange in server.exchanges[1:]} == {"t ü"}
    assert {exchange.headers["mcp-name"] for exchange in server.exchanges[1:]} == {"=?base64?dCDDvA==?="}


@pytest.mark.parametrize(
    ("given", "waited"),
    [
        (0, 0.1), (1, 0.1), (99, 0.1), (100, 0.1), (2500, 2.5), (60_000, 60.0), (60_001, 60.0), (1e300, 60.0),
        (None, 1.0), (-1, 1.0), ("500", 1.0), (True, 1.0), ([], 1.0), ({}, 1.0), (10**400, 1.0),
    ],
)  # fmt: skip
def test_the_pace_of_polling_has_a_floor_a_ceiling_and_a_default(given: Any, waited: float) -> None:
    """SHOULD (Tasks Extension › Task Polling): respect pollIntervalMs. Choice: no server sets this client spinning."""
    waits: list[float] = []
    with serve(task(resultType="task", pollIntervalMs=given), COMPLETED) as server:
        Client(server.url, wait=waits.append).call_tool("x")
    assert waits == [waited]


def test_a_tasks_questions_are_answered_once_each() -> None:
    """SHOULD (SEP-2663 › Task Update Requests): deduplicate keys across consecutive polls."""
    asked: list[str] = []

    def answer(key: str, input_request: Message) -> Message:
        asked.append(key)
        return accept(key, input_request)

    def waiting(*keys: str) -> Answer:
        return task("input_required", inputRequests={key: ASK for key in keys})

    script = [TASK, waiting("a"), result(), waiting("a"), waiting("a", "b"), result(), task(), COMPLETED]
    with serve(*script) as server:
        assert patient(server).call_tool("x", answer=answer) == {"content": [7]}
    assert asked == ["a", "b"]
    updates = [exchange.params for exchange in server.exchanges if exchange.message["method"] == "tasks/update"]
    assert [(update["taskId"], update["inputResponses"]) for update in updates] == [
        ("t ü", {"a": accept("a", ASK)}),
        ("t ü", {"b": accept("b", ASK)}),
    ]


def test_polling_survives_a_broken_stream() -> None:
    """SHOULD (SEP-2663 › Task Polling): continue polling until a terminal status; a task outlives connections."""
    with serve(TASK, octets(b""), octets(b""), COMPLETED) as server:
        assert patient(server).call_tool("x") == {"content": [7]}


def test_a_task_can_be_followed_by_its_handle_alone() -> None:
    """SHOULD (SEP-2663 › Task Polling): polling can resume after a crash or restart."""
    with serve(task(), COMPLETED) as server:
        assert patient(server).follow_task({"taskId": "t ü"}) == {"content": [7]}


def test_a_task_that_was_finished_when_it_was_created_is_asked_for_its_result() -> None:
    """MUST (SEP-2663 › Task Polling): tasks/get has a completed task's result; the call returns only its handle."""
    with serve(task("completed", resultType="task"), COMPLETED) as server:
        assert patient(server).call_tool("x") == {"content": [7]}


@pytest.mark.parametrize(
    ("end", "code"), [(task("failed", error={"code": -5, "message": "x"}), -5), (task("cancelled"), None)]
)
def test_a_task_without_a_result_is_an_error(end: Answer, code: int | None) -> None:
    """MUST (SEP-2663 › Task Polling): a failed task comes with its error, a cancelled one with nothing."""
    with serve(TASK, end) as server, pytest.raises(McpError) as caught:
        patient(server).call_tool("x")
    assert caught.value.code == code


def test_a_task_that_asks_where_nobody_answers_is_an_error() -> None:
    """Choice: better than polling for ever."""
    waiting = task("input_required", inputRequests={"q": ASK})
    with serve(TASK, waiting) as server, pytest.raises(McpError, match="'q'"):
        patient(server).call_tool("x")


def test_ctrl_c_cancels_the_task_that_is_followed() -> None:
    """MUST NOT (SEP-2663 › Task Cancellation): not a notification, not a closed stream, but tasks/cancel."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with serve(TASK, result()) as server, pytest.raises(KeyboardInterrupt):
        Client(server.url, wait=interrupt).call_tool("x")
    assert server.methods == ["tools/call", "tasks/cancel"]
    assert server.exchanges[1].params["taskId"] == "t ü"


# ------------------------------------------------------------------------------------------ subscriptions

ACKNOWLEDGED: Message = {"method": "notifications/subscriptions/acknowledged", "params": {"notifications": {}}}
CHANGED = {"method": "notifications/tools/list_changed", "params": {}}


def test_listening_yields_notifications_until_the_server_ends_it() -> None:
    """SHOULD (Subscriptions › Graceful Closure): the server sends the response before it closes the stream."""
    with serve(stream(ACKNOWLEDGED, CHANGED, {"result": {"resultType": "complete"}})) as server:
        heard = [message["method"] for message in Client(server.url).listen({"toolsListChanged": True})]
    assert heard == [ACKNOWLEDGED["method"], CHANGED["method"]]
    assert server.exchanges[0].params["notifications"] == {"toolsListChanged": True}


def test_a_subscription_that_breaks_off_is_told_from_one_that_ended() -> None:
    """MAY (Subscriptions › Graceful Closure): a client reconnects after an end without a response."""
    heard = []
    with serve(stream(ACKNOWLEDGED)) as server, pytest.raises(BrokenStream):
        for message in Client(server.url).listen({}):
            heard.append(message["method"])
    assert heard == [ACKNOWLEDGED["method"]]


def test_a_refused_subscription_is_an_error() -> None:
    """MUST (Overview › Error Responses): an error ends a request for a subscription like any other."""
    with serve(error(-32021, "400 Bad Request")) as server, pytest.raises(McpError):
        list(Client(server.url).listen({"taskIds": ["x"]}))


@pytest.mark.parametrize(
    ("asked", "granted", "lines"),
    [
        ({"toolsListChanged": True}, {"toolsListChanged": True}, []),
        ({"toolsListChanged": True}, {}, ["asked for and not granted: toolsListChanged"]),
        ({"toolsListChanged": True}, {"toolsListChanged": False}, ["asked for and not granted: toolsListChanged"]),
        ({}, {"promptsListChanged": True}, ["granted and not asked for: promptsListChanged"]),
        ({"resourceSubscriptions": ["a", "b"]}, {"resourceSubscriptions": ["b", "c", 7]},
         ["asked for and not granted: resourceSubscriptions a", "granted and not asked for: resourceSubscriptions c"]),
    ],
)  # fmt: skip
def test_what_was_granted_is_compared_with_what_was_asked(
    asked: Message, granted: Message, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """MUST (Subscriptions › Acknowledgment): the first message says what will come; silence is no promise."""
    acknowledged = {"method": ACKNOWLEDGED["method"], "params": {"notifications": granted}}
    with serve(stream(acknowledged, {"result": {}})) as server:
        assert len(list(Client(server.url).listen(asked))) == 1
    assert capsys.readouterr().err.splitlines() == lines


def test_a_subscription_that_begins_without_an_acknowledgment_is_an_error() -> None:
    """MUST (Subscriptions › Acknowledgment): it is the first message."""
    with serve(stream(CHANGED, ACKNOWLEDGED)) as server, pytest.raises(McpError, match="acknowledgment"):
        list(Client(server.url).listen({"toolsListChanged": True}))


def test_who_stops_listening_hangs_up() -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): a subscription too ends with its stream."""
    with serve(held_open(ACKNOWLEDGED)) as server:
        notifications = Client(server.url).listen({})
        next(notifications)
        notifications.close()  # type: ignore[attr-defined]
        assert server.hung_up.wait(WAIT)


# ------------------------------------------------------------------------------------------ command line


def test_the_command_line_lists_tools(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: what a server says is shown without the characters that steer a terminal."""
    with serve(listed({"name": "x", "description": "does\x1b[2J\x9b x"}, {"name": "y"})) as server:
        assert lesson.main([server.url]) == 0
    assert capsys.readouterr() == ("x: does\ufffd[2J\ufffd x\ny: \n", "")


def test_the_command_line_calls_a_tool_for_a_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choice: the result is on stdout, progress on stderr, the user is $MCP_USER as in mcp.sh."""
    monkeypatch.setenv("MCP_USER", "bob")
    with serve(listed({"name": "x"}), stream(progress(1, 2, "half"), DONE)) as server:
        assert lesson.main([server.url, "x", '{"a": "ü"}']) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (DONE["result"], "1/2 half\n")
    assert server.exchanges[1].params["arguments"] == {"a": "ü"}
    assert server.exchanges[1].headers["authorization"] == "Bearer bob"


def test_on_a_terminal_progress_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choice: a bar is drawn over; what comes after it begins on a new line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    terminal = Terminal("server")
    terminal.progress(1, 2, "a\rb")
    terminal.progress(9, 3, None)
    terminal.progress(3, None, None)
    terminal.say("done")
    terminal.end_bar()
    bars = capsys.readouterr().err.split("\r")[1:]
    assert bars[0] == f"[{'#' * 15}{'.' * 15}] 1/2 a\ufffdb\x1b[K"
    assert bars[1] == f"[{'#' * 30}] 9/3\x1b[K"
    assert bars[2] == f"[{'.' * 30}] 3\x1b[K\ndone\n"


@pytest.mark.parametrize(
    ("answer", "arguments", "line"),
    [
        (result(content=[], isError=True), "{}", ""),
        (error(-32602), "{}", "McpError: no (-32602)\n"),
        (octets(b""), "{}", "BrokenStream: the stream broke: "),
    ],
)
def test_a_failure_is_one_line_and_an_exit_status(
    answer: Answer, arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Choice: no traceback for what a server or a network does."""
    with serve(listed({"name": "x"}), answer) as server:
        assert lesson.main([server.url, "x", arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == (1 if line else 0)


@pytest.mark.parametrize("arguments", [[], ["a", "b", "{}", "c"], ["--era"], ["--era", "a", "b"], ["--unheard-of"]])
def test_a_wrong_command_line_is_told_how_it_is_used(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Choice: the usage is the module's docstring."""
    assert lesson.main(arguments) == 2
    assert "client.py URL TOOL" in capsys.readouterr().err


def test_a_task_is_shown_and_ctrl_c_says_that_it_was_cancelled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choice: the line says what was done, because closing a stream would not have done it."""

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lesson, "Client", partial(Client, wait=interrupt))
    with serve(listed({"name": "x"}), task(resultType="task", statusMessage="step 1"), result()) as server:
        assert lesson.main([server.url, "x", "--tasks"]) == 130
    expected = "task t ü: working step 1\nasked the server to cancel task t ü\n"
    assert capsys.readouterr().err == expected
    assert server.exchanges[1].meta["clientCapabilities"]["extensions"] == {META + "tasks": {}}


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("messages", [[], [progress(1, 2)]], ids=["before the head", "in the stream"])
def test_ctrl_c_hangs_up_and_says_so(messages: list[Message]) -> None:
    """MUST (Cancellation › Transport-Specific Cancellation): no notification is needed, the hang-up says it."""
    with serve(listed({"name": "x"}), held_open(*messages)) as server:
        command = [sys.executable, str(LESSONS / "client.py"), server.url, "x"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert server.asked_for(2)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT)
        assert server.hung_up.wait(WAIT)
    assert (process.returncode, out) == (130, "")
    assert err.removeprefix("1/2\n") == "closed the response stream: the request is cancelled\n"


# ------------------------------------------------------------------------------------------ questions

FORM = {
    "mode": "form",
    "message": "Who\x1b are you?",
    "requestedSchema": {
        "properties": {
            "name": {"type": "string", "title": "Your name"},
            "age": {"type": "integer", "description": "in years"},
            "member": {"type": "boolean", "default": False},
            "color": {"type": "string", "oneOf": [{"const": "red", "title": "Red"}]},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        },
        "required": ["name"],
    },
}


@contextmanager
def typing(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Iterator[None]:
    """A person who types these lines and then ends the input."""
    rest = iter(lines)

    def read() -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    yield
    assert next(rest, None) is None, "not every line was read"


def ask(params: Message) -> Message:
    return Terminal("host:3000").answer("q", {"method": "elicitation/create", "params": params})


def test_a_form_is_filled_in_field_by_field(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MUST (Elicitation › User Interaction Model): make clear which server asks, let the user review first."""
    with typing(monkeypatch, " 7 ", "7", "YES", "red", '["a"]', "y"):
        answer = ask(FORM)
    assert answer == {
        "action": "accept",
        "content": {"name": "7", "age": 7, "member": True, "color": "red", "tags": ["a"]},
    }
    shown = capsys.readouterr().err
    assert shown.startswith("host:3000 asks: Who\ufffd are you?\nYour name (string), empty for none: ")
    assert "age (integer  in years), empty for none:" in shown
    assert "color (string ['red']), empty for none:" in shown
    assert "tags (array ['a', 'b']), empty for none:" in shown
    assert "Your answer: {" in shown


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        (["", "", "", "", "", "y"], {"action": "accept", "content": {"member": False}}),
        (["", "seven", "", "", "", "y"], {"action": "accept", "content": {"age": "seven", "member": False}}),
        (["x", "", "", "", "", "e", "y", "", "", "", "", "y"],
         {"action": "accept", "content": {"name": "y", "member": False}}),
        (["x", "", "", "", "", "n"], {"action": "decline"}),
        (["x", ""], {"action": "cancel"}),
    ],
)  # fmt: skip
def test_a_form_may_be_left_empty_filled_in_again_declined_or_cancelled(
    lines: list[str], answer: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MUST (Elicitation › User Interaction Model): clear decline and cancel options; SHOULD: defaults."""
    with typing(monkeypatch, *lines):
        assert ask(FORM) == answer


@pytest.mark.parametrize(
    ("lines", "action"), [(["y"], "accept"), (["n"], "decline"), ([""], "decline"), ([], "cancel")]
)
def test_a_page_is_opened_only_with_consent(
    lines: list[str], action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MUST (Elicitation › User Interaction Model): display the target host and gather consent."""
    url = "https://example.com@evil.test/x"
    with typing(monkeypatch, *lines):
        assert ask({"mode": "url", "message": "Sign in", "url": url}) == {"action": action}
    assert f"a page on evil.test: {url}" in capsys.readouterr().err


def test_other_input_requests_are_not_answered() -> None:
    """Choice: this client declares neither sampling nor roots."""
    with pytest.raises(ValueError, match="sampling/createMessage"):
        Terminal("x").answer("q", {"method": "sampling/createMessage", "params": {}})


def test_a_result_is_printed_below_the_bar(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choice: on a terminal, stdout and stderr meet."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with serve(listed({"name": "x"}), stream(progress(1, 2), DONE)) as server:
        assert lesson.main([server.url, "x"]) == 0
    assert capfd.readouterr().err.endswith("\x1b[K\n")


def test_the_command_line_answers_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MUST (Elicitation › Capabilities): declared with both modes, because the terminal can do both."""
    script = [listed({"name": "x"}), asks("q", requestState="s"), result(content=[])]
    with serve(*script) as server, typing(monkeypatch, "y"):
        assert lesson.main([server.url, "x"]) == 0
    assert server.exchanges[1].meta["clientCapabilities"] == {"elicitation": {"form": {}, "url": {}}}
    assert server.exchanges[2].params["inputResponses"] == {"q": {"action": "accept", "content": {}}}


# ------------------------------------------------------------------------------------------ whatever a server says

NESTED: Any = "x"
for _ in range(90):
    NESTED = [NESTED]
INSTEAD: dict[str, Any] = {"null": None, "text": "x", "number": 7, "true": True, "list": [], "object": {},
                           "huge": 10**400, "long": "x" * 100_000, "nested": NESTED}
ABSENT = object()

TASK_STATE: Message = {"taskId": "t", "status": "working", "ttlMs": None, "pollIntervalMs": 1, "statusMessage": "one"}
TOOL: Message = {
    "name": "x",
    "description": "text",
    "inputSchema": {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "A"}}},
    "outputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
URL_PAGE: Message = {"mode": "url", "message": "Sign in", "url": "https://example.com/x"}
RESULT: Message = {"resultType": "complete", "content": [{"type": "text", "text": "x"}], "structuredContent": {"n": 1}}


def asking(params: Message) -> Message:
    return {"method": "elicitation/create", "params": params}


# What a well-behaved server sends, by method; several messages are a stream, and the last answer is given again.
GOOD: dict[str, list[list[Message]]] = {
    "server/discover": [[{"result": {"resultType": "complete", "supportedVersions": ["2026-07-28"]}}]],
    "tools/list": [[{"result": {"resultType": "complete", "tools": [TOOL], "nextCursor": "2"}}],
                   [{"result": {"resultType": "complete", "tools": []}}]],
    "tools/call": [[progress(1, 2, "half"), {"method": "notifications/message", "params": {"level": "info", "data": 1}},
                    {"result": {"resultType": "input_required", "requestState": "s",
                                "inputRequests": {"q": asking(FORM), "r": asking(URL_PAGE)}}}],
                   [{"result": {"resultType": "task"} | TASK_STATE}],
                   [{"result": RESULT}]],
    "tasks/get": [[{"result": {"resultType": "complete"} | TASK_STATE | {"status": "input_required",
                                                                         "inputRequests": {"k": asking(FORM)}}}],
                  [{"result": {"resultType": "complete"} | TASK_STATE | {"status": "completed", "result": RESULT}}]],
    "tasks/update": [[{"result": {"resultType": "complete"}}]],
    "subscriptions/listen": [[ACKNOWLEDGED | {"params": {"notifications": {"toolsListChanged": True}}}, CHANGED,
                              {"result": {"resultType": "complete"}}]],
}  # fmt: skip
REFUSALS: dict[str, list[list[Message]]] = {
    "tools/list": [[{"error": {"code": -32022, "message": "no", "data": {"supported": ["1"], "requested": "2"}}}]],
    "tools/call": [[{"error": {"code": -32603, "message": "no", "data": {"x": 1}}}]],
    "tasks/get": [[{"result": {"resultType": "complete"} | TASK_STATE | {"status": "failed",
                                                                         "error": {"code": -1, "message": "no"}}}]],
}  # fmt: skip


def variants(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with one member, however deep, left out or replaced; and where and how."""
    yield from {**INSTEAD, "absent": ABSENT}.items()
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        for where, changed in variants(member):
            copy = value.copy()
            if changed is not ABSENT:
                copy[key] = changed
            elif isinstance(copy, dict):
                del copy[key]
            else:
                continue
            yield f"{key} {where}", copy


class Told:
    """In place of ResponseStream: the messages that the script has for the method. Each may be asked 50 times."""

    script: dict[str, list[list[Message]]]
    asked: list[str]
    status = 200

    def __init__(self, url: str, message: Message, headers: Message, timeout: float | None) -> None:
        method = message["method"]
        self.asked.append(method)
        assert len(self.asked) < 50, "the client does not come to an end"
        answers = self.script.get(method, [[{"error": {"code": -32601, "message": "no"}}]])
        self.messages = answers[min(self.asked.count(method), len(answers)) - 1]

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Message]:
        for one in self.messages:
            yield lesson.decode_message(encode_json({"jsonrpc": "2.0", "id": 1} | one))


def outcome(script: dict[str, list[list[Message]]], arguments: list[str]) -> int:
    """The exit status of the command line against a script; for no arguments, of listening."""
    Told.script, Told.asked = script, []
    if arguments:
        return lesson.main([arguments[0], "http://127.0.0.1:1/", *arguments[1:]])
    try:
        return len(list(Client("http://127.0.0.1:1/").listen({"toolsListChanged": True}))) and 0
    except McpError as refused:
        print(f"McpError: {refused}", file=sys.stderr)
        return 1


READ = {
    "server/discover": ["--era"],
    "tools/list": ["--tasks", "x"],
    "tools/call": ["--tasks", "x"],
    "tasks/get": ["--tasks", "x"],
    "tasks/update": ["--tasks", "x"],
    "subscriptions/listen": [],
}
CASES = [(method, number, place, GOOD) for method in GOOD for number, stream in enumerate(GOOD[method])
         for place in range(len(stream))]
CASES += [(method, 0, 0, GOOD | {method: REFUSALS[method]}) for method in REFUSALS]


@pytest.mark.parametrize(("method", "number", "place", "script"), CASES,
                         ids=[f"{one[0]} {one[1]} {one[2]}" for one in CASES])
def test_whatever_a_message_says_ends_in_the_result_or_in_one_sentence(
        method: str, number: int, place: int, script: dict[str, list[list[Message]]],
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a member that is missing, of another type, null or huge is no reason for a traceback, nor for a loop."""
    monkeypatch.setattr(lesson, "ResponseStream", Told)
    monkeypatch.setattr(lesson, "Client", partial(Client, wait=lambda seconds: None))
    monkeypatch.setattr("builtins.input", lambda: "y")
    good = script[method][number][place]
    for where, changed in [("nothing", good), *variants(good)]:
        if isinstance(changed, dict):  # what is none does not pass decode_message, see BROKEN
            stream = [*script[method][number][:place], changed, *script[method][number][place + 1 :]]
            answers = [*script[method][:number], stream, *script[method][number + 1 :]]
            status = outcome(script | {method: answers}, READ[method])
            err = capsys.readouterr().err
            assert status == 0 or (status == 1 and re.search(r"(McpError|ValueError): .+$", err)), (where, err)
            assert method in Told.asked, where


def test_what_a_well_behaved_server_says_is_believed(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a client that refuses everything would pass the test above."""
    monkeypatch.setattr(lesson, "ResponseStream", Told)
    monkeypatch.setattr(lesson, "Client", partial(Client, wait=lambda seconds: None))
    monkeypatch.setattr("builtins.input", lambda: "y")
    assert outcome(GOOD, ["--tasks", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == RESULT
    twice = ["tools/list", "tools/list", "tools/call", "tools/call"]
    assert Told.asked == [*twice, "tasks/get", "tasks/update", "tasks/get"]
    assert outcome(GOOD, []) == 0 and outcome(GOOD, ["--era"]) == 0


def test_progress_without_a_number_is_dropped_and_the_result_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """MUST (Progress › Progress Flow): a notification has a progress value; one that has none says nothing."""
    kind = {"method": "notifications/progress"}
    bad: list[Message] = [kind, *({**kind, "params": params} for params in (
        {}, {"progress": None}, {"progress": "1"}, {"progress": 10**400}, []))]
    with serve(listed({"name": "x"}), stream(*bad, progress(1, 2), DONE)) as server:
        assert lesson.main([server.url, "x"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (DONE["result"], "1/2\n")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:3000/mcp", "write the scheme too, as in http://127.0.0.1:3000/mcp"),
        ("localhost:3000/mcp", "write the scheme too"),
        ("ftp://127.0.0.1/mcp", "no HTTP URL"),
        ("http://", "no HTTP URL"),
        ("http://127.0.0.1:x/", "Port could not be cast"),
        ("http://127.0.0.1:99999/", "Port out of range"),
        ("http://127.0.0.1:0/", "port 0"),
        ("http://[::1/", "Invalid IPv6 URL"),
    ],
)
def test_a_url_that_is_none_is_told_what_is_missing(
        url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a resolver's error for a forgotten scheme is a riddle."""
    assert lesson.main([url]) == 1
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", ["[1]", "7", "null", "{"])
def test_arguments_that_are_no_object_are_refused_before_anything_is_sent(
        arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a slip on the command line is told on the command line."""
    assert lesson.main(["http://127.0.0.1:1/", "x", arguments]) == 1
    assert capsys.readouterr().err.startswith(("ValueError: ", "JSONDecodeError: "))


def test_a_terminal_that_is_not_utf_8_gets_escapes() -> None:
    """Choice: the result is shown as far as the terminal can show it."""
    with serve(listed({"name": "x", "description": "17 °C ✓ \ud800"})) as server:
        command = [sys.executable, str(LESSONS / "client.py"), server.url]
        environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        done = subprocess.run(command, capture_output=True, timeout=WAIT, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"x: 17 \\xb0C \\u2713 \\ufffd\n"
