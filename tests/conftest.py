"""Makes the modules under test importable, and each warning (a leaked socket, a thread's exception) an error."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "lessons"):
    sys.path.insert(0, str(folder))

from support import PATIENCE, Lines, PlainLog  # noqa: E402

import reference_server  # noqa: E402

# For all tests but those of the log itself, which make a `LogWriter`. It has no state, so one is enough.
reference_server.log_writer = PlainLog()  # type: ignore[assignment]
# On a machine that is busy any quick call may take 20 ms, and its line in the log would come between others.
reference_server.SLOW_QUICK = PATIENCE


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """What goes to stderr in this test."""
    lines = Lines()
    monkeypatch.setattr(sys.stderr, "write", lines.write)
    return lines
