"""The lessons do what they say, and go red when the server does not: gateway, spoof, three ways, cuts, --wire, …"""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_tool
import client
import cuts
import gateway
import header_values
import pytest
import spoof
import three_ways
from gateway import Gateway
from legacy_server import LegacyServer
from support import PATIENCE, ROOT, Connection, by_hand, eventually, message, octets, running
from three_ways import Exchange, Plan, serving

from reference_server import Cancelled, Endpoint, HttpServer, Request, Server, Wire, demo_server, main

# ------------------------------------------------------------------------------------------------------ gateway


@contextlib.contextmanager
def gateway_before(port: int, *allowed: str) -> Iterator[Gateway]:
    """A gateway that serves until the block ends."""
    with Gateway(port, allowed) as gateway, serving_thread(gateway):
        yield gateway


@contextlib.contextmanager
def serving_thread(server: Any) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        assert not thread.is_alive()


class Upstream:
    """In place of a server: takes one request's octets, answers with the octets it was given."""

    def __init__(self, answer: bytes) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE)
        self.port = self.listener.getsockname()[1]
        self.answer = answer

    def __enter__(self) -> "Upstream":
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def serve_one(self) -> bytes:
        """The request; it must end in `}`, as a JSON object does."""
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(PATIENCE)
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65536)
            connection.sendall(self.answer)
        return received


def called(tool: str = "search") -> dict[str, Any]:
    """A tools/call."""
    return message("tools/call", {"name": tool, "arguments": {}})


def send(port: int, data: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to literal octets."""
    with Connection(port) as connection:
        connection.send(data)
        reply = connection.reply()
        return reply.status, reply.body


REFUSED = {
    "the plain name": (octets(called("slow")), 403),
    "the name in sentinel form": (octets(called("slow"), Mcp_Name="=?base64?c2xvdw==?="), 403),
    "another case": (octets(called(), Mcp_Name="Search"), 403),
    "a sentinel that is no base64": (octets(called(), Mcp_Name="=?base64?c2VhcmNo!?="), 400),
    "a sentinel that is not canonical": (octets(called(), Mcp_Name="=?base64?c2VhcmNoZR==?="), 400),
    "two different names": (octets(called(), Mcp_Name=["search", "slow"]), 400),
    "one name in two spellings": (octets(called(), Mcp_Name=["search", "=?base64?c2VhcmNo?="]), 400),
    "a bare CR": (octets(called(), Mcp_Name="search\rMcp-Name: slow"), 400),
    "no name": (octets(called(), Mcp_Name=None), 400),
    "Connection takes the name away": (octets(called(), Connection="close, Mcp-Name"), 400),
    "a version before the comparison": (octets(called(), MCP_Protocol_Version="2025-11-25"), 400),
    "a version that is no date": (octets(called(), MCP_Protocol_Version="9"), 400),
    "no version": (octets(called(), MCP_Protocol_Version=None), 400),
    "two versions": (octets(called(), MCP_Protocol_Version=["2026-07-28", "2025-11-25"]), 400),
    "GET": (b"GET /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400),
    "chunks": (octets(called(), length=False, Transfer_Encoding="chunked"), 411),
    "a huge body": (octets(called(), Content_Length="1048577"), 413),
    "no HTTP": (b"\x16\x03\x01\r\n\r\n", 400),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Gateway]:
    """A gateway that allows `search`, with nothing behind it: a request that got through would be answered by 502."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with gateway_before(port, "search") as gateway:
        yield gateway


@pytest.mark.parametrize("case", REFUSED)
def test_the_gateway_refuses_what_it_cannot_believe_or_does_not_allow(guarded: Gateway, case: str) -> None:
    """MUST (Streamable HTTP › Value Encoding): intermediaries that inspect these values decode them (case B182)."""
    data, expected = REFUSED[case]
    status, body = send(guarded.port, data)
    assert (status, body[:9]) == (expected, b"gateway: "), body


def test_the_gateway_answers_502_when_there_is_no_server(guarded: Gateway) -> None:
    """RFC 9110 §15.6.3: a gateway that got no answer from the server says so; an allowed request did get through."""
    assert send(guarded.port, octets(called()))[0] == 502


@pytest.mark.parametrize("name", ["search", "=?base64?c2VhcmNo?=", ["search", "search"]])
def test_the_gateway_passes_an_allowed_request_on_as_it_is_and_its_answer_too(name: str | list[str]) -> None:
    """MUST (Streamable HTTP › Server Behavior for Custom Headers): forwards Mcp-Param-* that it does not recognize."""
    answer = b"HTTP/1.1 418 Teapot\r\nX-Any: thing\r\n\r\nshort and stout"
    sent = octets(called(), Mcp_Name=name, Mcp_Param_Region=["=?base64?4pyT?=", "other"], X_Hop="1",
                  Connection="keep-alive, X-Hop", Expect="100-continue")
    with (Upstream(answer) as upstream, gateway_before(upstream.port, "search") as gateway,
          Connection(gateway.port) as client):
        client.send(sent)
        received = upstream.serve_one()
        assert client.read_to_end().removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n") == answer
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert body == sent.partition(b"\r\n\r\n")[2]
    assert b"mcp-param-region: =?base64?4pyt?=" in lines and b"=?base64?4pyT?=" in head
    assert b"mcp-param-region: other" in lines
    assert [line for line in lines if line.startswith((b"x-hop", b"connection", b"expect"))] == [b"connection: close"]
    names = [name] if isinstance(name, str) else name
    assert [line[10:] for line in lines if line.startswith(b"mcp-name: ")] == [one.lower().encode() for one in names]


class Slow:
    """A server with one tool that reports a step, waits for `go`, and tells when it was cancelled."""

    def __init__(self) -> None:
        self.server = Server("slow", "1")
        self.go, self.cancelled = threading.Event(), threading.Event()
        self.server.tool("search", "Waits.", {"type": "object"})(self.search)

    def search(self, arguments: dict[str, Any], request: Request) -> str:
        try:
            request.progress(1, 2)
            while not self.go.is_set():
                request.sleep(0.001)
        except Cancelled:
            self.cancelled.set()
            raise
        return "done"


def test_the_gateway_streams_events_through_as_they_come() -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): events are delivered at once, not held back in a buffer."""
    slow = Slow()
    with (running(slow.server) as server, gateway_before(server.port, "search") as gateway,
          Connection(gateway.port) as client):
        client.send(octets(message("tools/call", {"name": "search"}, progressToken=0)))
        assert client.head()[0] == 200
        events = client.events()
        assert next(events)["params"]["progress"] == 1
        slow.go.set()
        assert next(events)["result"]["content"][0]["text"] == "done"


@pytest.mark.parametrize("token", [{"progressToken": 0}, {}], ids=["streaming", "silent"])
def test_the_gateway_closes_upstream_when_its_client_leaves(token: dict[str, Any]) -> None:
    """MUST (Streamable HTTP › Cancellation): the closed stream cancels, on every leg of the way."""
    slow = Slow()
    with running(slow.server) as server, gateway_before(server.port, "search") as gateway:
        with Connection(gateway.port) as client:
            client.send(octets(message("tools/call", {"name": "search"}, **token)))
            if token:
                client.head()
        assert slow.cancelled.wait(PATIENCE)


# --------------------------------------------------------------------------------------------------- started by hand

LESSONS = ROOT / "tests" / "lessons"
SERVERS = {"gateway.py": ["3000"], "legacy_server.py": [], "bad_tool.py": []}  # with what comes before the port
SCRIPTS = [*SERVERS, "client.py", "spoof.py", "three_ways.py", "cuts.py", "header_values.py"]


def test_every_script_explains_itself() -> None:
    """Choice: --help is what a newcomer tries; it does nothing but print."""
    done = by_hand(*((f"tests/lessons/{script}", "--help") for script in SCRIPTS))
    for script, (status, out, err) in zip(SCRIPTS, done, strict=True):
        assert (script, status, err) == (script, 0, "")
        assert f"python tests/lessons/{script}" in out


OLD_PYTHON = 'sys.version_info, sys.version = (3, 10, 9, "final", 0), "3.10.9 (a test)"'


def test_an_old_python_is_told_so_in_one_sentence() -> None:
    """Choice: a syntax or type error from deep inside says nothing to a newcomer."""
    scripts = ["reference_server.py", *(f"tests/lessons/{script}" for script in SCRIPTS)]
    done = by_hand(*((script, "--help") for script in scripts), before=OLD_PYTHON)
    for script, outcome in zip(scripts, done, strict=True):
        assert outcome == (1, "", f"{Path(script).name} needs Python 3.11 or newer, this is 3.10.9\n")


@pytest.mark.parametrize("script", SERVERS)
def test_a_server_says_where_it_is_and_ends_with_ctrl_c(script: str) -> None:
    """Choice: no traceback for the usual way out."""
    command = [sys.executable, LESSONS / script, *SERVERS[script], "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        bound = threading.Timer(PATIENCE, process.kill)
        bound.start()
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        bound.cancel()
    assert re.search(r": http://127\.0\.0\.1:[1-9][0-9]*/mcp ", line)
    assert (process.returncode, rest) == (0, "")


def test_a_port_that_is_taken_is_one_sentence_that_says_how_to_go_on() -> None:
    """Choice: on a learner's machine 3001 may well be taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = by_hand(*((f"tests/lessons/{script}", *before, port) for script, before in SERVERS.items()))
    for script, (status, out, err) in zip(SERVERS, done, strict=True):
        assert (script, status, out) == (script, 1, "")
        told = rf"{script}: cannot listen on port {port}: .+ Give another port as the last argument\.\n"
        assert re.fullmatch(told, err)


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: no traceback for a slip on the command line."""
    with contextlib.suppress(SystemExit):
        assert gateway.main(["3000", port]) == 1
    assert re.search("cannot listen on port|invalid int value|unrecognized arguments", capsys.readouterr().err)


# ---------------------------------------------------------------------------------------- what a newcomer is told


def test_the_server_says_how_to_go_on_when_its_port_is_taken(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: on a learner's machine 3000 may well be taken; the lessons must know of the other port."""
    monkeypatch.setattr(HttpServer, "serve_forever", lambda _: pytest.fail("it listens there"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(sys, "argv", ["reference_server.py", "--port", str(taken.getsockname()[1])])
        status = main()
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert "--port 3005" in err and "export MCP=http://127.0.0.1:3005/mcp" in err


def test_the_servers_help_has_an_example_and_its_options_in_groups(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a learner needs five of the options and should not have to read the others to find them."""
    monkeypatch.setattr(sys, "argv", ["reference_server.py", "--help"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert re.search("(?i)example", out) and "python3 reference_server.py --" in out
    assert len(re.findall(r"(?m)^[A-Za-z][^\n]*:$", out)) >= 3  # the options themselves, and two groups


NOVICE = {
    "no _meta": (called() | {"params": {"name": "search", "arguments": {}}}, "protocolVersion.*clientCapabilities"),
    "a response": ({"jsonrpc": "2.0", "id": 1, "result": {}}, "response"),
    "initialize": ({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}, "^.{0,60}2026-07-28"),
    "an empty $META": (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"search",}}', r"\$META"),
}


@pytest.mark.parametrize("case", NOVICE)
def test_a_newcomers_mistake_is_answered_with_what_would_be_right(case: str) -> None:
    """Choice: an error text that says what to do saves a search; the first half of a sentence is what is read."""
    body, words = NOVICE[case]
    with running(demo_server()) as server:
        mirrored: dict[str, Any] = {} if case == "initialize" else {
            "MCP_Protocol_Version": "2026-07-28", "Mcp_Method": "tools/call", "Mcp_Name": "search"}
        data = octets(body if isinstance(body, bytes) else json.dumps(body).encode(), **mirrored)
        message = server.exchange(data).message["error"]["message"]
    assert re.search(words, message), message


# -------------------------------------------------------------------------------------------------- the spoofed header


def test_the_spoof_makes_a_hold_only_where_headers_and_body_differ_unseen(capsys: pytest.CaptureFixture[str]) -> None:
    """MUST (Streamable HTTP › Server Validation): reject requests whose headers do not match the body."""
    assert spoof.show() == 0
    table = capsys.readouterr().out
    rows = [re.split(r" {2,}", line)[1:] for line in table.splitlines()[1:]]
    assert rows == [["200", "403", "200", "1"], ["200", "403", "400, -32020", "0"]]
    assert f"```sh\nmake spoof\n```\n```text\n{table}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_server_warns_loudly_when_it_does_not_compare(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: the switch is for tests and this lesson, so nobody may meet it without seeing it."""
    server = demo_server()
    server.compares_headers = False
    with running(server):
        assert eventually(lambda: "WARNING" in capsys.readouterr().err)


def test_the_spoof_fails_when_the_server_skips_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: a lesson that cannot fail shows nothing."""

    def broken() -> Server:
        server = demo_server()
        server.compares_headers = False
        return server

    assert spoof.show(broken) == 1
    assert "not what the lesson says" in capsys.readouterr().out


def test_the_spoof_fails_when_the_server_refuses_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: no hold is made by a server that does nothing, so the harmless call has to work."""
    assert spoof.show(lambda: Server("empty", "1")) == 1


# ---------------------------------------------------------------------------------------------------- three ways

SHORT = Plan(steps=20, step_seconds=0.008, leave_after=3)


def test_three_ways_shows_what_each_transport_does_with_a_client_that_leaves(capfd: pytest.CaptureFixture[str]) -> None:
    """MUST (Streamable HTTP › Cancellation): the closed stream cancels; SHOULD NOT in 2025-11-25."""
    assert three_ways.show(SHORT) == 0
    table = [re.split(r" {2,}", line) for line in capfd.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in table] == ["transport", "stdio", "HTTP 2026-07-28", "HTTP 2025-11-25"]
    assert [row[1] for row in table[1:]] == [
        "20 lines on stdout", "20 events, 0 with an id", "3 + 17 events, 20 with an id"]
    assert all(3 <= int(row[3]) < 20 for row in table[1:])
    assert 20 < int(table[1][5]) < 40 and 20 < int(table[2][5]) < 40 and table[3][5] == "20"


class Deaf(Endpoint):
    """An endpoint that does not notice when its client hangs up."""

    def cancel(self, reason: str) -> None:
        """Nobody listens."""


def test_three_ways_fails_when_the_server_ignores_the_hang_up(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a lesson that cannot fail shows nothing."""
    stdio = three_ways.Row("stdio", "8 lines on stdout", "by notification", 3, "called again", 11)
    monkeypatch.setattr(three_ways, "over_stdio", lambda job: stdio)  # it would be as it was in the test before
    assert three_ways.show(Plan(steps=8, step_seconds=0.002, leave_after=2), Deaf) == 1
    out = capsys.readouterr().out
    assert "not what the lesson says" in out
    modern = re.split(r" {2,}", out.splitlines()[3])
    assert (modern[3], modern[5]) == ("8", "16")


@pytest.mark.parametrize(("session", "status"), [({}, 400), ({"Mcp-Session-Id": "forgotten"}, 404)])
def test_the_old_server_needs_its_session(session: dict[str, str], status: int) -> None:
    """SHOULD (2025-11-25, Session Management): 400 without a session; MUST: 404 for one that has ended."""
    server = Server("old", "1")
    with serving(LegacyServer(server)) as port, Exchange(port, "POST", session, called()) as exchange:
        assert exchange.answer.status == status
    server.store.close()


def test_the_era_of_the_old_server_is_told_by_asking_it(capsys: pytest.CaptureFixture[str]) -> None:
    """SHOULD (Streamable HTTP › Backward Compatibility): a refusal without a modern error means initialize."""
    server = Server("old", "1")
    with serving(LegacyServer(server)) as port:
        assert client.main(["--era", f"http://127.0.0.1:{port}/mcp"]) == 0
    server.store.close()
    assert re.fullmatch(r"legacy: HTTP 400 .*initialize is answered with version 2025-11-25\n", capsys.readouterr().out)


def test_the_era_of_this_server_is_told_and_that_of_a_page_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """SHOULD (Streamable HTTP › Backward Compatibility): the body of a 404 decides, and a bare one decides nothing."""
    with running(demo_server()) as server:
        for path in ("mcp", "elsewhere"):
            assert client.main(["--era", f"http://127.0.0.1:{server.port}/{path}"]) == 0
    modern, neither = capsys.readouterr().out.splitlines()
    assert modern.startswith("modern: ") and "2026-07-28" in modern
    assert neither.startswith("neither: no MCP server is here: HTTP 404 Not Found")


# --------------------------------------------------------------------------------------- cuts, header values, bad tool


def test_the_stream_is_the_same_three_events_wherever_it_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """WHATWG HTML §9.2.5: a stream is its octets, not the pieces in which they come."""
    assert cuts.main() == 0
    out = capsys.readouterr().out
    assert "91 octets, cut at 90 places: 1 outcome\n" in out and out.count("event: ") == 3


def test_the_lesson_of_the_cuts_goes_red_when_a_cut_makes_a_difference(
        capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a lesson that cannot fail shows nothing."""

    class Forgetful(cuts.EventParser):
        """Loses pieces of five octets; read octet by octet it is right."""

        def feed(self, data: bytes) -> list[cuts.Event]:
            return [] if len(data) == 5 else super().feed(data)

    monkeypatch.setattr(cuts, "EventParser", Forgetful)
    assert cuts.main() == 1
    out = capsys.readouterr().out
    assert "91 octets, cut at 90 places: 2 outcomes\n" in out and out.count("event: ") == 3


def test_the_five_header_values_come_back_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    """MUST (Streamable HTTP › Value Encoding): what a header cannot carry as it is travels in base64."""
    assert header_values.main(header_values.KINDS) == 0
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == list(header_values.KINDS)
    assert [row[2] == row[1].strip("'") for row in rows] == [True, False, False, False, False]
    assert all(row[1] == row[3] for row in rows)


def test_the_table_of_header_values_fails_when_one_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a lesson that cannot fail shows nothing."""
    monkeypatch.setattr(header_values, "decode_value", str.upper)
    assert header_values.main(header_values.KINDS) == 1


def test_the_client_drops_the_bad_tool_says_why_and_keeps_the_good_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """MUST (Streamable HTTP › Schema Extension): exclude the invalid tool; SHOULD log its name and the reason."""
    server = bad_tool.listing_server()
    with serving(server) as port:
        assert client.main([f"http://127.0.0.1:{port}/mcp"]) == 0
        assert client.main([f"http://127.0.0.1:{port}/mcp", "get_rate", '{"region": "eu"}']) == 1
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == ["list_accounts", "get_rate"]
    dropped = "left out tool 'move_money': x-mcp-header 'Amount' at 'properties/amount' is not on an integer, a string"
    assert err.startswith(dropped) and err.splitlines()[-1].endswith("(-32601)")


def test_the_reference_server_refuses_the_bad_tool() -> None:
    """Choice: what a client must leave out, a server does not offer, which is why the lesson needs one of its own."""
    name, description, schema = (bad_tool.TOOLS[1][key] for key in ("name", "description", "inputSchema"))
    server = Server("any", "1")
    with pytest.raises(ValueError, match="is not on an integer"):
        server.tool(name, description, schema)(lambda arguments, request: "moved")
    server.store.close()


# -------------------------------------------------------------------------------------------------------- --wire


class Screen(io.StringIO):
    """In place of stderr until the test ends. To be made in the test itself: pytest changes stderr before each test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, terminal: bool = False) -> None:
        super().__init__()
        self.terminal = terminal
        monkeypatch.setattr(sys, "stderr", self)

    def isatty(self) -> bool:
        """Whether a person sits before it."""
        return self.terminal

    def wire(self) -> list[str]:
        """The lines of the wire, without their numbers and times; they must all have the format."""
        lines = [line for line in self.getvalue().splitlines() if not line.startswith("[ref]")]
        matches = [re.fullmatch(r"(-->|<--|--x) #[0-9]+ +[0-9]+\.[0-9] ms  (.+)", line) for line in lines]
        assert lines and all(matches), lines
        return [f"{match[1]} {match[2]}" for match in matches if match]


def test_wire_prints_the_request_the_answer_and_each_event_as_they_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: the lesson's diagrams are something that a learner watches; a bearer is not for the screen."""
    screen = Screen(monkeypatch)
    slow = Slow()
    slow.go.set()
    with running(slow.server, wire=Wire()) as server:
        server.call_tool("search", user="alice-s3cret", progressToken=7)
    lines = screen.wire()
    assert lines[0] == "--> POST /mcp HTTP/1.1"
    assert "--> Mcp-Name: search" in lines
    assert any(line.startswith("--> Authorization: ") and line.endswith("***") for line in lines)
    assert any(line.startswith('--> {"jsonrpc"') for line in lines)
    answer = lines[lines.index("<-- HTTP/1.1 200 OK"):]
    assert "<-- Content-Type: text/event-stream" in answer
    events = [line for line in answer if line.startswith("<-- data: ")]
    assert [("progress" in event, "result" in event) for event in events] == [(True, False), (False, True)]
    assert "s3cret" not in "\n".join(lines) and "\033" not in screen.getvalue()


@pytest.mark.parametrize("space", ["", " ", "\t", "  "], ids=["none", "one", "tab", "two"])
def test_wire_masks_a_bearer_whatever_white_space_stands_before_it(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    """RFC 9112 §5: OWS before a field's value is spaces and tabs."""
    screen = Screen(monkeypatch)
    line = f"Authorization:{space}Bearer s3cret\r\n".encode()
    request = octets(message("server/discover")).replace(b"\r\n", b"\r\n" + line, 1)
    with running(Server("any", "1"), wire=Wire()) as server:
        assert server.exchange(request).status == 200
    assert "s3cret" not in "\n".join(screen.wire())


def test_wire_escapes_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: what a client sends must not steer the terminal of whoever watches, nor forge a line."""
    screen = Screen(monkeypatch)
    with running(Server("any", "1"), wire=Wire()) as server:
        assert server.exchange(octets(b'{"\x1b[31m": "\x9b \xe2\x80\xae \r--> forged"}', Mcp_Method="x")).status == 400
    lines = screen.wire()
    shown = next(line for line in lines if "[31m" in line)
    assert r"\x1b[31m" in shown and r"\u202e" in shown
    assert screen.getvalue().replace("\n", "").isprintable()


def test_wire_prints_the_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUST (Streamable HTTP › Cancellation): closing the stream is the cancellation, so a learner must see it."""
    screen = Screen(monkeypatch)
    slow = Slow()
    with running(slow.server, wire=Wire()) as server, server.connect() as client:
        client.send(octets(message("tools/call", {"name": "search"}, id=41, progressToken=0)))
        client.head()
        client.socket.close()
        assert slow.cancelled.wait(PATIENCE)
        assert eventually(lambda: "--x #" in screen.getvalue())
    assert [line for line in screen.wire() if line.startswith("--x")] == ["--x stream closed: request 41 is cancelled"]


def test_wire_uses_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a log file is read without a terminal."""
    screen = Screen(monkeypatch)
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    with running(Server("any", "1"), wire=Wire()) as server:
        server.call("server/discover")
    lines = [line for line in screen.getvalue().splitlines() if not line.startswith("[ref]")]
    assert lines and all(re.fullmatch(r"\033\[[0-9;]+m.*\033\[0m", line) for line in lines)


# ---------------------------------------------------------------------------------------------------- keep-alive


def test_a_quiet_stream_gets_comments_and_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): a line that begins with a colon keeps a quiet stream open."""
    screen, slow = Screen(monkeypatch), Slow()
    with (running(slow.server, keep_alive=0.05, wire=Wire()) as server, server.connect() as client):
        client.send(octets(message("tools/call", {"name": "search"})))
        status, fields = client.head()
        assert (status, fields["content-type"]) == (200, "text/event-stream")
        assert b"".join(client.read_until(b":\n\n\r\n") for _ in range(3)) == b"3\r\n:\n\n\r\n" * 3
        slow.go.set()
        assert [event["result"]["content"][0]["text"] for event in client.events()] == ["done"]
    assert screen.wire().count("<-- :") >= 3


def test_a_quiet_call_brings_comments_at_the_interval_and_no_events() -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): a comment every interval; here 50 ms, in a call of 0.4 s."""
    server = Server("quiet", "1")

    @server.tool("wait", "Waits.", {"type": "object"})
    def wait(arguments: dict[str, Any], request: Request) -> str:
        request.sleep(0.4)
        return "done"

    with running(server, keep_alive=0.05) as quiet:
        reply = quiet.call_tool("wait")
    assert len(reply.messages) == 1 and reply.message["result"]["content"][0]["text"] == "done"
    assert 3 <= reply.body.count(b":\n\n") <= 8  # 7 on a machine that has nothing else to do
