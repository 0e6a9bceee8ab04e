"""Drives the official clients, unmodified, against the reference server, over Streamable HTTP and over stdio.

    python tests/official/interop.py [CLIENT ...]        (python-sdk, fastmcp, typescript, inspector; default: all)

Prints a Markdown table; a cell is `works`, `not offered` (by the client, as the client itself shows), `client's
fault` (it breaks a MUST and is refused for it) or `fails`, and then the exit status is 1. That a call was cancelled
is read from the server's log, not from the client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import interop_inspector
from harness import ROOT, HttpProcess, Log, install_npm, install_python

HERE = Path(__file__).resolve().parent
FEATURES = ["discover", "list tools", "call", "structured output", "mirrored argument", "progress", "cancel",
            "resources", "prompts", "completion", "form elicitation", "URL elicitation", "subscription", "tasks"]
Row = tuple[str, str, str]  # feature, outcome, what was seen


def run_script(command: list[str | Path]) -> list[Row]:
    """The rows that a client's script prints; what it left out has failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        output, complaint = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        output, complaint = str(late.stdout or ""), "not finished after 300 s"
    rows = [tuple(json.loads(line)) for line in output.splitlines() if line.startswith("[")]
    missing = [feature for feature in FEATURES if feature not in [row[0] for row in rows]]
    return rows + [(feature, "fails", f"the script ended early: {complaint[-500:]}") for feature in missing]


def python_sdk(target: list[str], log: Log) -> list[Row]:
    folder = install_python("interop-python", "mcp==2.3.0")
    return run_script([folder / "bin/python", HERE / "interop_python.py", "sdk", *target])


def fastmcp(target: list[str], log: Log) -> list[Row]:
    folder = install_python("interop-fastmcp", "fastmcp[tasks]==4.1.4")
    return run_script([folder / "bin/python", HERE / "interop_python.py", "fastmcp", *target])


def typescript(target: list[str], log: Log) -> list[Row]:
    folder = install_npm("interop-typescript", "@modelcontextprotocol/client@2.4.0", "node@22")
    script = shutil.copy(HERE / "interop_typescript.mjs", folder)  # an import looks beside the script for packages
    return run_script([folder / "node_modules/node/bin/node", script, *target])


def inspector(target: list[str], log: Log) -> list[Row]:
    folder = install_npm("interop-inspector", "@modelcontextprotocol/inspector@2.12.0", "node@22")
    return interop_inspector.run(folder, target, log, FEATURES)


class Client(NamedTuple):
    """How a client is driven, how long a step of its report takes, and the log's reason for the call it cancels."""

    run: Callable[[list[str], Log], list[Row]]
    step_seconds: str
    reasons: dict[str, str]


CLOSES = {"HTTP": "stream closed", "stdio": "notifications/cancelled"}
CLIENTS = {
    "python-sdk": Client(python_sdk, "0.1", CLOSES),
    "fastmcp": Client(fastmcp, "0.1", CLOSES),
    "typescript": Client(typescript, "0.1", CLOSES),
    "inspector": Client(inspector, "0.5", dict.fromkeys(CLOSES, "tasks/cancel")),  # to it every report is a task
}


@contextlib.contextmanager
def http_server(*options: str) -> Iterator[tuple[list[str], Log]]:
    """The URL of a running server, and its log."""
    with HttpProcess("reference_server.py", *options) as server:
        yield [server.url], server.log


@contextlib.contextmanager
def stdio_server(*options: str) -> Iterator[tuple[list[str], Log]]:
    """The command with which a client starts a server for itself, and the log that they all write to."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = f"{folder}/log"
        os.mkfifo(pipe)
        kept_open = os.open(pipe, os.O_RDWR)  # so that the log does not end when the first server does
        shell = ["/bin/sh", "-c", f'exec "$0" "$@" 2>{shlex.quote(pipe)}']
        try:
            log = Log(os.fdopen(os.open(pipe, os.O_RDONLY)))
            yield [*shell, sys.executable, str(ROOT / "reference_server.py"), "--stdio", *options], log
        finally:
            os.close(kept_open)


def drive(client: Client, transport: str) -> dict[str, Row]:
    """One client over one transport: its row for each feature."""
    serve = http_server if transport == "HTTP" else stdio_server
    with serve("--step-seconds", client.step_seconds) as (target, log):
        rows = {row[0]: row for row in client.run(target, log)}
        if rows["cancel"][1] == "works":
            proof = log.wait_for(rf"build_report cancelled at step \d+ \({client.reasons[transport]}(: [^)]*)?\)")
            rows["cancel"] = ("cancel", "works", proof[0]) if proof else ("cancel", "fails", "the log lacks it")
    return rows


def main() -> int:
    """All clients over both transports, one after the other, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    chosen = parser.parse_args().clients or list(CLIENTS)
    table: dict[str, dict[str, Row]] = {}
    for client in chosen:
        for transport in ("HTTP", "stdio"):
            table[f"{client}, {transport}"] = drive(CLIENTS[client], transport)
    print(f"| feature | {' | '.join(table)} |\n|---|{'---|' * len(table)}")
    for feature in FEATURES:
        print(f"| {feature} | {' | '.join(rows[feature][1] for rows in table.values())} |")
    print()
    for column, rows in table.items():
        for feature, outcome, seen in rows.values():
            if outcome != "works" or feature == "cancel":
                print(f"{column}, {feature}: {outcome}: {seen}")
    failed = sum(row[1] == "fails" for rows in table.values() for row in rows.values())
    print(f"{len(table) * len(FEATURES)} cells, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
