"""Makes the modules under test importable, and each warning (a leaked socket, a thread's exception) an error."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests", ROOT / "tests" / "lessons"):
    sys.path.insert(0, str(folder))
