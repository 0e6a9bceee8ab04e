"""The server behind a real nginx with its buffering on, as the README's section on nginx describes (make nginx).

    python tests/load/nginx.py

Measures how late progress arrives, hangs up, waits out `proxy_read_timeout`, and walks through two instances behind a
round robin. Prints figures; a violation is an AssertionError, and exit status 1. Without nginx it says so and ends.
"""

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from processes import PATIENCE, ROOT, process
from support import Connection, Lines, PlainLog, eventually, message, octets, running
from walks import WALKS, Client

import reference_server
from reference_server import Request, Server, takes

READ_TIMEOUT, KEEP_ALIVE = 2, 1.0  # seconds; nginx's own default is 60, the server's 15
STEPS, STEP_SECONDS, AT_MOST = 20, 0.1, 0.1

SURROUNDINGS = """\
{user}daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{site}}}
"""
# What a real configuration needs. Buffering stays on: a stream's X-Accel-Buffering turns it off for that stream alone.
SITE = """\
    upstream mcp {{
{instances}    }}
    server {{
        listen 127.0.0.1:{port};
        location = /mcp {{
            proxy_pass http://mcp;
            proxy_http_version 1.1;             # chunks: a stream that ends is told from one that is cut
            proxy_set_header Host $http_host;   # nginx would send "mcp", a name that the server does not know
            proxy_set_header Connection close;  # one request each: none meets a connection that is just closing
            proxy_read_timeout {read_timeout}s;            # longer than --keep-alive, or quiet streams are cut
        }}
        # for comparison: the version that nginx speaks by default (before 1.29.7), with X-Accel-Buffering and without
        location = /unbuffered {{
            proxy_pass http://mcp/mcp;
            proxy_http_version 1.0;
            proxy_set_header Host $http_host;
        }}
        location = /buffered {{
            proxy_pass http://mcp/mcp;
            proxy_http_version 1.0;
            proxy_set_header Host $http_host;
            proxy_ignore_headers X-Accel-Buffering;
        }}
    }}
"""


@contextlib.contextmanager
def nginx(*ports: int) -> Iterator[int]:
    """An nginx before these ports; its own port. It has ended afterwards, and its error log is empty."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        instances = "".join(f"        server 127.0.0.1:{one};\n" for one in ports)
        site = SITE.format(instances=instances, port=port, read_timeout=READ_TIMEOUT)
        user = "user root;\n" if os.geteuid() == 0 else ""  # the temporary folder is this user's alone
        configuration = Path(folder, "nginx.conf")
        configuration.write_text(SURROUNDINGS.format(user=user, folder=folder, site=site))
        command = ["nginx", "-p", folder, "-e", f"{folder}/error.log", "-c", str(configuration)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as popen:
            try:
                assert eventually(lambda: popen.poll() is not None or listens(port)) and popen.poll() is None, (
                    Path(folder, "error.log").read_text())
                yield port
            finally:
                popen.terminate()
                popen.wait(PATIENCE)
        complaints = [line for line in Path(folder, "error.log").read_text().splitlines() if "[notice]" not in line]
        assert not complaints, complaints


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Timed(Server):
    """Has a tool that notes when each of its steps was done."""

    def __init__(self) -> None:
        super().__init__("timed", "1.0")
        self.done: list[float] = []
        self.ended = threading.Event()

        @self.tool("steps", "Many steps.", takes())
        def steps(arguments: dict[str, Any], request: Request) -> str:
            try:
                for step in range(1, STEPS + 1):
                    request.sleep(STEP_SECONDS)
                    self.done.append(time.monotonic())
                    request.progress(step, STEPS)
            finally:
                self.ended.set()
            return "Done."


@contextlib.contextmanager
def stream(port: int, method: str, params: dict[str, Any], path: str = "/mcp", **metadata: Any) -> Iterator[Connection]:
    """A request whose answer is a stream, with its head read."""
    with Connection(port) as connection:
        connection.send(octets(message(method, params, **metadata), path=path))
        status, fields = connection.head()
        assert (status, fields["content-type"]) == (200, "text/event-stream")
        yield connection


def delays(port: int, server: Timed, path: str) -> list[float]:
    """For each progress event, the seconds from the step to the event's arrival."""
    server.done.clear()
    with stream(port, "tools/call", {"name": "steps"}, path, progressToken=1) as connection:
        arrived = [time.monotonic() for event in connection.events()][:-1]
    return [arrival - done for arrival, done in zip(arrived, server.done, strict=True)]


def measure_progress(port: int, server: Timed) -> None:
    """Each progress event arrives within 100 ms of its step, although nginx holds back what does not forbid it."""
    for path in ("/mcp", "/unbuffered"):
        late = delays(port, server, path)
        assert len(late) == STEPS and max(late) < AT_MOST, late
        print(f"  {path}: {STEPS} progress events, median {statistics.median(late) * 1000:.1f} ms,"
              f" latest {max(late) * 1000:.1f} ms after their steps")
    held = delays(port, server, "/buffered")
    assert min(held[: STEPS // 2]) > AT_MOST, held
    print(f"  /buffered, where nginx ignores X-Accel-Buffering: the first {held[0] * 1000:.0f} ms after its step")


def hang_up(port: int, server: Timed, lines: Lines) -> None:
    """Closing the connection to nginx stops the tool, and the log says so."""
    server.done.clear()
    server.ended.clear()
    with stream(port, "tools/call", {"name": "steps"}, progressToken=1) as connection:
        for _, event in zip(range(3), connection.events(), strict=False):
            assert event["method"] == "notifications/progress"
        closing = time.monotonic()
    assert server.ended.wait(PATIENCE)
    took = time.monotonic() - closing
    assert lines.wait_for("[ref] steps cancelled at step 4 (stream closed)"), lines.text
    assert len(server.done) == 3
    print(f"  the tool stopped {took * 1000:.1f} ms after the client had gone: {lines.lines()[-1]}")


def outlive_read_timeout(port: int, server: Timed) -> None:
    """A quiet subscription lives longer than proxy_read_timeout, because comments come more often."""
    began = time.monotonic()
    with stream(port, "subscriptions/listen", {"notifications": {"toolsListChanged": True}}) as connection:
        events = connection.events()
        assert next(events)["method"] == "notifications/subscriptions/acknowledged"
        threading.Event().wait(2.5 * READ_TIMEOUT)
        server.list_changed("tools")
        assert next(events)["method"] == "notifications/tools/list_changed"
    print(f"  a subscription was alive after {time.monotonic() - began:.1f} s (proxy_read_timeout {READ_TIMEOUT} s,"
          f" keep-alive {KEEP_ALIVE} s)")


def walk_round_robin(times: int = 5) -> None:
    """Every handle walk through nginx, before two instances on one state file."""
    with tempfile.TemporaryDirectory() as folder:
        command = (str(ROOT / "reference_server.py"), "--step-seconds", "0.01", "--state", f"{folder}/state")
        with process(*command) as one, process(*command) as two:
            with nginx(one.port, two.port) as port:
                for walk in WALKS.values():
                    for _ in range(times):
                        walk(Client(port))
            served = [sum(" -> " in line for line in instance.lines) for instance in (one, two)]
            assert min(served) > 0.4 * sum(served), served
            print(f"  {len(WALKS)} walks, {times} times each, two instances: {served[0]} and {served[1]} requests")


def main() -> int:
    """The exit status."""
    if shutil.which("nginx") is None:
        print("nginx is not installed (Debian: apt-get install nginx); nothing was measured")
        return 0
    server, lines = Timed(), Lines()
    reference_server.log_writer = PlainLog()
    with (contextlib.redirect_stderr(cast(TextIO, lines)), running(server, keep_alive=KEEP_ALIVE) as http,
          nginx(http.port) as port):
        print("behind nginx, buffering on:", flush=True)
        measure_progress(port, server)
        hang_up(port, server, lines)
        outlive_read_timeout(port, server)
    assert "Traceback" not in lines.text, lines.text
    walk_round_robin()
    return 0


if __name__ == "__main__":
    sys.exit(main())
