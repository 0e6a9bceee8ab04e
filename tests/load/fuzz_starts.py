"""Mutated starts: whatever a parent does to the descriptors, and whatever value an option has, a server starts well.

Start number n is the same in every run. It either serves, which one request shows, and ends with status 0 when it is
asked to; or it ends by itself, with another status and one sentence on stderr. It never prints a traceback, and never
hangs. fuzz.py runs them; on its own: python tests/load/fuzz_starts.py NUMBER... (POSIX)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from support import message, octets  # noqa: E402

PATIENCE = 20.0  # seconds until a server that neither serves nor ends counts as hanging
CALL = message("tools/call", {"name": "get_weather", "arguments": {"location": "Oslo"}})
STDIN = ["pipe"] * 4 + ["closed", "null", "non-blocking", "for writing"]
STDOUT = ["pipe"] * 3 + ["closed", "null", "non-blocking", "full", "full, non-blocking", "no space", "broken"]
STDERR = ["pipe"] * 8 + ["closed", "null", "non-blocking", "full", "full, non-blocking", "no space", "broken"]
NO_INPUT, NO_OUTPUT = {"closed", "null", "for writing"}, {"closed", "null", "no space", "broken"}
# values that must be served, and values that may be refused
GOOD = {"--step-seconds": ["0", "0.5"], "--rate": ["0", "0.5"], "--keep-alive": ["1"], "--idle-timeout": ["5"],
        "--max-connections": ["2"], "--host": ["localhost", "127.0.0.1"], "--state": [":memory:", "{folder}/é b.db"],
        "--allow-origin": ["https://app.example.com", "http://localhost:5173"], "--wire": [""]}
NUMBERS = ["0", "-0", "-1", "nan", "inf", "-inf", "1e400", "1e300", "99999999999999999999", "", " ", "abc", "1_0", "٣"]
EDGES = {**dict.fromkeys(["--step-seconds", "--rate", "--keep-alive", "--idle-timeout", "--request-timeout",
                          "--write-timeout", "--max-connections", "--max-body"], NUMBERS),
         "--port": ["-1", "65536", "1e3", "3000.5", "99999999999999999999", "", " ", "abc"],
         "PORT": ["-1", "65536", "3000.5", " ", "abc"],
         "--host": ["", " ", "::1", "0.0.0.0", "::", "256.1.1.1", "no host", "x" * 300,
                    "[::1]", "é"],
         "--allow-origin": ["", "*", "null", "https://app.example.com/", "https://app.example.com:443", "http://[::1",
                            "app.example.com", "https://*.example.com", "http://a b", "é", "HTTPS://EXAMPLE.COM"],
         "--state": ["", " ", "{folder}", "{folder}/none/x.db", "{folder}/text", "/dev/null", "/dev/full", "x" * 300,
                     "{folder}/a\nb.db"],
         "python": ["-I", "-u", "-B", "-O"]}


class Start(NamedTuple):
    """How a server is started."""

    stdio: bool
    options: list[tuple[str, str]]
    streams: tuple[str, str, str]
    edge: bool  # there is an option that may be refused

    @property
    def useless(self) -> bool:
        """Nothing can be asked, or answered."""
        return self.stdio and (self.streams[0] in NO_INPUT or self.streams[1] in NO_OUTPUT)


def make_start(number: int) -> Start:
    """Start `number`."""
    chance = random.Random(number)
    edge = chance.random() < 0.5
    chosen = chance.sample(list(GOOD.items()), chance.randint(0, 2))
    options = [(name, chance.choice(values)) for name, values in chosen]
    if edge:
        name = chance.choice(list(EDGES))
        options = [one for one in options if one[0] != name] + [(name, chance.choice(EDGES[name]))]
    streams = chance.choice(STDIN), chance.choice(STDOUT), chance.choice(STDERR)
    return Start(chance.random() < 0.5, options, streams, edge)


def opened(state: str, number: int) -> tuple[int, int]:
    """The child's end of such a descriptor, and this process's, or -1."""
    if state in ("closed", "null", "for writing", "no space"):
        path = "/dev/full" if state == "no space" else os.devnull
        return os.open(path, os.O_WRONLY if number or state == "for writing" else os.O_RDONLY), -1
    reading, writing = os.pipe()
    child, ours = (writing, reading) if number else (reading, writing)
    if "full" in state:
        fcntl.fcntl(child, fcntl.F_SETPIPE_SZ, 4096) if hasattr(fcntl, "F_SETPIPE_SZ") else None
        os.set_blocking(child, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(child, b"\n" * 4096)
    os.set_blocking(child, "non-blocking" not in state)
    if state == "broken":
        os.close(ours)
        ours = -1
    return child, ours


class Started:
    """The process, and this side of its descriptors."""

    def __init__(self, start: Start, folder: str) -> None:
        Path(folder, "text").write_text("This is no database.\n" * 100)
        self.start, self.host = start, dict(start.options).get("--host", "127.0.0.1")
        self.port = next(port for port in iter(lambda: random.randrange(10_000, 30_000), 0) if is_free(port))
        environment = dict(os.environ) | {name: value for name, value in start.options if name == "PORT"}
        flags = [value for name, value in start.options if name == "python"]
        # as a module it is not compiled anew; what -I is given must be the script
        server = [str(ROOT / "reference_server.py")] if "-I" in flags else ["-m", "reference_server"]
        command = [sys.executable, *flags, *server]
        for name, value in start.options:
            if name.startswith("--"):
                command += [name] if name == "--wire" else [f"{name}={value.replace('{folder}', folder)}"]
        command += ["--stdio"] if start.stdio else []
        if not start.stdio and not {"PORT", "--port"} & dict(start.options).keys():
            command.append(f"--port={self.port}")
        ends = [opened(state, number) for number, state in enumerate(start.streams)]
        closed = "".join(f" {number}<&-" for number, state in enumerate(start.streams) if state == "closed")
        self.stdin, self.stdout, self.stderr = (ours for _, ours in ends)
        self.process = subprocess.Popen(["/bin/sh", "-c", f'exec "$@"{closed}', "sh", *command], cwd=ROOT,
                                        env=environment, stdin=ends[0][0], stdout=ends[1][0], stderr=ends[2][0])
        for child, _ in ends:
            os.close(child)

    def ask(self) -> bool:
        """Whether a request is answered. TimeoutError if neither that nor the end of the process comes."""
        return self.ask_stdio() if self.start.stdio else self.ask_http()

    def ask_http(self) -> bool:
        """Over whatever address it listens on."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            for address in ("127.0.0.1", "::1"):
                with contextlib.suppress(OSError), socket.create_connection((address, self.port), 2) as client:
                    name = f"[{address}]" if ":" in address else address
                    client.sendall(octets(CALL, Host=f"{name}:{self.port}", Connection="close"))
                    answer = client.recv(65536)
                    if answer.startswith(b"HTTP/1.1 200 ") or (b" 413 " in answer[:20] and self.small()):
                        return True
                    raise ValueError(f"the answer is {answer[:100]!r}")
            time.sleep(0.02)
        raise TimeoutError

    def small(self) -> bool:
        """Whether the message may be too long."""
        return "--max-body" in dict(self.start.options)

    def ask_stdio(self) -> bool:
        """Over the pipes; a reader of a full one comes late."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.stdin, json.dumps(CALL).encode() + b"\n") if self.stdin >= 0 else None
        if "full" in self.start.streams[1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
        if self.stdout < 0 or self.start.useless:
            return False
        received = b""
        while b"}\n" not in received:
            if not select.select([self.stdout], [], [], PATIENCE)[0]:
                raise TimeoutError
            if not (piece := os.read(self.stdout, 65536)):
                return False
            received += piece
        return any(b'"result"' in line or self.small() for line in received.split(b"\n") if line.startswith(b'{"'))

    def end(self, served: bool) -> int:
        """The exit status, after what ends a server: the end of input, or SIGTERM. TimeoutExpired if it goes on."""
        if self.start.stdio and self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1
        elif served:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def log(self) -> str | None:
        """What it has written to stderr, if that can be read."""
        if self.stderr < 0 or "full" in self.start.streams[2]:
            return None
        return b"".join(iter(lambda: os.read(self.stderr, 65536), b"")).decode(errors="replace")

    def close(self) -> None:
        """Ends what is still there."""
        self.process.kill()
        self.process.wait()
        for descriptor in (self.stdin, self.stdout, self.stderr):
            if descriptor >= 0:
                os.close(descriptor)


def is_free(port: int) -> bool:
    """Whether nobody listens there. Numbers from here on down are given to no client by the system."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@contextlib.contextmanager
def launched(start: Start) -> Iterator[Started]:
    """The process; it has ended afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        started = Started(start, folder)
        try:
            yield started
        finally:
            started.close()


def find_fault(start: Start) -> str | None:
    """What is wrong with this start."""
    with launched(start) as started:
        try:
            served = started.ask()
            status = started.end(served)
        except (TimeoutError, subprocess.TimeoutExpired):
            return "hangs: neither serves nor ends"
        except ValueError as problem:
            return str(problem)
        return judge(start, served, status, started.log())


def judge(start: Start, served: bool, status: int, text: str | None) -> str | None:
    """The verdict on a process that has ended."""
    said = text or ""
    if any(word in said for word in ("Traceback", "Fatal Python", "Exception ignored")):
        return f"a traceback: {said[-1000:]}"
    if served:
        return f"served, and ended with status {status}: {said[-500:]}" if status else None
    if not start.edge and not start.useless:
        return f"does not serve, status {status}: {said[-500:]}"
    if start.useless and not start.edge and status == 0:
        lost = start.streams[0] not in NO_INPUT and start.streams[1] != "null"
        return "an answer was lost, with status 0" if lost else None
    if status == 0:
        return None if start.useless else f"neither served nor refused: {said[-500:]}"
    sentences = [line for line in said.splitlines() if not line.startswith(("usage:", " "))]
    enough = text is None or len(sentences) == 1 or (sentences and start.useless)  # it may have logged what it did
    return None if enough else f"status {status}, but not one sentence: {said[-1000:]!r}"


def run(numbers: Sequence[int]) -> int:
    """How many of these starts go wrong; each of those is printed."""
    began, faults = time.monotonic(), 0
    with ThreadPoolExecutor(4) as pool:
        starts = list(map(make_start, numbers))
        for number, start, fault in zip(numbers, starts, pool.map(find_fault, starts), strict=True):
            if fault:
                faults += 1
                print(f"start {number}: {fault}\n    {start}", flush=True)
    print(f"{len(numbers)} starts in {time.monotonic() - began:.0f} s: {faults} faults", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(1 if run([int(word) for word in sys.argv[1:]]) else 0)
