"""Runs the official JSON Schema test suite (draft 2020-12) through the server's `compile_schema`.

    python tests/official/schemas.py [--list]

The suite is in the source package of jsonschema on PyPI. A schema is accepted or refused at registration; what is
accepted must judge every test of the suite rightly, and that must be at least LEAST of all tests. `--list` prints
why each refused schema was refused.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from harness import CACHE, ROOT

sys.path.insert(0, str(ROOT))

from reference_server import compile_schema

PACKAGE = "jsonschema==4.26.0"
SUITE = "json/tests/draft2020-12"
TESTS, LEAST = 1257, 0.6


def fetch_suite() -> Path:
    """The folder of the suite's files; fetched once."""
    folder = CACHE / "schemas"
    name = PACKAGE.replace("==", "-")
    if not (folder / name / SUITE).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE, "-d", str(folder)]
        subprocess.run([sys.executable, *command], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / name / SUITE


def keyword_of(refusal: str) -> str:
    """The keyword that a refusal names: the last of the place."""
    place = refusal.partition(" ")[0].rstrip(":")
    return re.sub(r"\[\d+\]$", "", place).rpartition(".")[2]


def main() -> int:
    """The figures; exit status 0 when nothing that is accepted is judged wrongly and enough is accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every refusal")
    show = parser.parse_args().list
    counts: collections.Counter[str] = collections.Counter()
    refused: collections.Counter[str] = collections.Counter()
    for file in sorted(fetch_suite().glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            counts["all"] += len(group["tests"])
            try:
                check = compile_schema(group["schema"], "schema")
            except ValueError as refusal:
                refused[keyword_of(str(refusal))] += len(group["tests"])
                if show:
                    print(f"{file.stem}: {group['description']}: {refusal}")
                continue
            judge(check, file.stem, group, counts)
    share = counts["right"] / counts["all"]
    print(f"{counts['all']} tests: {counts['right']} accepted and right ({share:.1%}), {counts['wrong']} accepted and"
          f" wrong, {sum(refused.values())} refused at registration")
    print("refused, by keyword: " + ", ".join(f"{keyword} {count}" for keyword, count in refused.most_common()))
    return 0 if counts["all"] == TESTS and not counts["wrong"] and share >= LEAST else 1


def judge(check: Any, name: str, group: dict[str, Any], counts: collections.Counter[str]) -> None:
    """Counts the tests of one schema; prints those that it judges wrongly."""
    for test in group["tests"]:
        problem = check(test["data"])
        counts["right" if (problem is None) is test["valid"] else "wrong"] += 1
        if (problem is None) is not test["valid"]:
            print(f"WRONG {name}: {group['description']}: {test['description']}: says {problem}")


if __name__ == "__main__":
    sys.exit(main())
