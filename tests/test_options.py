"""The command line: every value that it allows is served, every other is refused with one sentence, never a traceback.

A row is an option's value. What is allowed is started by `main` itself, in this process, and asked one request.
"""

import contextlib
import errno
import os
import re
import runpy
import selectors
import signal
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, Connection, Lines, message, octets

import reference_server
from reference_server import HttpServer, main, parse_command_line

ROOT = Path(__file__).resolve().parents[1]
CALL = message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}})
MANY = "9" * 30


def numbers(good: list[str], bad: list[str]) -> dict[str, list[str]]:
    """Of a number, what is served and, with what is no number at all, what is refused."""
    return {"good": good, "bad": [*bad, "nan", "inf", "-inf", "1e400", "", " ", "abc", "0x10", "1,5", "1 2", "½", "1\0",
                                  "--1"]}


SECONDS = numbers(["0.1", "5", "1e6", " 7 ", "٣"], ["0", "-0", "-1", "0.01", "1e7", MANY])
TABLE: dict[str, dict[str, list[str]]] = {
    "--port": numbers(["0", "00", " 0 "], ["-1", "65536", MANY, "3000.5", "1e3", "80:80"]),
    "--host": {"good": ["localhost", "LOCALHOST", "127.0.0.1", "127.1", "::1", "0.0.0.0", "::"],
               "bad": ["", " ", "256.1.1.1", "no host", "x" * 300, "[::1]", "é.invalid", "http://127.0.0.1", "a\0b",
                       "127.0.0.1:3000", ".", "*", "\udcff"]},
    "--step-seconds": numbers(["0", "0.5", "1e6", "1e-9"], ["-1", "1e7", MANY]),
    "--keep-alive": numbers(["0.001", "15", "1e6"], ["0", "-1", "0.0001", "1e7", MANY]),
    "--allow-origin": {
        "good": ["https://app.example.com", "https://app.example.com/", "https://app.example.com:443",
                 "HTTPS://APP.EXAMPLE.COM", "http://localhost:5173", "http://[::1]:80", "app://x"],
        "bad": ["", " ", "*", "null", "app.example.com", "https://", "https://*.example.com", "http://[::1",
                "http://a b", "http://a/b", "http://a?b", "http://a:b", "http://a:99999", "http://u@a", "//a", "é",
                "https://é.example", "a\nb", "http://a, http://b"]},
    "--state": {"good": [":memory:", "{folder}/new.db", "{folder}/é b?c#d%41.db", "{folder}/a\nb.db"],
                "bad": ["", " ", "a\0b", "\udcff", "{folder}", "{folder}/none/x.db", "{folder}/text", "x" * 300]},
    "--rate": numbers(["0", "0.1", "1", "1e9"], ["-1", "1e10", MANY]),
    "--max-connections": numbers(["1", "1000000"], ["0", "-1", "1000001", "2.5", "1e3", MANY]),
    "--max-body": numbers(["1000", "1073741824"], ["0", "-1", "1073741825", "2.5", "1e3", MANY]),
    "--idle-timeout": SECONDS, "--request-timeout": SECONDS, "--write-timeout": SECONDS,
    "--wire": {"good": [], "bad": ["", "yes"]}, "--stdio": {"good": [], "bad": ["", "yes"]},
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Starter":
    """Starts `main` in this process; nothing of this process is changed by it."""
    (tmp_path / "text").write_text("This is no database.\n" * 100)
    return Starter(monkeypatch, str(tmp_path))


class Starter:
    """`main` with these arguments, and a client that asks once and then ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        self.monkeypatch, self.folder = monkeypatch, folder
        self.server: HttpServer | None = None
        self.handlers: dict[int, Any] = {}
        self.wakeups: list[int] = []
        monkeypatch.setattr(reference_server, "raise_descriptor_limit", lambda: None)
        monkeypatch.setattr(signal, "signal", self.handlers.__setitem__)
        monkeypatch.setattr(signal, "set_wakeup_fd", lambda number, **_: self.wakeups.append(number))
        for name in ("PORT", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)

    def run(self, *arguments: str) -> tuple[int, int | None]:
        """The exit status, and the status of the answer if it was served."""
        answers, serve = [], HttpServer.serve_forever

        def serve_once(server: HttpServer, poll_interval: float = 0) -> None:
            self.server = server
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(self.ask, server)
                answer.add_done_callback(lambda _: self.handlers[signal.SIGTERM](signal.SIGTERM, None))
                serve(server)
                answers.append(answer.result())

        words = [argument.replace("{folder}", self.folder) for argument in arguments]
        with self.monkeypatch.context() as patch:
            patch.setattr(HttpServer, "serve_forever", serve_once)
            patch.setattr(sys, "argv", ["reference_server.py", *words])
            try:
                status = main()
            except SystemExit as ended:
                status = int(ended.code or 0)
        return status, answers[0] if answers else None

    def ask(self, server: HttpServer) -> int:
        """One request, at the address that the server has."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(*2 * [str(server.server_address[0])])
        client = Connection.__new__(Connection)
        client.socket, client.buffer = socket.create_connection((host, server.port), PATIENCE), b""
        with client:
            client.send(octets(CALL, Host=f"[{host}]" if ":" in host else host))
            return client.reply().status


# -------------------------------------------------------------------------------------------------------- the table


def test_the_table_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: an option that nobody has tried at its edges is not there yet."""
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    assert set(re.findall(r"(?m)^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out)) == {*TABLE, "--help"}


@pytest.mark.parametrize("name", TABLE)
def test_every_value_that_is_allowed_is_served(started: Starter, log: Lines, name: str) -> None:
    """Choice: what passes the check at the start works."""
    for value in TABLE[name]["good"]:
        port = [] if name == "--port" else ["--port", "0"]
        assert (value, started.run(*port, f"{name}={value}")) == (value, (0, 200))
    assert all(line.startswith("[ref] ") and line.isprintable() for line in log.lines())


@pytest.mark.parametrize("name", TABLE)
def test_every_other_value_is_refused_with_one_sentence(started: Starter, log: Lines, name: str) -> None:
    """Choice: before anything is served, by one line that names the option or its value; the status is not 0."""
    for value in TABLE[name]["bad"]:
        log.text = ""
        port = [] if name == "--port" else ["--port", "0"]
        status, answer = started.run(*port, f"{name}={value}")
        assert (value, status in (1, 2), answer) == (value, True, None)
        [line] = log.lines()
        assert line.startswith("reference_server: ") and line.isprintable() and len(line) < 500
        assert name in line or value[:20].replace("{folder}", started.folder) in line
        assert re.search(r"--help|--host takes|cannot use .+: .+", line)


@pytest.mark.parametrize("name, right", [
    ("--port", "whole number from 0 to 65535"), ("--max-connections", "whole number from 1 to 1000000"),
    ("--max-body", "whole number from 1 to 1073741824"), ("--keep-alive", "number from 0.001 to 1000000"),
    ("--rate", "number from 0 to 1000000000"), ("--write-timeout", "number from 0.1 to 1000000"),
    ("--allow-origin", "such as https://app.example.com"), ("--state", "may not be empty")])
def test_a_refusal_says_what_would_be_right(started: Starter, log: Lines, name: str, right: str) -> None:
    """Choice: limits are told as whole numbers, not as 1.07374e+09."""
    assert started.run(f"{name}=") == (2, None)
    assert right in log.text


@pytest.mark.parametrize("words", [["3000"], ["--prot", "1"], ["--port"], ["-x"], ["--wir"], ["--port=1", "--", "x"]])
def test_words_that_are_no_options_are_refused(started: Starter, log: Lines, words: list[str]) -> None:
    """Choice: nothing is guessed; the line says where to look."""
    assert started.run(*words) == (2, None)
    assert len(log.lines()) == 1 and log.text.endswith("(--help lists the options)\n")


@pytest.mark.parametrize("value, status", [("0", 0), ("", 1), ("abc", 2), ("-1", 2), ("65536", 2), ("3000.5", 2),
                                           (" ", 2), ("\n", 2)])
def test_the_environments_port_is_checked_like_the_options(
        started: Starter, log: Lines, monkeypatch: pytest.MonkeyPatch, value: str, status: int) -> None:
    """Choice: $PORT stands in for --port, and is looked at only where a port is used; an empty one is none."""
    monkeypatch.setenv("PORT", value)
    if value == "":  # 3000, which may be free or taken here
        assert parse_command_line([]).port == 3000
        return
    assert started.run() == (status, 200 if status == 0 else None)
    assert ("the environment's PORT: " in log.text) == (status == 2)
    assert started.run("--port=0") == (0, 200)
    assert parse_command_line(["--stdio"]).port is None


def test_a_small_limit_of_a_body_is_an_answer(started: Starter, log: Lines) -> None:
    """Choice: the least that --max-body allows is served too: with 413."""
    assert started.run("--port=0", "--max-body=1") == (0, 413)


@pytest.mark.parametrize("host, shown", [("localhost", "127.0.0.1"), ("::1", "[::1]"), ("127.1", "127.0.0.1")])
def test_the_first_line_says_what_is_served(started: Starter, log: Lines, host: str, shown: str) -> None:
    """Choice: of a name the address, because its clients may try another one first."""
    assert started.run("--port=0", f"--host={host}") == (0, 200)
    assert re.match(rf"\[ref\] MCP 2026-07-28 at http://{re.escape(shown)}:\d+/mcp \(", log.text)


@pytest.mark.parametrize("found, family", [
    ([socket.AF_INET6, socket.AF_INET], socket.AF_INET), ([socket.AF_INET6], socket.AF_INET6)])
def test_of_a_name_with_both_kinds_of_address_the_older_is_served(
        monkeypatch: pytest.MonkeyPatch, found: list[int], family: int) -> None:
    """Choice: a client that tries ::1 first goes on to 127.0.0.1; one that knows no IPv6 does not go the other way."""
    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(one, 1, 6, "", ()) for one in found])
    monkeypatch.setattr(socket, "socketpair", stop)
    server = HttpServer.__new__(HttpServer)
    with contextlib.suppress(Enough):
        HttpServer.__init__(server, None, "localhost")  # type: ignore[arg-type]
    assert server.address_family == family


def test_a_taken_port_says_how_to_go_on(started: Starter, log: Lines) -> None:
    """Choice: one line, with another port and the variable that the lessons read."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert started.run("--port", str(port)) == (1, None)
    [line] = log.lines()
    assert f"port {port}" in line and "--port 3005" in line and "export MCP=http://127.0.0.1:3005/mcp" in line


def test_a_port_that_needs_privileges_says_how_to_go_on(
        started: Starter, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: the same way as for a port that is taken."""
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(HttpServer, "server_bind", refuse)
    assert started.run("--port", "80") == (1, None)
    assert "Permission denied" in log.text and "--port 3005" in log.text and len(log.lines()) == 1


def test_signals_wake_a_loop_that_nothing_interrupts(started: Starter, log: Lines) -> None:
    """Choice: on Windows select() is not ended by Ctrl-C, so the interpreter writes to the socket that wakes it."""
    assert started.run("--port=0") == (0, 200)
    assert started.handlers.keys() == {signal.SIGINT, signal.SIGTERM} and len(started.wakeups) == 1
    assert started.server and started.wakeups[0] > 2


# ------------------------------------------------------------------------------------------------------- the wire


@pytest.mark.parametrize("terminal, system, variable, coloured", [
    (True, "posix", None, True), (True, "posix", "", True), (True, "posix", "1", False), (True, "posix", "0", False),
    (False, "posix", None, False), (True, "nt", None, False)])
def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch, log: Lines, terminal: bool,
                                                  system: str, variable: str | None, coloured: bool) -> None:
    """Choice: as https://no-color.org has it: NO_COLOR with any value but an empty one."""
    wire_os = type("System", (), {"name": system, "environ": {} if variable is None else {"NO_COLOR": variable},
                                  "isatty": staticmethod(lambda number: terminal)})
    monkeypatch.setattr(reference_server, "os", wire_os)
    assert bool(reference_server.Wire().colours) == coloured


# ----------------------------------------------------------------------------------------------------- interpreters

VERSIONS = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
OLD = [one for pattern in ("3.8.*", "3.9.*", "3.10.*") for one in VERSIONS.glob(f"{pattern}/bin/python")]


def run(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """What such a process says and returns."""
    return subprocess.run(command, cwd="/", env=os.environ | environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False)


@pytest.mark.skipif(not OLD, reason="no old Python here")
def test_an_old_python_is_one_sentence() -> None:
    """Choice: the first thing that happens; not the error of whatever it cannot read."""
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda python: run(str(python), str(ROOT / "reference_server.py")), OLD):
            assert done.returncode == 1 and done.stdout == ""
            assert re.fullmatch(r"reference_server.py needs Python 3\.11 or newer, this is 3\.\d+\.\d+\n", done.stderr)


def test_an_old_sqlite_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: the oldest that has every statement used here, checked in one place before any of them."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "reference_server.py"), run_name="__main__")
    assert ended.value.code == "reference_server.py needs SQLite 3.35 or newer (RETURNING), this is 3.34.1"
    assert capsys.readouterr() == ("", "")


def test_it_finds_its_modules_whatever_the_interpreter_looks_at() -> None:
    """Choice: `-I` and PYTHONSAFEPATH keep the script's folder out of the path, and other people's modules too."""
    script, paths = str(ROOT / "reference_server.py"), {"PYTHONPATH": ""}
    commands = [([sys.executable, "-I", script, "--stdio"], paths),
                ([sys.executable, script, "--stdio"], paths | {"PYTHONSAFEPATH": "1"})]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda one: run(*one[0], **one[1]), commands):
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -------------------------------------------------------------------------------------------------------- platforms


class Limits:
    """Stands in for the module `resource`."""

    RLIMIT_NOFILE = 7

    def __init__(self, hard: int, most: int) -> None:
        self.hard, self.most, self.soft = hard, most, 256

    def getrlimit(self, which: int) -> tuple[int, int]:
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if not 0 <= limits[0] <= self.most or limits[1] != self.hard:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = limits[0]


@pytest.mark.parametrize("hard, most, soft", [(4096, 4096, 4096), (-1, 10_240, 10_240), (-1, 100, 256)])
def test_the_limit_of_descriptors_is_what_the_system_takes(
        monkeypatch: pytest.MonkeyPatch, hard: int, most: int, soft: int) -> None:
    """Choice: macOS says that there is none and refuses to be taken at its word."""
    limits = Limits(hard, most)
    monkeypatch.setitem(sys.modules, "resource", limits)  # type: ignore[arg-type]
    reference_server.raise_descriptor_limit()
    assert limits.soft == soft


def test_a_system_without_limits_of_descriptors_is_none_the_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: Windows has no module `resource`."""
    monkeypatch.setitem(sys.modules, "resource", None)  # type: ignore[arg-type]
    reference_server.raise_descriptor_limit()


def test_where_select_is_all_there_is_the_connections_are_few(
        started: Starter, log: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choice: select() takes 1,024 descriptors, or 512; the limit is lowered instead of reached."""
    monkeypatch.setattr(HttpServer, "selecting", selectors.SelectSelector)
    assert started.run("--port=0", "--max-connections=4096") == (0, 200)
    assert started.server and started.server.max_connections == 400
    assert started.run("--port=0", "--max-connections=3") == (0, 200)
    assert started.server.max_connections == 3
