"""Runs the official conformance suite against conformance_server.py, and its client scenarios that need no OAuth
against conformance_client.py; a warning fails the run like a failure.

    python tests/official/conformance.py [--repeat N]

Prints one line for each run of the suite. The suite itself keeps warnings to its result files and leaves the
extension's scenarios out of its exit status, so the result files (checks.json) decide here.
"""

from __future__ import annotations

import argparse
import collections
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, HttpProcess, install_npm

Check = dict[str, Any]  # one entry of a checks.json
Done = subprocess.CompletedProcess[str]

VERSION = "2026-07-28"
SUITE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
NODE = "node@22"  # the suite does not start on Node 20
TASKS = ("lifecycle", "capability-negotiation", "wire-fields", "request-state-removal", "mrtr-input",
         "request-headers", "dispatch-and-envelope", "status-notifications", "required-task-error",
         "mrtr-composition")
CLIENT = {"tools_call": 2, "request-metadata": 6, "http-standard-headers": 9, "http-custom-headers": 18,
          "http-invalid-tool-headers": 12, "sep-2322-client-request-state": 7, "json-schema-ref-no-deref": 1,
          "json-schema-2020-12-preservation": 9}  # scenario -> successes
SHOWN = 20  # problems that one run prints
CRASH = "Client exited with code"  # which http-invalid-tool-headers would forgive
UNSCORED = f"Not scored for {VERSION}: 13 scenario(s) run, 0 failing"


def run_suite(folder: Path, arguments: list[str]) -> tuple[list[Check], int, Done]:
    """One run of the suite: the checks of all its scenarios, the number of scenarios, and the finished process."""
    results = folder / "results"
    shutil.rmtree(results, ignore_errors=True)
    modules = folder / "node_modules"
    suite = [str(modules / "node/bin/node"), str(modules / "@modelcontextprotocol/conformance/dist/index.js")]
    command = [*suite, *arguments, "-o", str(results)]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = sorted(results.glob("*/checks.json"))
    checks = [check | {"scenario": file.parent.name} for file in files for check in json.loads(file.read_text())]
    return checks, len(files), done


def judge(folder: Path, name: str, arguments: list[str], scenarios: int, successes: int) -> bool:
    """Runs the suite once and prints its line; False when a check failed or warned, or when fewer ran than must."""
    checks, ran, done = run_suite(folder, arguments)
    counts = collections.Counter(check["status"] for check in checks)
    problems = [check for check in checks if check["status"] not in ("SUCCESS", "INFO", "SKIPPED")]
    good = not problems and done.returncode == 0 and ran == scenarios and counts["SUCCESS"] >= successes
    good = good and CRASH not in done.stdout
    if name == "requirements":
        good = good and UNSCORED in done.stdout
    print(f"{name}: {ran} scenarios, {counts['SUCCESS']} passed, {counts['FAILURE']} failed, "
          f"{counts['WARNING']} warnings, {counts['INFO']} info, {counts['SKIPPED']} skipped: "
          f"{'ok' if good else 'NOT OK'}", flush=True)
    for check in problems[:SHOWN]:
        print(f"  {check['status']} {check['scenario']} {check['id']}: {check.get('errorMessage')}")
    if len(problems) > SHOWN:
        print(f"  ... and {len(problems) - SHOWN} more")
    if not good and not problems:
        print(done.stdout, f"exit status {done.returncode}", sep="\n")
    return good


def main() -> int:
    """Everything once, or as often as asked; the exit status says whether all of it was good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run the whole N times")
    repeat = parser.parse_args().repeat
    folder = install_npm("conformance", SUITE, NODE)
    nothing = folder / "no-expected-failures.yaml"
    nothing.write_text("server: []\n")
    everything = ["--suite", "all", "--spec-version", VERSION, "--expected-failures", str(nothing)]
    client = shlex.join([sys.executable, str(ROOT / "tests/official/conformance_client.py")])
    good = True
    for _ in range(repeat):
        with HttpProcess("tests/official/conformance_server.py") as process:
            server = ["server", "--url", process.url]
            good &= judge(folder, "requirements", [*server, "--requirements", VERSION], 50, 196)
            good &= judge(folder, "suite all", [*server, *everything], 40, 152)
            for task in TASKS:  # without --spec-version: extensions match no version and would be skipped
                least = 0 if task == "status-notifications" else 2
                good &= judge(folder, f"tasks-{task}", [*server, "--scenario", f"tasks-{task}"], 1, least)
        for scenario, least in CLIENT.items():
            command = ["client", "--command", client, "--scenario", scenario, "--spec-version", VERSION]
            good &= judge(folder, f"client {scenario}", command, 1, least)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
