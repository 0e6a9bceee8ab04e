"""Start and end of the process: one line when it listens, one when it cannot, and an orderly end for everybody."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support import PATIENCE, ROOT, SERVER_MODULE, Connection, HastyClock, eventually, message, octets, running

import reference_server
from reference_server import HttpServer, Request, Server

AS_TYPED = ("reference_server.py",)
LISTENING = re.compile(r"\[ref\] MCP 2026-07-28 at http://([^/]+):(\d+)/mcp \(Ctrl-C ends it\)\n")


class Process:
    """The server as a process, all warnings shown. It is killed if it takes longer than PATIENCE."""

    def __init__(self, *options: str, started: tuple[str, ...] = SERVER_MODULE, **environment: str) -> None:
        command = [sys.executable, "-X", "dev", "-W", "error", *started, *options]
        self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.watchdog = threading.Timer(PATIENCE, self.process.kill)

    def __enter__(self) -> "Process":
        self.watchdog.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.cancel()
        self.process.kill()
        self.process.communicate()

    def address(self) -> tuple[str, int]:
        """Host and port, from the first line on stderr."""
        assert self.process.stderr
        line = self.process.stderr.readline()
        found = LISTENING.fullmatch(line)
        assert found, line
        return found[1], int(found[2])

    def end(self) -> tuple[int, str, list[str]]:
        """Exit status, stdout, and the lines on stderr that have not been read."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err.splitlines()


def call(name: str, id: Any, **metadata: Any) -> bytes:
    return octets(message("tools/call", {"name": name, "arguments": {"month": "May"}}, id, **metadata))


def listen(connection: Connection, id: Any) -> None:
    """Opens a subscription and reads its acknowledgement."""
    connection.send(octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, id)))
    assert connection.head()[0] == 200
    assert next(connection.events())["method"] == "notifications/subscriptions/acknowledged"
    connection.read_until(b"\r\n")


@pytest.mark.parametrize("signals, listens, calls", [([signal.SIGTERM], 200, 50), (3 * [signal.SIGINT], 3, 3)],
                         ids=["SIGTERM", "SIGINT thrice"])
def test_a_signal_ends_everything_in_an_orderly_way(signals: list[signal.Signals], listens: int, calls: int) -> None:
    """SHOULD (Subscriptions › Graceful Closure): a result for each subscription; calls are cancelled; status 0."""
    options = ["--port", "0", "--step-seconds", "60", "--keep-alive", "0.03"]
    with Process(*options) as server, contextlib.ExitStack() as stack:
        port = server.address()[1]

        def connect(count: int) -> list[Connection]:
            return [stack.enter_context(Connection(port)) for _ in range(count)]

        subscriptions, slow, kept, fresh = connect(listens), connect(calls), connect(3), connect(3)
        for index, connection in enumerate(subscriptions):
            listen(connection, index if index % 2 else f"s{index}")
        for index, connection in enumerate(slow):
            connection.send(call("build_report", index, **({"progressToken": index} if index % 2 else {})))
        for connection in slow:
            assert connection.head()[1]["content-type"] == "text/event-stream"  # a comment: the tool is waiting
        for connection in kept:
            assert connection.call("server/discover").status == 200
        for number in signals:
            server.process.send_signal(number)
        for index, connection in enumerate(subscriptions):
            *_, last = connection.events()
            id = index if index % 2 else f"s{index}"
            assert last["id"] == id and last["result"]["resultType"] == "complete"
            assert last["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == id
            assert connection.read_to_end() == b"\r\n"  # the end of the last chunk, and of the connection
        for connection in slow:
            rest = connection.read_to_end()
            assert b"data:" not in rest and not rest.endswith(b"0\r\n\r\n")
        for connection in kept + fresh:
            assert connection.read_to_end() == b""
        status, out, lines = server.end()
        assert (status, out) == (0, "")
        assert lines.count("[ref] build_report cancelled at step 1 (server stopped)") == calls
        assert [line for line in lines if not line.startswith("[ref] ")] == []
    with running(Server("next", "1"), port=port) as following:  # the port can be bound again at once
        assert following.call("server/discover").status == 200


def test_a_taken_port_is_one_clear_line() -> None:
    """Choice: whoever starts it twice reads what is wrong, without a traceback, and the exit status is 1."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Process("--port", str(port), started=AS_TYPED) as server:
            status, out, lines = server.end()
    assert (status, out, len(lines)) == (1, "", 1)
    assert str(port) in lines[0] and "cannot listen" in lines[0] and "in use" in lines[0]


@pytest.mark.parametrize("options, environment, problem", [
    (["--port", "70000"], {}, "70000"),
    ([], {"PORT": "soon"}, "soon"),
])
def test_a_start_that_fails_says_why_without_a_traceback(
        options: list[str], environment: dict[str, str], problem: str,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: the last line names the value that is wrong."""
    monkeypatch.setattr(sys, "argv", ["reference_server.py", *options])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        reference_server.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert problem in err.splitlines()[-1]


def test_help_tells_a_newcomer_what_there_is() -> None:
    """Choice: --help names each option, and the helper that talks to the server."""
    with Process("--help", started=AS_TYPED) as server:
        status, out, lines = server.end()
    assert (status, lines) == (0, [])
    assert out.startswith("usage: reference_server.py") and "mcp.sh" in out
    for option in ("stdio", "host", "port", "step-seconds", "keep-alive", "allow-origin", "state", "wire", "rate",
                   "max-connections", "max-body", "idle-timeout", "request-timeout", "write-timeout"):
        assert f"--{option} " in out


def test_the_first_line_has_the_real_address() -> None:
    """Choice: port 0 is any free port, $PORT stands in for --port, and what is printed is a URL that works."""
    with Process("--host", "::1", started=AS_TYPED, PORT="0") as server:
        host, port = server.address()
        assert host == "[::1]" and port not in (0, 3000)
        with socket.create_connection(("::1", port), PATIENCE) as client:
            client.sendall(f"GET /healthz HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"ok\n")
        server.process.terminate()
        assert server.end() == (0, "", [])


# ------------------------------------------------------------------------------------------- the same in one process


@pytest.fixture
def stubborn() -> Iterator[tuple[Server, threading.Event, threading.Event]]:
    """A server whose tool looks neither left nor right; when it began, and when it may end."""
    server, begun, may_end = Server("stubborn", "1"), threading.Event(), threading.Event()

    @server.tool("stubborn", "Does not look whether anybody still waits.", {"type": "object"})
    def stubborn(arguments: dict[str, Any], request: Request) -> str:
        begun.set()
        assert may_end.wait(PATIENCE)
        return "at last"

    yield server, begun, may_end
    may_end.set()


def test_a_tool_that_does_not_stop_does_not_keep_the_server(
        stubborn: tuple[Server, threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: half a second for all; what has not ended by then ends with the process."""
    server, begun, may_end = stubborn
    http = HttpServer(server)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    with Connection(http.port) as connection:
        connection.send(call("stubborn", 1))
        assert begun.wait(PATIENCE)
        monkeypatch.setattr(reference_server, "time", HastyClock())
        http.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive() and not http.connections
        may_end.set()
        assert connection.read_to_end() == b"", "its late answer went somewhere"
    server.store.close()


def test_a_request_that_has_been_read_is_answered_before_the_end() -> None:
    """Choice: shutdown takes no answer away that is ready within its half second."""
    server, begun = Server("brief", "1"), threading.Event()

    @server.tool("brief", "Goes on when the server stops.", {"type": "object"})
    def brief(arguments: dict[str, Any], request: Request) -> str:
        begun.set()
        assert eventually(lambda: one.http.stopping)
        return "just in time"

    with running(server) as one, one.connect() as connection:
        connection.send(call("brief", 1))
        assert begun.wait(PATIENCE)
        one.http.stop()
        assert connection.reply().message["result"]["content"][0]["text"] == "just in time"
        assert connection.read_to_end() == b""


def test_a_subscription_gets_what_is_queued_and_then_its_result() -> None:
    """SHOULD (Subscriptions › Graceful Closure): the result comes last; nothing that was published before is lost."""
    server = Server("changing", "1")
    server.tool("x", "x", {"type": "object"})(lambda arguments, request: "x")
    with running(server) as one, one.connect() as connection:
        listen(connection, 7)
        for _ in range(20):
            server.list_changed("tools")
        one.http.stop()
        *changes, last = connection.events()
        assert {change["method"] for change in changes} == {"notifications/tools/list_changed"}
        assert last["id"] == 7 and last["result"]["resultType"] == "complete"
