"""One instance of the reference server for handles.py, with a tool that leaves traces and one that kills its process.

    python instance.py JOURNAL STEP_SECONDS [options of reference_server.py]
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import reference_server
from reference_server import Request, Server, takes

STEPS = 10
demo_server = reference_server.demo_server


def marching_server(journal: int, step_seconds: float, *arguments: Any) -> Server:
    """The demo and two more tools; one writes each step that it does into the journal, in one write."""
    server = demo_server(*arguments)

    @server.tool("march", "Ten steps, each of them recorded.", takes())
    def march(arguments: dict[str, Any], request: Request) -> str:
        request.as_task(required=True)
        for step in range(int(request.done) + 1, STEPS + 1):
            os.write(journal, f"{os.getpid()} {request.id} {step}\n".encode())
            request.sleep(step_seconds)
            request.progress(step, STEPS)
        return f"Marched {STEPS} steps."

    @server.tool("die", "Kills the process that runs it.", takes())
    def die(arguments: dict[str, Any], request: Request) -> str:
        request.as_task(required=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return "not killed"

    return server


if __name__ == "__main__":
    journal, step_seconds = sys.argv[1:3]
    del sys.argv[1:3]
    traces = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    reference_server.demo_server = lambda *arguments: marching_server(traces, float(step_seconds), *arguments)
    sys.exit(reference_server.main())
