"""The curl helper of the lessons, in every shell that it promises to work in and that is installed."""

import http.server
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Lines, Running, eventually, running

from reference_server import demo_server
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
    "dash": ["dash", "-u", "-c"],
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
        [*shell, f". '{HELPER}'\n{script}"],
        env=outer | environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )


def test_it_posts_the_body_with_the_mirrored_headers(shell: list[str], echo: Echo) -> None:
    """MUST (Streamable HTTP › Sending Messages): POST, an Accept with both types, the request metadata headers."""
    echo.more.set()
    body = '{"jsonrpc":"2.0","id":1,"method":"x/y","params":{"text":"  a $HOME * \\n ü",\'"$META"\'}}'
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
    command = [*shell, f". '{HELPER}'\nMCP='{echo.url}'\nmcp x '{{}}'"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        bound = threading.Timer(WAIT, os.killpg, (process.pid, signal.SIGKILL))
        bound.start()
        assert process.stdout.readline() == b"data: 1\n"
        assert not echo.more.is_set()
        echo.more.set()
        assert process.stdout.read() == b"\ndata: 2\n\n\nHTTP 200\n"
        bound.cancel()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_what_goes_to_this_machine_goes_past_the_proxy(shell: list[str], echo: Echo, host: str) -> None:
    """Choice: behind a company's proxy the course works too; what goes elsewhere still uses it."""
    echo.more.set()
    proxy = {"http_proxy": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}
    done = run(shell, "mcp x '{}'", MCP=echo.url.replace("127.0.0.1", host), **proxy)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "HTTP 200"), done
    done = run(shell, "mcp x '{}' -m 1", MCP="http://elsewhere.invalid/mcp", **proxy)
    assert done.returncode == 7, done  # the proxy was asked, and does not listen
    done = run(shell, "mcp x '{}' -m 1", MCP="http://elsewhere.invalid/mcp", no_proxy="elsewhere.invalid", **proxy)
    assert done.returncode == 6, done  # the name was looked up, past the proxy


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
    names = {"bash": "compgen -v; compgen -A function", "zsh": "typeset +; typeset +f", "dash": "set | cut -d = -f 1"}
    state = f"{{ set +o; {names[shell[0]]}; }} | sort"
    script = f"{state} > before; . '{HELPER}'; mcp x '{{}}' -m 1 2> errors; {state} > after"
    subprocess.run(
        [*shell, script],
        env={"PATH": os.environ["PATH"], "MCP": "http://127.0.0.1:1/"},
        cwd=tmp_path,
        timeout=WAIT,
        stdout=subprocess.PIPE,
        check=True,
    )
    before, after = (set((tmp_path / name).read_text().splitlines()) for name in ("before", "after"))
    new = after - before - {"PIPESTATUS", "BASH_REMATCH", "_"}
    assert new == ({"META"} if shell[0] == "dash" else {"META", "mcp"})  # dash does not list its functions


# ------------------------------------------------------------------------------------------------ the course's commands

KEY = "io.modelcontextprotocol/"
# What the course has its learners define: $META is a member with its name, `mcp` takes curl's arguments and prints the
# body and then the status; nobody logs in. For bash and zsh.
COURSE_HELPER = """
META='"_meta":{"KEYprotocolVersion":"2026-07-28","KEYclientCapabilities":{}}'
mcp() {
  curl --silent --show-error --no-buffer --header "Mcp-Method: $1" --header 'MCP-Protocol-Version: 2026-07-28' \\
    --header 'Accept: application/json, text/event-stream' --header 'Content-Type: application/json' \\
    --data "$2" --write-out '\\nHTTP %{http_code}\\n' "${@:3}" "$MCP"
}
""".replace("KEY", KEY)
HELPERS = {"the course's": COURSE_HELPER, "ours": f". '{HELPER}'"}


def command(method: str, params: str = "", name: str = "", more: str = "", meta: str = "'\"$META\"'") -> str:
    """A command as the course writes it; its id is 7."""
    body = f'{{"jsonrpc":"2.0","id":7,"method":"{method}","params":{{{params}{"," if params else ""}{meta}}}}}'
    return f"mcp {method} '{body}'" + (f" -H 'Mcp-Name: {name}'" if name else "") + more


def tool(name: str, arguments: str = "{}", header: str | None = None, meta: str = "'\"$META\"'", more: str = "") -> str:
    """A tools/call as the course writes it."""
    shown = name if header is None else header
    return command("tools/call", f'"name":"{name}","arguments":{arguments}', shown, more, meta)


def declaring(capabilities: str, more: str = "") -> str:
    """A `_meta` written out."""
    version = f'"{KEY}protocolVersion":"2026-07-28"'
    return f'"_meta":{{{version},"{KEY}clientCapabilities":{capabilities}{more}}}'


WITHOUT_CAPABILITIES = f'"_meta":{{"{KEY}protocolVersion":"2026-07-28"}}'
ABLE_TO_ASK, KNOWS_TASKS = declaring('{"elicitation":{}}'), declaring(f'{{"extensions":{{"{KEY}tasks":{{}}}}}}')
OLD_VERSION = "1900-01-01"
OLD_META = declaring("{}").replace("2026-07-28", OLD_VERSION)
UNHEARD_OF = (  # header and body agree, so it cannot go through the helper
    f"curl --silent \"$MCP\" -H 'MCP-Protocol-Version: {OLD_VERSION}' -H 'Mcp-Method: tools/list' "
    "-H 'Content-Type: application/json' -H 'Accept: application/json, text/event-stream' -w 'HTTP %{http_code}' -d "
    f"""'{{"jsonrpc":"2.0","id":7,"method":"tools/list","params":{{{OLD_META}}}}}'"""
)
REPORT = '{"month":"2026-09"}'
# command -> what must be in its output
COURSE = {
    command("tools/list"): ['"resultType":"complete"', '"ttlMs":', '"cacheScope":"', "HTTP 200"],
    command("tools/list", meta=WITHOUT_CAPABILITIES): ['"code":-32602', "HTTP 400"],
    UNHEARD_OF: ['"code":-32022', '"supported":["2026-07-28"]', "HTTP 400"],
    command("server/discover"): ['"supportedVersions":["2026-07-28"]', "serverInfo", KEY + "tasks", "HTTP 200"],
    "curl -sS -X GET \"$MCP\" -o /dev/null -w 'GET -> %{http_code}\\n'": ["GET -> 405"],
    "curl -sS -X DELETE \"$MCP\" -o /dev/null -w 'DELETE -> %{http_code}\\n'": ["DELETE -> 405"],
    command("tools/list", more=" -H 'Mcp-Session-Id: abc' -D - | grep -ci mcp-session-id"): ["0"],
    command("tools/list", more=" -H 'Last-Event-ID: 42'"): ['"tools":[', "HTTP 200"],
    tool("create_repo", '{"repo":"demo"}', meta=ABLE_TO_ASK): ['"input_required"', '"github_login"', "requestState"],
    tool("create_repo", '{"repo":"demo"}'): ['"code":-32021', "HTTP 400"],
    tool("delete_all", header="get_weather"): ['"code":-32020', "HTTP 400"],
    tool("get_weather", '{"location":"Seattle"}', header=""): ['"code":-32020', "HTTP 400"],
    tool("get_weather", '{"location":"San Francisco"}'): ['"type":"text"', "HTTP 200"],
    tool("get_weather_data", '{"location":"Lisbon"}'): ['"structuredContent":{', "HTTP 200"],
    tool("book_flight", '{"to":"DEN","date":"2020-01-01"}'): ['"isError":true', "HTTP 200"],
    tool("book_fligth"): ['"code":-32602', "Unknown tool"],
    command("nope/nope"): ['"code":-32601', "HTTP 404"],
    command("ping"): ['"code":-32601', "HTTP 404"],
    command("resources/read", '"uri":"file:///nope"', "file:///nope"): ['"code":-32602'],
    command("prompts/get", '"name":"code_review","arguments":{"code":"print(1)","language":"python"}', "code_review"): [
        '"messages":[', "print(1)"],
    command("completion/complete", '"ref":{"type":"ref/prompt","name":"code_review"},'
            '"argument":{"name":"language","value":"py"}'): ['"values":["python"]'],
    tool("build_report", REPORT, more=" | grep -c notifications/message"): ["0"],
    tool("build_report", REPORT): ['"resultType":"complete"', "The report for 2026-09 is ready."],
    tool("build_report", REPORT, meta=KNOWS_TASKS): ['"resultType":"task"', '"taskId":"', '"status":"working"'],
}


@pytest.fixture(scope="module")
def course() -> Iterator[Running]:
    """The demo, ten times a hundredth of a second slow."""
    with running(demo_server(step_seconds=0.01)) as server:
        yield server


def play(helper: str, shell: list[str], server: Running, script: str) -> str:
    """What a command of the course prints with a helper; `localhost` is the course's name for this machine."""
    if helper == COURSE_HELPER and shell[0] == "dash":
        pytest.skip("the course's helper is for bash and zsh")
    environment = {"PATH": os.environ["PATH"], "MCP": f"http://localhost:{server.port}/mcp"}
    command = [*shell, f"{helper}\n{script}"]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=WAIT).stdout


@pytest.mark.parametrize("name", ["bash", "zsh", "dash"])
@pytest.mark.parametrize("helper", HELPERS)
def test_the_courses_commands_do_what_the_course_says(helper: str, name: str, course: Running) -> None:
    """Choice: a learner pastes them from lessons that were written for another server."""
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    mark = "--- next ---"
    script = f"\necho '{mark}'\n".join(COURSE)
    printed = play(HELPERS[helper], SHELLS[name], course, script).split(mark)
    assert len(printed) == len(COURSE)
    for (words, expected), out in zip(COURSE.items(), printed, strict=True):
        assert not [one for one in expected if one not in out], (words, out)


@pytest.mark.parametrize("helper", HELPERS)
def test_the_courses_questions_are_answered_as_the_course_says(helper: str, course: Running) -> None:
    """MUST (Multi Round-Trip Requests › Client Requirements (Basic Workflow)): the state goes back as it came."""
    arguments = '"name":"create_repo","arguments":{"repo":"demo"}'

    def call(params: str) -> str:
        line = command("tools/call", params, "create_repo", meta=ABLE_TO_ASK)
        return play(HELPERS[helper], SHELLS["bash"], course, line)

    found = re.search(r'"requestState":"([^"]+)"', call(arguments))
    assert found
    answer = '"inputResponses":{"github_login":{"action":"accept","content":{"name":"octocat"}}}'
    retry = f'{arguments},{answer},"requestState":"{found[1]}"'
    second = call(retry)
    assert '"resultType":"complete"' in second and "octocat/demo" in second


@pytest.mark.parametrize("helper", HELPERS)
def test_the_courses_task_is_asked_for_charts(helper: str, course: Running) -> None:
    """SHOULD (Tasks Extension › Task Update Requests): the answer goes by the key that was asked, `charts`."""
    meta = declaring(f'{{"elicitation":{{}},"extensions":{{"{KEY}tasks":{{}}}}}}')

    def say(method: str, more: str = "") -> str:
        params = f'"taskId":"{task}"{more}'
        return play(HELPERS[helper], SHELLS["bash"], course, command(method, params, task, meta=meta))

    started = play(HELPERS[helper], SHELLS["bash"], course, tool("build_report", REPORT, meta=meta))
    task = (re.search(r'"taskId":"([^"]+)"', started) or ["", ""])[1]
    assert eventually(lambda: '"status":"input_required"' in say("tasks/get"))
    charts = ',"inputResponses":{"charts":{"action":"accept","content":{"charts":true}}}'
    assert "HTTP 200" in say("tasks/update", charts)
    assert eventually(lambda: '"status":"completed"' in say("tasks/get"))
    assert "with charts" in say("tasks/get")


@pytest.mark.parametrize("name", ["bash", "zsh"])
@pytest.mark.parametrize("helper", HELPERS)
def test_ctrl_c_stops_the_courses_report(helper: str, name: str, log: Lines) -> None:
    """MUST (Streamable HTTP › Cancellation): the closed stream cancels; the log says so in the course's words."""
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    progress = tool("build_report", REPORT, meta=declaring("{}", ',"progressToken":"p7"'))
    with running(demo_server(step_seconds=0.05)) as server:
        command = [*SHELLS[name], f"{HELPERS[helper]}\n{progress}"]
        environment = {"PATH": os.environ["PATH"], "MCP": f"http://localhost:{server.port}/mcp"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            bound = threading.Timer(WAIT, os.killpg, (process.pid, signal.SIGKILL))
            bound.start()
            events = [line for line in (process.stdout.readline() for _ in range(5)) if line.startswith(b"data: ")]
            os.killpg(process.pid, signal.SIGINT)
            process.stdout.read()
            bound.cancel()
        cancelled = re.compile(r"\[ref\] build_report cancelled at step \d+ \(stream closed\)")
        assert eventually(lambda: any(cancelled.fullmatch(line) for line in log.lines()))
    assert len(events) == 3 and all(b'"progressToken":"p7"' in event for event in events)


@pytest.mark.parametrize("helper", HELPERS)
def test_the_courses_subscription_hears_of_tools_alone(helper: str, course: Running) -> None:
    """MUST NOT (Subscriptions › Notification Filter): nothing is sent that was not asked for; $META may come first."""
    listen = ("mcp subscriptions/listen '{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"subscriptions/listen\",\"params\":"
              "{'\"$META\"',\"notifications\":{\"toolsListChanged\":true}}}'")
    environment = {"PATH": os.environ["PATH"], "MCP": f"http://localhost:{course.port}/mcp"}
    command = [*SHELLS["bash"], f"{HELPERS[helper]}\n{listen}"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        bound = threading.Timer(WAIT, os.killpg, (process.pid, signal.SIGKILL))
        bound.start()
        first = [process.stdout.readline(), process.stdout.readline()][0]
        for name in ("touch_config", "toggle_beta_tool"):
            course.call_tool(name)
        second = process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        bound.cancel()
    assert b"notifications/subscriptions/acknowledged" in first and b'subscriptionId":1}' in first
    assert b"notifications/tools/list_changed" in second
