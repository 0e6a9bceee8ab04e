"""The log: one event, one line, whatever is in it; and nobody ever waits for whoever reads it, or does not."""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import (
    PATIENCE,
    ROOT,
    SERVER_MODULE,
    Connection,
    Lines,
    call_tool,
    eventually,
    killed_at_last,
    message,
    octets,
    running,
)

import reference_server
from reference_server import MAX_LOG_LINE, MAX_LOG_LINES, Exchange, LogWriter, Request, Server, Wire, log_fault


class Pipe:
    """A real writer of the log on a pipe, and the end that reads it."""

    def __init__(self, kind: type[LogWriter] = LogWriter, blocking: bool = True) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, blocking)
        self.writer = kind(self.writing)
        self.text = ""

    def fill(self) -> int:
        """Lets nothing more into the pipe; how many octets that took."""
        os.set_blocking(self.writing, False)
        size = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                size += os.write(self.writing, b"." * 4096)
        os.set_blocking(self.writing, True)
        return size

    def read(self, mark: str) -> list[str]:
        """The lines up to the one that has the mark."""
        while mark not in self.text:
            self.read_some()
        return self.text.splitlines()

    def read_some(self) -> None:
        """What comes next."""
        assert select.select([self.reading], [], [], PATIENCE)[0], "nothing more came"
        piece = os.read(self.reading, 65536)
        assert piece, "the pipe has ended"
        self.text += piece.decode()

    def close(self) -> None:
        """Ends the reader first, so that the writer cannot be stuck, and then has nothing in hand."""
        os.close(self.reading)
        assert eventually(lambda: not self.writer.lines and not self.writer.busy)
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A writer of its own for one test."""
    one = Pipe()
    yield one
    one.close()


# -------------------------------------------------------------------------------------------------- the writer


def test_lines_of_many_threads_come_whole_and_in_order(pipe: Pipe) -> None:
    """Choice: a thread's lines stand in the order in which it logged them, and none is broken, lost or doubled."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=lambda name=name: [
            pipe.writer.put(f"{name} {number}\n") for number in range(300)]) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    pipe.writer.put("the end\n")
    lines = pipe.read("the end")
    for name in range(8):
        assert [line for line in lines if line.startswith(f"{name} ")] == [f"{name} {n}" for n in range(300)]
    assert len(lines) == 8 * 300 + 1


def test_a_burst_goes_out_in_few_writes() -> None:
    """Choice: lines are gathered, because a write for each costs more than most answers."""
    begun, go = threading.Event(), threading.Event()
    writes: list[int] = []

    class Slow(LogWriter):
        """Its first write waits for the test."""

        def write(self, text: str) -> None:
            writes.append(text.count("\n"))
            begun.set()
            assert go.wait(PATIENCE)
            super().write(text)

    pipe = Pipe(Slow)
    pipe.writer.put("first\n")
    assert begun.wait(PATIENCE)
    for number in range(1000):
        pipe.writer.put(f"{number}\n")
    go.set()
    assert pipe.read("\n999\n") == ["first", *map(str, range(1000))]
    assert writes == [1, 500, 500]
    pipe.close()


def test_nobody_waits_for_a_full_pipe_and_what_is_dropped_is_counted(pipe: Pipe) -> None:
    """Choice: the log is the least important of what a server does; its memory is bounded and its losses are told."""
    size, count = pipe.fill(), 3 * MAX_LOG_LINES
    for number in range(count):
        pipe.writer.put(f"line {number}\n")  # a put that waited would never return
    assert len(pipe.writer.lines) <= MAX_LOG_LINES
    pipe.read("dropped")
    while pipe.writer.lines:  # so many wait again that one more would be dropped
        pipe.read_some()
    pipe.writer.put("after it\n")
    lines = pipe.read("after it")
    lines[0] = lines[0][size:]
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    told = [int(found[1]) for line in lines if (found := re.fullmatch(
        r"\[ref\] (\d+) log lines were dropped: nobody read them in time", line))]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0
    assert len(numbers) + sum(told) == count and lines[-1] == "after it"
    assert MAX_LOG_LINES <= len(numbers) <= 2 * MAX_LOG_LINES, "what waits, and what the writer has in hand"


def test_a_parents_non_blocking_pipe_loses_nothing() -> None:
    """Choice: O_NONBLOCK belongs to the pipe, which a parent may share; the writer alone waits for it."""
    pipe = Pipe(blocking=False)
    fcntl.fcntl(pipe.writing, fcntl.F_SETPIPE_SZ, 4096)
    lines = [f"{number} {'x' * 50}" for number in range(200)]
    for line in lines:
        pipe.writer.put(f"{line}\n")
    assert pipe.read(f"{lines[-1]}\n") == lines
    pipe.close()


def test_a_pipe_whose_reader_is_gone_costs_nothing() -> None:
    """Choice: serving goes on without a log; the writer throws away what nobody can read."""
    pipe = Pipe()
    os.close(pipe.reading)
    for number in range(100):
        pipe.writer.put(f"{number}\n")
    assert eventually(lambda: not pipe.writer.lines and not pipe.writer.busy)
    os.close(pipe.writing)


class Clock:
    """Stands in for the module `time`: it goes on by being slept on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_end_of_the_process_waits_at_most_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: for lines that nobody takes; and not at all when there are none."""
    clock, writer = Clock(), LogWriter()
    monkeypatch.setattr(reference_server, "time", clock)
    writer.finish()
    assert clock.now == 0
    for attribute, value in (("lines", ["a line that no thread takes\n"]), ("busy", True)):
        before, writer = clock.now, LogWriter()
        setattr(writer, attribute, value)
        writer.finish()
        assert 0.5 <= clock.now - before < 0.51


def test_the_end_of_the_process_waits_for_what_is_read(pipe: Pipe) -> None:
    """Choice: the last lines, which say why it ends, are not lost to a reader that reads."""
    for number in range(200):
        pipe.writer.put(f"{number}\n")
    pipe.writer.finish()
    os.set_blocking(pipe.reading, False)
    assert os.read(pipe.reading, 65536).decode().splitlines() == [str(number) for number in range(200)]


def test_lines_wait_for_the_first_thread_that_is_to_be_had(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: a system out of threads costs no request and no line; the next line tries again, once."""
    start, refusals = threading.Thread.start, [1, 2]

    def start_later(self: threading.Thread) -> None:
        if refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    before = threading.active_count()
    for number in range(4):
        pipe.writer.put(f"{number}\n")
    assert pipe.read("3\n") == ["0", "1", "2", "3"]
    assert threading.active_count() <= before + 1


# ---------------------------------------------------------------------------------------------------- one line

NASTY = ["a\nb", "a\r\n[ref] forged", "\x1b[2J\x1b[31m", "\0\x07\x08\x7f", "\x85\u2028\u2029\x0b\x0c", "\u202egnirts",
         "\ud800", "\u200b\ufeff", "\U000e0001"]


@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_no_text_breaks_a_line_or_moves_a_cursor(log: Lines, text: str) -> None:
    """Choice: nothing that comes from outside can forge a line; what is not printable is shown as its escape."""
    reference_server.log(f"before {text} after")
    assert log.text.startswith("[ref] before ") and log.text.endswith(" after\n")
    assert log.text.count("\n") == 1 and log.text[:-1].isprintable()
    assert len(log.text) > len("[ref] before  after\n"), "it is shown, not left out"


def test_what_can_be_read_is_shown_as_it_is(log: Lines) -> None:
    """Choice: escapes are for what would do harm; names in other scripts are none of that."""
    reference_server.log("Zürich 😀 \\n 東京")
    assert log.text == "[ref] Zürich 😀 \\n 東京\n"


@pytest.mark.parametrize("text", ["x" * (1 << 20), "\x1b" * (1 << 20), "\U000e0001" * 1999, "é" * 2001],
                         ids=["1 MiB", "1 MiB of ESC", "escapes of ten characters", "one more"])
def test_a_line_is_no_longer_than_a_screenful(log: Lines, text: str) -> None:
    """Choice: cut after 2,000 characters, escapes included, and the whole length is told."""
    reference_server.log(text)
    assert log.text.endswith(f"… ({len(text)} characters)\n") and len(log.text) <= MAX_LOG_LINE + 40


def test_a_line_of_the_limit_is_whole(log: Lines) -> None:
    """Choice: the limit is exact."""
    reference_server.log("x" * (MAX_LOG_LINE - 1))
    assert log.text == "[ref] " + "x" * (MAX_LOG_LINE - 1) + "\n"


def test_the_wire_is_shown_in_whole_lines_too(log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: --wire shows what a client sent, and so is as careful as every other line."""
    Wire().show("-->", Exchange(), "POST /mcp HTTP/1.1\r\nX: \x1b[2J\n\nbody\u2028[ref] forged\n" + "x" * 5000)
    lines = log.lines()
    assert len(lines) == 4 and all(re.match(r"--> #1 +[0-9.]+ ms  ", line) for line in lines)
    assert all(line.isprintable() for line in lines) and max(map(len, lines)) < MAX_LOG_LINE + 70


# ------------------------------------------------------------------------------------------------------- faults


class Unsayable(Exception):
    """An exception that cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no")


def raised(problem: BaseException, cause: BaseException | None = None) -> BaseException:
    """The exception, with a traceback."""
    try:
        raise problem from cause
    except BaseException as caught:
        return caught


def circle() -> BaseException:
    """Two exceptions that are each other's cause."""
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    return raised(one, other)


def deep() -> BaseException:
    """A chain of a thousand causes."""
    problem: BaseException = ValueError("the first")
    for number in range(1000):
        problem = raised(KeyError(number), problem)
    return problem


def endless(depth: int = 0) -> int:
    """Calls itself until Python has had enough."""
    return endless(depth + 1) + 1


def recursion() -> BaseException:
    """A traceback of a thousand frames."""
    try:
        endless()
    except RecursionError as caught:
        return caught
    raise AssertionError


@pytest.mark.parametrize("make, says", [
    (lambda: raised(ValueError("x\r\n[ref] tools/call forged -> complete\x1b[2J")), "ValueError: x\\r\\n[ref] tools"),
    (lambda: raised(Unsayable()), "Unsayable: <exception str() failed>"), (circle, "RuntimeError: one"),
    (deep, "KeyError: 999"), (recursion, "RecursionError: maximum recursion depth"),
    (lambda: raised(ExceptionGroup("several\nof them", [ValueError("a\nb")])), "ExceptionGroup: several\\nof them"),
    (lambda: raised(SyntaxError("bad\n", ("a\nb", 1, 1, "text\n[ref] forged", 1, 2))), "SyntaxError: bad"),
    (lambda: raised(KeyboardInterrupt()), "KeyboardInterrupt"),
], ids=["forged", "unsayable", "circle", "deep", "recursion", "group", "syntax", "interrupt"])
def test_a_traceback_is_whole_lines_that_cannot_forge(
        log: Lines, make: Callable[[], BaseException], says: str) -> None:
    """Choice: a fault of an author's is logged for who mends it; its text may be a client's, so it is one line."""
    log_fault(make())
    lines = log.lines()
    assert all(line.startswith("[ref] ") and line.isprintable() for line in lines)
    assert not any(line.startswith(("[ref] [ref]", "[ref] tools/call")) for line in lines)
    assert lines[0] == "[ref] Traceback (most recent call last):"
    assert says in lines[-1] and len(lines) < 500


def test_what_led_to_a_fault_stands_before_it(log: Lines) -> None:
    """Choice: as Python shows it; what `from None` hides stays hidden."""
    log_fault(raised(RuntimeError("the second"), raised(KeyError("the first"))))
    faults = [line for line in log.lines() if re.match(r"\[ref\] [A-Z]\w+: ", line)]
    assert faults == ["[ref] KeyError: 'the first'", "[ref] RuntimeError: the second"]
    with log.condition:
        log.text = ""
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise RuntimeError("shown") from None
    except RuntimeError as caught:
        log_fault(caught)
    assert "hidden" not in log.text.replace('raise KeyError("hidden")', "") and "RuntimeError: shown" in log.text


def test_a_tools_words_cannot_forge_a_line_of_the_log(log: Lines) -> None:
    """Choice: what an exception says often comes from the client that provoked it."""
    server = Server("any", "1")

    @server.tool("fails", "Raises.", {"type": "object"})
    def fails(arguments: dict[str, Any], request: Request) -> str:
        raise ValueError(arguments["text"])

    text = "x\n[ref] tools/call get_weather user=bob id=1 -> complete\n\x1b[2K"
    assert call_tool(server, "fails", {"text": text})["error"]["code"] == -32603
    assert all(line.startswith("[ref] ") and line.isprintable() for line in log.lines())
    assert not any(line.startswith("[ref] tools/call get_weather") for line in log.lines())
    server.store.close()


# -------------------------------------------------------------------------------------------------- as a process


def environment() -> dict[str, str]:
    """Without what would keep Python's own streams from holding anything back."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@contextlib.contextmanager
def process(*options: str, closed: str = "", code: tuple[str, ...] = SERVER_MODULE,
            **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server; `closed`: descriptors that it does not get, in the shell's words. Killed after PATIENCE."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *code, *options]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), **streams) as one, killed_at_last(one):
        yield one


TERSE = "import sys, reference_server; reference_server.MAX_LOG_LINES = 1000; sys.exit(reference_server.main())"


def test_an_unread_log_loses_no_answer_and_tells_what_it_dropped() -> None:
    """Choice: over stdio too every answer comes, however long nobody reads stderr; with a tenth of the lines, here."""
    pipe, count = subprocess.PIPE, 5_000  # those that wait, as many in the writer's hands, and the pipe's 64 KB
    with process("--stdio", code=("-c", TERSE), stdin=pipe, stdout=pipe, stderr=pipe) as server:
        assert server.stdin and server.stdout and server.stderr
        threading.Thread(target=lambda: (server.stdin.write(b"{\n" * count), server.stdin.flush())).start()
        for _ in range(count):
            assert b'"error":{"code":-32700,' in server.stdout.readline()
        texts: list[bytes] = []
        reader = threading.Thread(target=lambda: texts.extend(server.stderr))
        reader.start()
        server.stdin.close()
        assert server.wait(PATIENCE) == 0
        reader.join(PATIENCE)
    refused = [one for one in texts if one.startswith(b"[ref] line refused: 400, -32700 ")]
    dropped = [int(found[1]) for one in texts if (found := re.match(rb"\[ref\] (\d+) log lines were dropped", one))]
    assert len(refused) + sum(dropped) == count and dropped


def test_a_full_log_does_not_keep_the_server_from_serving_or_ending() -> None:
    """Choice: over HTTP, with a pipe that was full before the start: a request is answered and SIGTERM ends it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    with running(Server("any", "1")) as free:
        port = free.port
    with process("--port", str(port), stderr=writing) as server:
        assert eventually(lambda: answers(port))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    for descriptor in (reading, writing):
        os.close(descriptor)


def answers(port: int) -> bool:
    """Whether a server listens there and answers."""
    with contextlib.suppress(ConnectionRefusedError), Connection(port) as client:
        client.send(octets(message("server/discover")))
        return client.reply().status == 200
    return False


def test_without_any_descriptor_http_is_served_all_the_same() -> None:
    """Choice: a parent may close all three; the log goes nowhere, and no socket gets its number."""
    with running(Server("any", "1")) as free:
        port = free.port
    with process("--port", str(port), "--wire", closed="0<&- 1>&- 2>&-") as server:
        assert eventually(lambda: answers(port))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0


def test_without_stderr_stdio_is_served_all_the_same() -> None:
    """Choice: and its status is 0."""
    line = json.dumps(message("server/discover")).encode() + b"\n"
    with process("--stdio", closed="2>&-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        out, _ = server.communicate(line, timeout=PATIENCE)
    assert json.loads(out)["result"] and server.returncode == 0


@pytest.mark.parametrize("closed", ["0<&-", "1>&-"])
def test_without_stdin_or_stdout_stdio_ends_with_a_sentence(closed: str) -> None:
    """Choice: there is nobody to serve, so the exit status is 1; nothing waits, nothing is lost without a word."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with process("--stdio", closed=closed, **streams) as server:
        _, err = server.communicate(timeout=PATIENCE)
    assert server.returncode == 1
    assert err.decode() == "reference_server: stdin or stdout is closed: over stdio there is nobody to serve\n"
