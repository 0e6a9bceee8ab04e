"""What the official scripts share: packages in an ignored folder, and a server in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"  # ignored by git; removing it only costs the next run its downloads


def install(folder: str, packages: list[str], fetch: Callable[[Path, list[str]], None]) -> Path:
    """The folder with exactly these packages in it, fetched only when the list has changed since the last time."""
    where = CACHE / folder
    listed = where / "installed.txt"
    if not listed.exists() or listed.read_text() != "\n".join(packages):
        print(f"Fetching {', '.join(packages)} into {where.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
        where.mkdir(parents=True, exist_ok=True)
        fetch(where, packages)
        listed.write_text("\n".join(packages))
    return where


def install_npm(folder: str, *packages: str) -> Path:
    """The folder whose `node_modules` holds these npm packages."""
    def fetch(where: Path, packages: list[str]) -> None:
        (where / "package.json").write_text('{"private": true}\n')
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run([*npm, *packages], cwd=where, check=True, stdout=subprocess.DEVNULL)
    return install(folder, list(packages), fetch)


def install_python(folder: str, *packages: str) -> Path:
    """The folder that is a virtual environment with these packages from PyPI."""
    def fetch(where: Path, packages: list[str]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", where], check=True)
        subprocess.run([where / "bin/python", "-m", "pip", "install", "-qq", *packages], check=True)
    return install(folder, list(packages), fetch)


class Log:
    """The lines that a server writes to stderr, collected by a thread as they come."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []  # written by the reading thread only, under `changed`
        self.changed = threading.Condition()
        self.stream = stream
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Runs on the log's own thread until the stream ends, when every process that writes to it has ended."""
        with self.stream:
            for line in self.stream:
                with self.changed:
                    self.lines.append(line.rstrip("\n"))
                    self.changed.notify_all()

    def wait_for(self, pattern: str, start: int = 0, seconds: float = 10) -> re.Match[str] | None:
        """The first line from `start` on that matches; None when the seconds have passed without one."""
        def found() -> re.Match[str] | None:
            return next((match for line in self.lines[start:] if (match := re.search(pattern, line))), None)
        with self.changed:
            return self.changed.wait_for(found, seconds)


def end_process(process: subprocess.Popen[Any]) -> None:
    """Ends a process, by force if it must be, and waits for it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class HttpProcess:
    """One of this repository's servers, started with `--port 0`, as a context manager with its `url` and `log`."""

    def __init__(self, program: str, *options: str) -> None:
        command = [sys.executable, program, "--port", "0", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log = Log(self.process.stderr)

    def __enter__(self) -> HttpProcess:
        match = self.log.wait_for(r"http://127\.0\.0\.1:\d+/mcp")
        if match is None:
            self.__exit__()
            raise SystemExit("The server did not start:\n" + "\n".join(self.log.lines))
        self.url = match[0]
        return self

    def __exit__(self, *exception: object) -> None:
        end_process(self.process)
