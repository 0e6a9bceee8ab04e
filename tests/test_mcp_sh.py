"""The curl helper of the lessons, in every shell that it promises to work in and that is installed."""

import http.server
import json
import os
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sse import LAST_CHUNK, encode_chunk

HELPER = Path(__file__).parent / "lessons" / "mcp.sh"
WAIT = 10.0  # seconds: the bound of every wait

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="the helper needs curl")


class Echo(http.server.ThreadingHTTPServer):
    """Records what arrives; streams a first event at once and the second one when `more` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.received: queue.SimpleQueue[tuple[Any, bytes]] = queue.SimpleQueue()
        self.more = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/mcp"


class EchoHandler(http.server.BaseHTTPRequestHandler):
    server: Echo
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.put((self.headers, body))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(encode_chunk(b"data: 1\n\n"))
        self.wfile.flush()
        assert self.server.more.wait(WAIT)
        self.wfile.write(encode_chunk(b"data: 2\n\n") + LAST_CHUNK)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(WAIT)
        assert not thread.is_alive()


SHELLS = {
    "bash": ["bash", "--norc", "-u", "-c"],
    "zsh": ["zsh", "-f", "-u", "-c"],
    "zsh that splits words": ["zsh", "-f", "-o", "SH_WORD_SPLIT", "-o", "KSH_ARRAYS", "-c"],
}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> list[str]:
    command = SHELLS[request.param]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    return command


def run(shell: list[str], script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ours = ("MCP", "MCP_USER", "HTTP_PROXY", "ALL_PROXY")
    outer = {name: value for name, value in os.environ.items() if name.upper() not in ours}
    return subprocess.run(
        [*shell, f"source '{HELPER}'\n{script}"],
        env=outer | environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )


def test_it_posts_the_body_with_the_mirrored_headers(shell: list[str], echo: Echo) -> None:
    """MUST (Streamable HTTP › Sending Messages): POST, an Accept with both types, the request metadata headers."""
    echo.more.set()
    body = '{"jsonrpc":"2.0","id":1,"method":"x/y","params":{"text":"  a $HOME * \\n ü","_meta":\'"$META"\'}}'
    done = run(shell, f"mcp x/y '{body}' -H 'Mcp-Name: two  words' -H 'X: *'", MCP=echo.url)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "HTTP 200"), done
    headers, received = echo.received.get(timeout=WAIT)
    names = set(headers) - {"Host", "User-Agent", "Content-Length"}
    assert {name: headers.get_all(name) for name in names} == {
        "Content-Type": ["application/json"],
        "Accept": ["application/json, text/event-stream"],
        "MCP-Protocol-Version": ["2026-07-28"],
        "Mcp-Method": ["x/y"],
        "Authorization": ["Bearer alice"],
        "Mcp-Name": ["two  words"],
        "X": ["*"],
    }
    assert json.loads(received)["params"] == {
        "text": "  a $HOME * \n ü",
        "_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        },
    }


def test_the_user_is_a_variable_and_a_body_may_begin_with_an_at_sign(shell: list[str], echo: Echo) -> None:
    """Choice: $MCP_USER says who asks; a broken body is sent as it is, because refusals are lessons too."""
    echo.more.set()
    done = run(shell, "MCP_USER=bob; mcp x '@/dev/null'", MCP=echo.url)
    headers, received = echo.received.get(timeout=WAIT)
    assert (done.returncode, headers["Authorization"], received) == (0, "Bearer bob", b"@/dev/null")


def test_it_prints_each_event_as_it_arrives_and_the_status_last(shell: list[str], echo: Echo) -> None:
    """Choice: a learner watches the stream, so nothing may be held back until its end."""
    command = [*shell, f"source '{HELPER}'\nMCP='{echo.url}'\nmcp x '{{}}'"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        bound = threading.Timer(WAIT, process.kill)
        bound.start()
        assert process.stdout.readline() == b"data: 1\n"
        assert not echo.more.is_set()
        echo.more.set()
        assert process.stdout.read() == b"\ndata: 2\n\n\nHTTP 200\n"
        bound.cancel()


def test_it_returns_the_exit_status_of_curl(shell: list[str]) -> None:
    """Choice: a script can tell "no answer" from "an answer that refuses"; curl says 7 for a refused connection."""
    done = run(shell, "mcp x '{}'", MCP="http://127.0.0.1:1/mcp")
    assert (done.returncode, done.stdout) == (7, "\nHTTP 000\n")
    assert done.stderr.startswith("curl: (7)")


def test_it_asks_for_a_method_and_a_body(shell: list[str]) -> None:
    """Choice: a forgotten body is a usage error, never a request."""
    done = run(shell, "mcp x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: mcp METHOD BODY")


def test_it_leaves_the_shell_as_it_was(shell: list[str], tmp_path: Path) -> None:
    """Choice: a learner sources it into the shell they work in; only `mcp` and $META may be new."""
    names = "compgen -v; compgen -A function" if shell[0] == "bash" else "typeset +; typeset +f"
    state = f"{{ set +o; {names}; }} | sort"
    script = f"{state} > before; source '{HELPER}'; mcp x '{{}}' -m 1 2> errors; {state} > after"
    subprocess.run(
        [*shell, script],
        env={"PATH": os.environ["PATH"], "MCP": "http://127.0.0.1:1/"},
        cwd=tmp_path,
        timeout=WAIT,
        stdout=subprocess.PIPE,
        check=True,
    )
    before, after = (set((tmp_path / name).read_text().splitlines()) for name in ("before", "after"))
    assert after - before - {"PIPESTATUS", "BASH_REMATCH", "_"} == {"META", "mcp"}
