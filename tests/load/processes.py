"""What the long tests share: servers as processes of their own, which have ended afterwards, and where they listen."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "tests"):
    sys.path.insert(0, str(folder))

PATIENCE = 20.0


class Process:
    """A server that has said where it listens; `lines` is what it has written to stderr so far."""

    def __init__(self, *command: str) -> None:
        self.lines: list[str] = []
        self.popen = subprocess.Popen([sys.executable, *command, "--port", "0"], stderr=subprocess.PIPE, text=True)
        ready = threading.Event()
        self.reader = threading.Thread(target=self.read, args=(ready,))
        self.reader.start()
        if not ready.wait(PATIENCE) or not (found := re.search(r":(\d+)/mcp", "".join(self.lines))):
            self.kill()
            raise SystemExit(f"a server did not start: {self.lines}")
        self.port = int(found[1])

    def read(self, ready: threading.Event) -> None:
        """The reader thread: until the process ends."""
        assert self.popen.stderr
        with self.popen.stderr as stderr:
            for line in stderr:
                self.lines.append(line.rstrip("\n"))
                if "/mcp" in line:
                    ready.set()
        ready.set()

    def kill(self) -> None:
        """SIGKILL: the process writes nothing more from here on."""
        self.popen.kill()
        self.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.popen.terminate()
        return self.wait()

    def wait(self) -> int:
        """Until it has ended; the exit status."""
        status = self.popen.wait(PATIENCE)
        self.reader.join(PATIENCE)
        return status


@contextlib.contextmanager
def process(*command: str) -> Iterator[Process]:
    """A server that is killed afterwards, if it is still there."""
    one = Process(*command)
    try:
        yield one
    finally:
        one.kill()
