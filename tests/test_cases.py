"""The cases: what went wrong in other servers of this kind, played against this one as literal octets.

`cases.jsonl` holds each case's octets, its symptom elsewhere, the right outcome and whose rule that is. A case that
needs more than one exchange has a test named after it; all others, and all variants, are rows of the tables below.
"""

import contextlib
import json
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases_server import CasesServer
from gateway import Gateway
from support import PATIENCE, TASKS, Connection, Reply, Running, eventually, message, octets, running

from headers import valid_tools
from reference_server import MAX_MESSAGE, Server, StdioTransport
from sse import KEEP_ALIVE, EventParser

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in map(json.loads, (HERE / "cases.jsonl").read_bytes().splitlines())}
WITH_TASKS = {"extensions": {TASKS: {}}}
ABSENT = "ABSENT_OR_NULL"

# Choice: the one outcome of this server, where the rules of a case leave several; a null code: no JSON-RPC error.
DECIDED: dict[tuple[str, str], dict[str, Any]] = {
    ("B022", "main"): {"status": 404}, ("B022", "query string"): {"status": 200},
    ("B022", "dot segments"): {"status": 404}, ("B022", "double slash"): {"status": 404},
    ("B024", "no Accept at all"): {"status": 406},
    **{("B028", name): {"status": 415} for name in ("missing", "form", "json-ish suffix")},
    ("B059", "method and result"): {"status": 400, "code": -32600, "id": 1},
    ("B063", "main"): {"status": 400, "code": -32700, "id": ABSENT},
    ("B063", "nested arguments"): {"status": 400, "code": -32700, "id": ABSENT},
    ("B065", "main"): {"code": -32700}, ("B065", "escaped twin"): {"status": 400, "code": -32700},
    ("B067", "says utf-16"): {"status": 415},
    ("B069", "main"): {"status": 200, "text": "\ud800"}, ("B069", "as id"): {"status": 200, "id": "\udfff"},
    ("B069", "as tool name"): {"code": -32020},
    ("B075", "main"): {"status": 200, "data": {"uri": "test://no/such"}}, ("B075", "unknown tool"): {"status": 200},
    ("B075", "unknown prompt"): {"status": 200},
    ("B077", "main"): {"status": 200}, ("B077", "empty"): {"status": 200, "code": -32602},
    ("B077", "number"): {"code": -32020},
    **{("B089", name): {"code": -32020} for name in ("\\x0b before", "\\x1f after", "DEL")},
    ("B089", "NUL inside"): {"code": None},
    ("B091", "uri encoded"): {"status": 200, "code": -32602},
    ("B101", "count true vs 1"): {"status": 400, "code": -32020},
    ("B103", "main"): {"code": -32020}, ("B103", "named request, neither"): {"code": -32020},
    ("B103", "Mcp-Name on tools/list"): {"status": 200, "code": None},
    ("B111", "main"): {"status": 400},
    ("B113", "leading zeros"): {"status": 200}, ("B113", "absent, no TE"): {"status": 411},
    ("B115", "main"): {"status": 400}, ("B115", "CL after TE"): {"status": 400},
    **{("B117", name): {"status": 501} for name in (
        "main", "gzip, chunked", "chunked, chunked", "chunked, identity", "identity", "chunked;q=1", "two lines")},
    ("B117", "\x0bchunked"): {"status": 400}, ("B117", "HTTP/1.0 with TE"): {"status": 400},
    ("B119", "foreign origin"): {"status": 403}, ("B119", "unknown expectation"): {"status": 417},
    ("B123", "main"): {"status": 400}, ("B123", "two"): {"status": 400}, ("B123", "empty"): {"status": 400},
    ("B123", "HTTP/1.0 without"): {"status": 200},
    **{("B125", name): {"status": 400} for name in ("HTTP/0.9", "LF only", "TLS hello", "HTTP/1.10")},
    ("B125", "main"): {"status": 505}, ("B125", "lower-case verb"): {"status": 405},
    ("B125", "leading CRLF"): {"status": 200}, ("B125", "asterisk"): {"status": 404},
    ("B125", "CONNECT"): {"status": 403},
    ("B127", "main"): {"responses_in": [[200, 200]]},
    **{("B166", name): {"status": 400, "code": -32602} for name in ("main", "garbage", "empty", "not a string")},
    ("B168", "main"): {"status": 400}, ("B168", "non-ascii"): {"status": 400},
    ("B170", "list"): {"status": 200}, ("B170", "string"): {"status": 200},
    ("B170", "entry null"): {"status": 200, "code": -32602}, ("B170", "bad action"): {"status": 200, "code": -32602},
    **{("B172", name): {"status": 400} for name in (
        "main", "[::1]:8000.evil.com", "[::1]:99999", "[::1", "::1", "127.0.0.1:8000@evil.com", "localhost:80a",
        "127.0.0.1:8000, evil.com", "127.0.0.1:8000/evil", "ì\x95\x88")},
    ("B172", "evil.com:8000"): {"status": 403}, ("B172", "127.0.0.1.evil.com:8000"): {"status": 403},
    **{("B176", name): {"status": 403} for name in ("main", "foreign host, no origin", "X-Forwarded-Host spoof")},
    **{("B178", name): {"status": 415} for name in ("main", "json in comment", "two values", "two lines")},
    ("B182", "main"): {"status": 403}, ("B182", "Connection strips Mcp-Name"): {"status": 400},
}


def octets_of(case_id: str, replacements: dict[str, str] | None = None) -> bytes:
    """A case's request; with replacements in its text its Content-Length is computed anew."""
    head, _, body = CASES[case_id]["request"].partition("\r\n\r\n")
    for old, new in (replacements or {}).items():
        head, body = head.replace(old, new), body.replace(old, new)
    head = re.sub(r"(Content-Length: )\d+", rf"\g<1>{len(body)}", head) if replacements else head
    return f"{head}\r\n\r\n{body}".encode("latin-1")


@pytest.fixture(autouse=True)
def _no_traceback(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Whatever a case sends, the server's log has no traceback."""
    yield
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server for all cases."""
    with running(CasesServer()) as run:
        yield run


@pytest.fixture
def run(shared: Running) -> Running:
    """The shared server, which has forgotten what its tools did; its slow tools take the time that they are told."""
    cases(shared).pace = 1.0
    cases(shared).calls.clear()
    cases(shared).endings.clear()
    cases(shared).slow_started.clear()
    cases(shared).slow_ended.clear()
    return shared


def cases(run: Running) -> CasesServer:
    """The fixture behind a running server."""
    assert isinstance(run.server, CasesServer)
    return run.server


def assert_cancelled(run: Running, within: float) -> None:
    """The slow tool was cancelled, and the server goes on."""
    assert cases(run).slow_ended.wait(within), "the tool was not told that its client is gone"
    assert cases(run).endings == ["cancelled"]
    assert run.call("tools/list").status == 200


# ------------------------------------------------------------------------------------- hang-ups and shutdown


def test_b001_closing_the_stream_cancels_the_tool(run: Running) -> None:
    """MUST (Streamable HTTP › Cancellation): closing the response stream is the cancellation."""
    with run.connect() as client:
        client.send(octets_of("B001"))
        client.head()
        assert next(client.events())["method"] == "notifications/progress"
    assert_cancelled(run, CASES["B001"]["check"]["cancelled_within_s"])


def test_b003_a_half_closed_connection_gets_the_answer_to_a_call_that_answers_at_once(run: Running) -> None:
    """Choice: an end of file is a hang-up, but a call that answers at once is still answered."""
    with run.connect() as client:
        client.send(octets_of("B003"))
        client.socket.shutdown(socket.SHUT_WR)
        reply = client.reply()
        assert client.ended()
    assert (reply.status, reply.message["id"], "result" in reply.message) == (200, 1, True)


def test_b005_without_epoll_the_watcher_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUST (Streamable HTTP › Cancellation): a silent hang-up is seen on systems that report no event for it."""
    monkeypatch.delattr(select, "epoll", raising=False)
    monkeypatch.delattr(select, "POLLRDHUP", raising=False)
    with running(CasesServer()) as run:
        with run.connect() as client:
            client.send(octets_of("B005"))
            assert cases(run).slow_started.wait(PATIENCE)
        assert_cancelled(run, CASES["B005"]["check"]["cancelled_within_s"])


def test_b007_a_client_that_leaves_in_the_middle_of_a_stream_leaves_no_traceback(run: Running) -> None:
    """MUST (Cancellation › Timing Considerations): both parties handle the race gracefully."""
    with run.connect() as client:
        client.send(octets_of("B007"))
        client.head()
        assert next(client.events())["method"] == "notifications/progress"
    assert eventually(lambda: not run.http.connections)
    assert run.call("tools/list").status == 200


def test_b009_a_reset_cancels_like_a_close(run: Running) -> None:
    """MUST (Streamable HTTP › Cancellation): a disconnection is a cancellation, however it comes about."""
    with run.connect() as client:
        client.send(octets_of("B009"))
        client.head()
        assert next(client.events())["method"] == "notifications/progress"
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_cancelled(run, CASES["B009"]["check"]["cancelled_within_s"])


def test_b015_a_posted_cancellation_cancels_nobodys_request(run: Running) -> None:
    """MUST (Streamable HTTP › Sending Messages): 202 without a body; over HTTP only a closed stream cancels."""
    cases(run).pace = 0.1
    with run.connect() as client:
        client.send(octets(message("tools/call", {"name": "slow", "arguments": {"seconds": 2}})))
        assert cases(run).slow_started.wait(PATIENCE)
        accepted = run.exchange(octets_of("B015"))
        assert (accepted.status, accepted.body) == (202, b"")
        assert client.reply().message["result"]["content"][0]["text"] == "slept"
        assert cases(run).endings == ["finished"]


def start(*options: str) -> "subprocess.Popen[bytes]":
    """The fixture as a process."""
    command = [sys.executable, "-W", "error", str(HERE / "cases_server.py"), *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_b034_one_interrupt_ends_subscriptions_calls_idle_connections_and_the_process() -> None:
    """SHOULD (Subscriptions › Graceful Closure): the result comes first, then the end; nothing holds the process."""
    with start("--port", "0") as process:
        try:
            assert process.stderr
            port = int(process.stderr.readline().split()[-1])
            with Connection(port) as listener, Connection(port) as idle, Connection(port) as caller:
                listener.send(octets_of("B034"))
                listener.head()
                events = listener.events()
                assert next(events)["method"] == "notifications/subscriptions/acknowledged"
                assert idle.call("tools/list").status == 200
                caller.send(octets_of("B001"))
                caller.head()
                process.send_signal(signal.SIGINT)
                last = list(events)[-1]
                assert last["result"]["resultType"] == "complete"
                assert last["result"]["_meta"]["io.modelcontextprotocol/subscriptionId"] == 1
                assert (listener.read_to_end(), idle.read_to_end()) == (b"\r\n", b"")
                assert process.wait(CASES["B034"]["check"]["exit_within_s"]) == 0
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_b036_binding_looks_up_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: no reverse look-up at start-up, because it can take seconds."""
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("a reverse look-up"))
    with running(CasesServer()) as run:
        assert run.call("tools/list").status == 200


def test_b038_a_port_can_be_taken_again_at_once_but_not_twice() -> None:
    """Choice: a restart works at once; a second server on the same port ends with one line and a status of 1."""
    with contextlib.ExitStack() as stack:
        with running(CasesServer()) as run:
            port = run.port
            client = stack.enter_context(run.connect())
            assert client.call("tools/list").status == 200
        assert client.ended(), "the server closes first, so its port is the one that TCP remembers"
    with running(CasesServer(), port=port) as again:
        assert again.call("tools/list").status == 200
        command = [sys.executable, str(HERE.parent / "reference_server.py"), "--port", str(port)]
        second = subprocess.run(command, capture_output=True, timeout=PATIENCE, text=True)
    assert second.returncode == 1
    assert len(second.stderr.splitlines()) == 1 and str(port) in second.stderr


def test_b040_the_same_id_on_many_connections_is_many_requests(run: Running) -> None:
    """MUST (Overview › Requests): an id is unique for its sender only; answers go where their request came from."""
    cases(run).pace = 0.2
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(run.connect()) for _ in range(20)]
        for number, client in enumerate(clients):
            client.send(octets(message("tools/call", {"name": "echo", "arguments": {"text": f"text {number}"}})))
        for number, client in enumerate(clients):
            reply = client.reply()
            assert (reply.message["id"], reply.message["result"]["content"][0]["text"]) == (1, f"text {number}")
        leaves, stays = clients[:2]
        leaves.send(octets_of("B040"))
        stays.send(octets_of("B040"))
        assert eventually(lambda: cases(run).calls.count("slow") == 2)
        leaves.socket.close()
        assert stays.reply().status == 200
    assert sorted(cases(run).endings) == ["cancelled", "finished"]


# ---------------------------------------------------------------------------------------------- subscriptions


def test_b042_the_acknowledgement_is_always_the_first_message(run: Running) -> None:
    """MUST (Subscriptions › Acknowledgment): no notification comes before it, however many are published."""
    over = threading.Event()

    def publish() -> None:
        while not over.is_set():
            run.server.list_changed("tools")
            over.wait(0.0001)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        for _ in range(200):
            with run.connect() as client:
                client.send(octets_of("B042"))
                client.head()
                assert next(client.events())["method"] == "notifications/subscriptions/acknowledged"
    finally:
        over.set()
        publisher.join(PATIENCE)
    assert not publisher.is_alive()


def test_b044_subscriptions_of_clients_that_have_gone_are_forgotten(run: Running) -> None:
    """MUST (Streamable HTTP › Cancellation): a closed stream ends the subscription, even if nothing is published."""
    for _ in range(100):
        with run.connect() as client:
            client.send(octets_of("B044"))
            client.head()
            assert next(client.events())["method"] == "notifications/subscriptions/acknowledged"
    assert eventually(lambda: not run.server.subscriptions.open and not run.http.connections)


def test_b047_comments_come_while_a_stream_is_quiet_and_none_comes_after_its_end(
        run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHOULD (Streamable HTTP › Receiving Messages): comments keep a quiet stream; they belong to it alone."""
    monkeypatch.setattr(run.http, "keep_alive", 0.02)
    cases(run).pace = 0.1
    with run.connect() as client:
        client.send(octets_of("B047"))
        client.read_until(b"acknowledged")
        client.read_until(b"\n\n\r\n")
        comment = b"%x\r\n%b\r\n" % (len(KEEP_ALIVE), KEEP_ALIVE)
        assert [client.read_until(comment) for _ in range(3)] == [comment] * 3
        with run.connect() as caller:
            for _ in range(2):
                reply = caller.call("tools/call", {"name": "slow", "arguments": {"seconds": 1}}, progressToken=1)
                assert b"\n" + KEEP_ALIVE in reply.body and reply.body.endswith(b"}\n\n")
                assert caller.call("tools/list").message["result"]["tools"]


# --------------------------------------------------------------------------------------------- one connection


def test_b119_a_client_that_waits_for_100_continue_gets_it_before_its_body(run: Running) -> None:
    """RFC 9110 §10.1.1: 100 as soon as the head has passed its checks, then the answer."""
    body = octets_of("B003").partition(b"\r\n\r\n")[2]
    with run.connect() as client:
        client.send(octets_of("B119"))
        assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(body)
        assert (reply := client.reply()).status == 200
        assert reply.message["result"]["content"][0]["text"] == "hi"


@pytest.mark.parametrize("sent", [octets_of("B121"), octets_of("B121")[:60]], ids=["half a body", "half a head"])
@pytest.mark.parametrize("dribbles", [False, True], ids=["then silence", "then an octet now and then"])
def test_b121_a_request_that_never_ends_is_given_up_while_others_are_served(
        run: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes, dribbles: bool) -> None:
    """RFC 9110 §15.5.9: 408 and a close after the time limit, which is one for the whole head or body."""
    monkeypatch.setattr(run.http, "request_timeout", 0.03)
    with run.connect() as client:
        client.send(sent)
        assert [run.call("tools/list").status for _ in range(20)] == [200] * 20
        for octet in b"x" * 1000 * dribbles:
            if select.select([client.socket], [], [], 0.01)[0]:
                break
            client.send(bytes([octet]))
        reply = client.reply()
        assert (reply.status, reply.fields["connection"]) == (408, "close")
        assert client.ended()
        client.socket.close()
        assert eventually(lambda: not run.http.connections)


# ------------------------------------------------------------------------------------------------------ tasks


def task_status(run: Running, task_id: str) -> dict[str, Any]:
    """tasks/get."""
    result: dict[str, Any] = run.call("tasks/get", {"taskId": task_id}, capabilities=WITH_TASKS).message["result"]
    return result


def new_task(run: Running, tool: str, status: str) -> str:
    """A task of this tool that has reached a status."""
    result = run.call_tool(tool, capabilities=WITH_TASKS | {"elicitation": {}}).message["result"]
    task_id = str(result["taskId"])
    assert eventually(lambda: task_status(run, task_id)["status"] == status)
    return task_id


def test_b157_a_completed_task_stays_as_it_is_when_it_is_cancelled(run: Running) -> None:
    """MUST (Tasks Extension › Task Status): a terminal status never changes."""
    task_id = new_task(run, "longtask", "completed")
    before = task_status(run, task_id)
    reply = run.exchange(octets_of("B157", {"{{COMPLETED_TASK_ID}}": task_id}))
    assert (reply.status, reply.message["result"]["resultType"]) == (200, "complete")
    assert task_status(run, task_id) == before


def test_b159_an_expired_task_stops_working_and_is_forgotten(run: Running) -> None:
    """Choice: at the end of its time the worker is told and the row goes, without a call from outside."""
    task_id = run.exchange(octets_of("B159", {"500": "50"})).message["result"]["taskId"]
    assert_cancelled(run, CASES["B159"]["check"]["cancelled_within_s"])
    assert eventually(lambda: not run.server.tasks.running)
    assert run.server.store.execute("SELECT id FROM tasks WHERE id = ?", task_id) == []


def test_b165_an_answer_moves_a_task_on_and_answers_to_other_questions_are_ignored(run: Running) -> None:
    """SHOULD (Tasks Extension › Task Update Requests): unknown and answered keys are ignored; the rest counts."""
    task_id = new_task(run, "asktask", "input_required")
    for _ in range(2):
        reply = run.exchange(octets_of("B165", {"{{INPUT_REQUIRED_TASK_ID}}": task_id}))
        assert (reply.status, reply.message["result"]["resultType"]) == (200, "complete")
    assert eventually(lambda: task_status(run, task_id)["status"] == "completed")
    assert task_status(run, task_id)["result"]["content"][0]["text"] == "hello n"
    assert cases(run).calls == ["asktask"]


# -------------------------------------------------------------------------------- multi round-trip requests


def sealed_state(run: Running) -> str:
    """The requestState of the tool's first answer."""
    reply = run.call_tool("ask", {"topic": "a"}, capabilities={"elicitation": {}})
    return str(reply.message["result"]["requestState"])


def test_b166_a_state_with_any_one_character_changed_is_refused_in_the_same_words(run: Running) -> None:
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): reject state that fails verification."""
    state, placeholder = sealed_state(run), "{{STATE with one character changed}}"
    answers = set()
    with run.connect() as client:
        for index, character in enumerate(state):
            forged = state[:index] + ("A" if character != "A" else "B") + state[index + 1:]
            client.send(octets_of("B166", {placeholder: forged, "Connection: close": "Connection: keep-alive"}))
            reply = client.reply()
            answers.add((reply.status, reply.message["error"]["code"], reply.message["error"]["message"]))
    assert {(status, code) for status, code, _ in answers} == {(400, -32602)} and len(answers) == 1
    assert cases(run).calls == []
    assert run.exchange(octets_of("B166", {placeholder: state})).message["result"]["content"][0]["text"] == "n on a"


@pytest.mark.parametrize("spelling", ["{}=", "{}==", " {}", "{} ", "{}\\n"])
def test_b168_a_state_has_one_spelling(run: Running, spelling: str) -> None:
    """MUST (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): the exact characters are verified."""
    reply = run.exchange(octets_of("B168", {"{{STATE}}=": spelling.format(sealed_state(run))}))
    assert (reply.status, reply.message["error"]["code"], cases(run).calls) == (400, -32602, [])


# ------------------------------------------------------------------------------------------------------ stdio


class Lines(NamedTuple):
    """Everything that came out of stdio."""

    octets: bytes
    server: CasesServer

    @property
    def messages(self) -> list[dict[str, Any]]:
        """One for each line; whatever is no JSON object fails."""
        found = [json.loads(line) for line in self.octets.splitlines()]
        assert all(one["jsonrpc"] == "2.0" for one in found)
        return found

    def ids(self, member: str) -> list[Any]:
        """The ids of the responses that have this member; a missing id is None."""
        return [one.get("id") for one in self.messages if member in one]


def play_stdio(chunks: list[bytes]) -> Lines:
    """Feeds a server these octets and the end of input, and collects all its output."""
    server = CasesServer(pace=0.05)
    client, far_end = socket.socketpair()
    with client, far_end:
        client.settimeout(PATIENCE)
        thread = threading.Thread(
            target=StdioTransport(server, far_end.fileno(), far_end.fileno(), "anonymous").serve)
        thread.start()
        for chunk in chunks:
            client.sendall(chunk)
        client.shutdown(socket.SHUT_WR)
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the end of input did not end the server"
        far_end.shutdown(socket.SHUT_WR)
        output = b"".join(iter(lambda: client.recv(65536), b""))
    server.store.close()
    return Lines(output, server)


def test_b148_the_end_of_input_ends_the_process() -> None:
    """SHOULD (stdio › Shutdown): exit promptly, also with a subscription open or a call running."""
    check = CASES["B148"]["check"]
    listen = octets_of("B034").partition(b"\r\n\r\n")[2] + b"\n"
    slow = octets_of("B005").partition(b"\r\n\r\n")[2] + b"\n"
    processes = [start("--stdio") for _ in range(3)]
    try:
        for process, line in zip(processes, (b"", listen, slow), strict=True):
            assert process.stdin
            process.stdin.write(line)
            process.stdin.close()
        for process in processes:
            # choice: a second more than the case has, because three processes start at once
            assert process.wait(check["exit_within_s"] + 1) == check["exit_code"]
            assert process.stderr and b"Traceback" not in process.stderr.read()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream
                stream.close()


def test_b150_what_a_tool_or_its_children_print_or_read_is_no_part_of_the_protocol() -> None:
    """MUST (stdio › stdio): nothing on stdout but messages; nobody but the server reads stdin."""
    with start("--stdio") as process:
        try:
            output, _ = process.communicate(CASES["B150"]["request"].encode("latin-1"), timeout=PATIENCE)
        finally:
            process.kill()
    found = {one["id"]: one for one in map(json.loads, output.splitlines())}
    assert sorted(found) == [1, 2]
    assert found[1]["result"]["content"][0]["text"] == "quiet now"


def test_b152_a_line_without_end_is_skipped_in_bounded_memory() -> None:
    """Choice: a line over the limit is one parse error, however long it is; the next line is served."""
    following = json.dumps(message("tools/list", id=2)).encode()
    tracemalloc.start()
    try:
        lines = play_stdio([b"a" * 65536] * 1024 + [b"\n" + following + b"\n"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines.ids("result") == [2]
    assert [one["error"]["code"] for one in lines.messages if "error" in one] == [-32700]
    assert peak < 4 * MAX_MESSAGE


# ------------------------------------------------------------------------------------------------- the tables

OWN = {name[5:9].upper() for name in globals() if re.match(r"test_b\d{3}_", name)}


def inputs(mode: str) -> list[Any]:
    """The rows of a mode: the cases without a test of their own, and the variants of all."""
    rows = []
    for case in CASES.values():
        for one in [case | {"name": "main"}, *case.get("variants", ())]:
            if one.get("mode", case["mode"]) == mode and not (one["name"] == "main" and case["id"] in OWN):
                check = one["check"] | DECIDED.get((case["id"], one["name"]), {})
                rows.append(pytest.param(one, check, id=f"{case['id']} {one['name']}"))
    return rows


class Played(NamedTuple):
    """What a case's octets led to."""

    replies: list[Reply]
    rest: bytes  # octets after the last answer
    run: Running

    @property
    def first(self) -> Reply:
        """The first answer."""
        return self.replies[0]

    @property
    def message(self) -> dict[str, Any]:
        """The response in it; an empty object if there is none."""
        return self.first.message if self.first.messages else {}

    @property
    def error(self) -> dict[str, Any]:
        """The response's error; an empty object if there is none."""
        return dict(self.message.get("error", {}))

    @property
    def progress(self) -> list[float]:
        """The progress values of a stream."""
        reports = [one["params"] for one in self.first.messages if one.get("method") == "notifications/progress"]
        return [one["progress"] for one in reports]


def same(got: Any, wanted: Any) -> bool:
    """Whether an id is the one that was sent, by type and value."""
    return got is None if wanted == ABSENT else type(got) is type(wanted) and got == wanted


def data_agrees(data: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether an error's data is what a case asks for; it spells two rules about `supported` as members."""
    rest = dict(wanted)
    contains, lacks = rest.pop("supported_contains", None), rest.pop("supported_lacks", None)
    supported = data.get("supported", [])
    return rest.items() <= data.items() and (contains is None or contains in supported) and lacks not in supported


CHECKS: dict[str, Callable[[Played, Any], bool]] = {
    "status": lambda played, wanted: played.first.status == wanted,
    "code": lambda played, wanted: played.error.get("code") == wanted,
    "id": lambda played, wanted: same(played.message.get("id"), wanted),
    "id_or_null": lambda played, wanted: same(played.message.get("id"), wanted),
    "result": lambda played, wanted: "result" in played.message,
    "result_has": lambda played, wanted: wanted.items() <= played.message["result"].items(),
    "text": lambda played, wanted: played.message["result"]["content"][0]["text"] == wanted,
    "data": lambda played, wanted: data_agrees(played.error["data"], wanted),
    "no_body": lambda played, wanted: played.first.body == b"" and played.first.fields["content-length"] == "0",
    "headers": lambda played, wanted: wanted == {name: played.first.fields.get(name.lower()) for name in wanted},
    "valid_utf8": lambda played, wanted: played.first.body.decode("utf-8") != "",
    "chunked_terminated": lambda played, wanted: played.first.ended and "transfer-encoding" in played.first.fields,
    "strictly_increasing": lambda played, wanted: played.progress == sorted(set(played.progress)) == [1, 2],
    "max_progress": lambda played, wanted: len(played.progress) == wanted,
    "one_response": lambda played, wanted: len(played.replies) == 1,
    "responses_in": lambda played, wanted: [one.status for one in played.replies] in wanted,
    "ids_in_order": lambda played, wanted: [one.message["id"] for one in played.replies] == wanted,
    "closed": lambda played, wanted: played.first.fields["connection"] == "close" and played.rest == b"",
    "not_executed": lambda played, wanted: cases(played.run).calls == [],
    "alive": lambda played, wanted: played.run.call("tools/list").status == 200,
    "no_traceback": lambda played, wanted: True,  # the fixture above sees to that, for all cases
}


def play(run: Running, request: bytes) -> Played:
    """Sends the octets on a connection of their own and reads all answers, to the end if one was announced."""
    replies = []
    with run.connect() as client:
        client.send(request)
        replies.append(client.reply())
        if b"Connection: close" in request or replies[0].fields.get("connection") == "close":
            while not client.ended() and client.buffer.startswith(b"HTTP/1.1 "):
                replies.append(client.reply())
        return Played(replies, client.buffer, run)


LISTENS = {"B032", "B046"}  # their answer is a stream that does not end by itself


@pytest.mark.parametrize(("case", "check"), [row for row in inputs("http") if row.id[:4] not in LISTENS])
def test_the_server_answers_a_case_as_the_rules_have_it(
        run: Running, case: dict[str, Any], check: dict[str, Any]) -> None:
    """MUST (the page that the case cites): each case's octets have the outcome that its rule asks for."""
    cases(run).pace = 0.01
    played = play(run, case["request"].encode("latin-1"))
    for name in check.keys() - {"note"}:
        assert CHECKS[name](played, check[name]), (name, check[name], played.replies)
    assert played.rest == b"", "octets that belong to no answer"
    assert played.first.status < 400 or cases(run).calls == [], "a refused request was executed"
    assert "html" not in played.first.fields.get("content-type", "")


@pytest.mark.parametrize(("case", "check"), [row for row in inputs("http") if row.id[:4] in LISTENS])
def test_a_subscription_is_acknowledged_before_anything_happens(
        run: Running, case: dict[str, Any], check: dict[str, Any]) -> None:
    """MUST (Subscriptions › Acknowledgment): at once, as the first message, under the request's own id."""
    with run.connect() as client:
        client.send(case["request"].encode("latin-1"))
        assert client.head()[0] == 200
        first = next(client.events())
    assert first["method"] == "notifications/subscriptions/acknowledged"
    assert eventually(lambda: not run.server.subscriptions.open)
    wanted = check.get("first_event", {}).get("subscriptionId", 1)
    assert same(first["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"], wanted)


STDIO_CHECKS: dict[str, Callable[[Lines, Any], bool]] = {
    "ids": lambda lines, wanted: set(wanted) <= set(lines.ids("result")),
    "error_ids": lambda lines, wanted: [one for one in lines.ids("error") if one is not None] == wanted,
    "never_ids": lambda lines, wanted: not set(wanted) & {*lines.ids("result"), *lines.ids("error")},
    "anon_errors": lambda lines, wanted: lines.ids("error").count(None) == wanted,
    "code": lambda lines, wanted: {one["error"]["code"] for one in lines.messages if "error" in one} == {wanted},
    "exact_count": lambda lines, wanted: len(lines.messages) == wanted,
    "stdout_no_cr": lambda lines, wanted: b"\r" not in lines.octets,
    "cancelled_within_s": lambda lines, wanted: lines.server.endings == ["cancelled"],
}
# Choice: a request whose id is in use is refused under that id.
STDIO_DECIDED = {"B073 main": {"error_ids": [9], "code": -32600},
                 "B144 inside a string": {"anon_errors": 1, "code": -32700}}


@pytest.mark.parametrize(("case", "check", "name"), [
    pytest.param(*row.values, row.id, id=row.id) for row in inputs("stdio")])
def test_stdio_answers_a_case_as_the_rules_have_it(case: dict[str, Any], check: dict[str, Any], name: str) -> None:
    """MUST (stdio › stdio): a message a line, and nothing else; each case has the outcome that its rule asks for."""
    lines = play_stdio([case["request"].encode("latin-1")])
    for key, wanted in (check | STDIO_DECIDED.get(name, {})).items():
        assert STDIO_CHECKS[key](lines, wanted), (key, wanted, lines.messages)


@pytest.mark.parametrize(("case", "check"), inputs("sse-parser"))
def test_the_event_parser_reads_a_case_as_the_standard_has_it(case: dict[str, Any], check: dict[str, Any]) -> None:
    """WHATWG HTML §9.2: the same events, cut as in the case, whole, and octet by octet."""
    stream = b"".join(chunk.encode("latin-1") for chunk in case["chunks"])
    for cut in ([one.encode("latin-1") for one in case["chunks"]], [stream], [bytes([octet]) for octet in stream]):
        parser = EventParser()
        assert [event._asdict() for chunk in cut for event in parser.feed(chunk)] == check["events"]


@pytest.mark.parametrize(("case", "check"), inputs("schema"))
def test_a_tool_whose_annotations_break_a_rule_is_registered_by_no_server_and_kept_by_no_client(
        case: dict[str, Any], check: dict[str, Any]) -> None:
    """MUST (Streamable HTTP › Schema Extension): the server refuses it; a client drops it and keeps the others."""
    tool, other = json.loads(case["request"]), {"name": "other", "inputSchema": {"type": "object"}}
    server = Server("schemas", "1.0.0")
    try:
        register = server.tool(tool["name"], "", tool["inputSchema"], checks_own_arguments=True)
        register(lambda arguments, request: "")
    except ValueError as problem:
        assert "x-mcp-header" in str(problem)
    server.store.close()
    assert list(server.tools) == [tool["name"]] * check["valid"]
    assert valid_tools([tool, other])[0] == [tool, other][not check["valid"]:]


@pytest.mark.parametrize(("case", "check"), inputs("gateway"))
def test_the_gateway_refuses_what_would_go_round_its_rule(
        run: Running, case: dict[str, Any], check: dict[str, Any]) -> None:
    """MUST (Streamable HTTP › Value Encoding): intermediaries decode before they judge, and refuse the ambiguous."""
    gateway = Gateway(run.port, allowed={"echo"})
    thread = threading.Thread(target=gateway.serve_forever, args=(0.01,))
    thread.start()
    try:
        for request, status in ((case["request"].encode("latin-1"), check["status"]), (octets_of("B003"), 200)):
            with Connection(gateway.port) as client:
                client.send(request)
                assert client.reply().status == status
    finally:
        gateway.shutdown()
        gateway.server_close()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert cases(run).calls == ["echo"], "the server ran what the gateway refused"


def test_every_choice_that_a_case_leaves_is_decided() -> None:
    """Choice: where the rules allow several outcomes these tests assert one."""
    rows = [row for mode in ("http", "stdio", "gateway") for row in inputs(mode)]
    assert len(rows) > 240
    assert [row.id for row in rows if any(isinstance(row.values[1].get(key), list) for key in ("status", "code"))] == []


def test_every_case_is_played() -> None:
    """Choice: a case is a row of a table or has a test that is named after it."""
    played = {row.id[:4] for mode in ("http", "stdio", "sse-parser", "schema", "gateway") for row in inputs(mode)}
    assert played | OWN == set(CASES)
