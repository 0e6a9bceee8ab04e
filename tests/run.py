"""The suite in four parts side by side, since most tests wait for something: for processes, sockets, deadlines.

    .venv/bin/python tests/run.py     what `make test` runs; exit status 0 when all parts passed

Each part is a pytest in a session of its own, so that Ctrl-C comes here alone and is passed on once: a second one would
interrupt the part in its clearing up. What a part writes to stderr is shown only if it fails.
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
PARTS = [[TESTS / f"test_{name}.py" for name in names.split()] for names in (  # and a fourth one: all others
    "client lessons limits shutdown stdio", "readme refusals source state",
    "cases registry mcp_sh tasks fuzz carriers options")]
PATIENCE = 20.0  # seconds for a part to clear up after Ctrl-C
# Without what no test here uses, each of which costs something before and after every test. Descriptors are not caught:
# what is written there is in the part's own output. A cache is nothing that several parts can share.
LEAN = ["--capture=sys", *(word for name in (
    "cacheprovider", "doctest", "faulthandler", "junitxml", "logging", "pastebin", "setuponly", "setupplan", "stepwise",
    "unittest") for word in ("-p", f"no:{name}"))]
LONGEST = 300.0  # seconds for a part: one that hangs is ended, and has failed


def start(out: IO[bytes], err: IO[bytes], *arguments: str | Path) -> subprocess.Popen[bytes]:
    """One part under way."""
    # PYTHONMALLOC: the development mode's allocator checks C code, of which there is none here. Without bytecode each
    # of some two hundred processes would compile the server anew.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen([sys.executable, "-X", "dev", "-W", "error", "-m", "pytest", "-q", *LEAN, *arguments],
                            cwd=TESTS.parent, env=environment | {"PYTHONMALLOC": "default"}, stdout=out, stderr=err,
                            start_new_session=True)


def stop(part: subprocess.Popen[bytes]) -> None:
    """Waits until a part that was interrupted has cleared up; kills one that does not."""
    try:
        part.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGKILL)


def ended(part: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status of a part, which is interrupted when it takes longer."""
    try:
        return part.wait(seconds)
    except subprocess.TimeoutExpired:
        part.send_signal(signal.SIGINT)  # pytest shows where it was
        stop(part)
        return 1


def show(file: IO[bytes]) -> None:
    """Prints what a part has written."""
    file.seek(0)
    sys.stdout.buffer.write(file.read())
    sys.stdout.flush()


def main() -> int:
    """Runs all parts, and shows their output when all are done; the summaries come last."""
    # a background job is started with SIGINT ignored, which the tests' own processes would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("Running the suite, four parts side by side; their output comes when all are done.", flush=True)
    others = [TESTS, *(f"--ignore={path}" for part in PARTS for path in part)]
    with ExitStack() as files:
        outs, errs = ([files.enter_context(tempfile.TemporaryFile()) for _ in range(4)] for _ in range(2))
        parts = [start(*streams, *paths) for *streams, paths in zip(outs, errs, [*PARTS, others], strict=True)]
        try:
            failed = [ended(part, LONGEST) != 0 for part in parts]
        except KeyboardInterrupt:
            for part in parts:
                part.send_signal(signal.SIGINT)
            for part in parts:
                stop(part)
            print("\nInterrupted; nothing is left running.")
            return 130
        for number in sorted(range(4), key=failed.__getitem__):
            if failed[number]:
                show(errs[number])
            show(outs[number])
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
