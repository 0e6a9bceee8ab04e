"""The suite in two halves side by side: the tests that mostly wait for processes, and all others.

    .venv/bin/python tests/run.py     what `make test` runs; exit status 0 when both halves passed

Each half is a pytest in a session of its own, so that Ctrl-C comes here alone and is passed on once: a second one would
interrupt the half in its clearing up. What the halves write to stderr is shown only if one of them fails.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent
NAMES = ("client", "lessons", "limits", "readme", "shutdown", "state", "stdio")
WAITING = [TESTS / f"test_{name}.py" for name in NAMES]
PATIENCE = 20.0  # seconds for a half to clear up after Ctrl-C
LONGEST = 300.0  # seconds for a half: one that hangs is ended, and has failed


def start(out: IO[bytes], err: IO[bytes], *arguments: str | Path) -> subprocess.Popen[bytes]:
    """One half under way."""
    # PYTHONMALLOC: the development mode's allocator checks C code, of which there is none here. Without bytecode each
    # of some two hundred processes would compile the server anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen([sys.executable, "-X", "dev", "-W", "error", "-m", "pytest", "-q", *arguments],
                            cwd=TESTS.parent, env=environment | {"PYTHONMALLOC": "default"}, stdout=out, stderr=err,
                            start_new_session=True)


def stop(half: subprocess.Popen[bytes]) -> None:
    """Waits until a half that was interrupted has cleared up; kills one that does not."""
    try:
        half.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(half.pid, signal.SIGKILL)


def ended(half: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status of a half, which is interrupted when it takes longer."""
    try:
        return half.wait(seconds)
    except subprocess.TimeoutExpired:
        half.send_signal(signal.SIGINT)  # pytest shows where it was
        stop(half)
        return 1


def show(file: IO[bytes]) -> None:
    """Prints what a half has written."""
    file.seek(0)
    sys.stdout.buffer.write(file.read())
    sys.stdout.flush()


def main() -> int:
    """Runs both halves, and shows their output when both are done; the summaries come last."""
    # a background job is started with SIGINT ignored, which the tests' own processes would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("Running the suite, two halves side by side; their output comes when both are done.", flush=True)
    with ExitStack() as files:
        outs, errs = ([files.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in range(2))
        halves = [start(outs[0], errs[0], *WAITING),
                  start(outs[1], errs[1], TESTS, *(f"--ignore={path}" for path in WAITING))]
        try:
            failed = [ended(half, LONGEST) != 0 for half in halves]
        except KeyboardInterrupt:
            for half in halves:
                half.send_signal(signal.SIGINT)
            for half in halves:
                stop(half)
            print("\nInterrupted; nothing is left running.")
            return 130
        for number in sorted(range(2), key=failed.__getitem__):
            if failed[number]:
                show(errs[number])
            show(outs[number])
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
