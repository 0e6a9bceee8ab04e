"""What other clients notice of five hundred that are slow on purpose: the time that a good request takes.

    python tests/load/slow_clients.py [--bad 500] [--requests 1000]

The bad ones are idle, stop within the head or the body, send an octet ten times a second, ask for much and never
read, or hold a subscription open; they are a process of their own. The good ones take turns: one request on a
connection of its own, one on a connection that is kept. The exit status is 1 if a good request fails.
"""

import argparse
import contextlib
import re
import resource
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1])]

from support import PATIENCE, Connection, message, octets  # noqa: E402

AIM = 50.0  # milliseconds, for 99 of 100 good requests beside 500 bad clients
GOOD = octets(message("tools/call", {"name": "get_weather", "arguments": {"location": "Bern"}}))
LIST = octets(message("tools/list"))
LISTEN = octets(message("subscriptions/listen", {"notifications": {"toolsListChanged": True}}))
LONG = octets(b" " * 1_000_000)


def attack(port: int, count: int) -> None:
    """The bad clients' process: opens them all, says so on stdout, and goes on until it is killed."""
    starts = [b"", LIST[:40], LIST[:-1], LONG[:300], LIST * 400, LISTEN]
    clients = [Connection(port) for _ in range(count)]
    for number, client in enumerate(clients):
        client.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            client.socket.send(starts[number % len(starts)])
    print("all there", flush=True)
    while True:
        for client in clients[3::len(starts)]:
            with contextlib.suppress(BlockingIOError):
                client.socket.send(b" ")
        select.select([], [], [], 0.1)


def measure(port: int, count: int) -> str:
    """The times of so many good requests, as text. AssertionError if one is not answered."""
    taken = []
    with Connection(port) as kept:
        for number in range(count):
            then = time.perf_counter()
            with contextlib.ExitStack() as stack:
                connection = kept if number % 2 else stack.enter_context(Connection(port))
                connection.send(GOOD)
                assert connection.reply().status == 200
            taken.append(1000 * (time.perf_counter() - then))
    taken.sort()
    return f"p50 {taken[count // 2]:.2f} ms, p99 {taken[count * 99 // 100 - 1]:.2f} ms, most {taken[-1]:.2f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--bad", type=int, default=500)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.attack:
        attack(options.attack, options.bad)
    patient = [word for name in ("idle", "request", "write") for word in (f"--{name}-timeout", "300")]
    command = [sys.executable, "reference_server.py", "--port", "0", *patient]
    log = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stderr=log, text=True) as server, contextlib.ExitStack() as stack:
        stack.callback(server.kill)
        watchdog = threading.Timer(12 * PATIENCE, server.kill)
        stack.callback(watchdog.cancel)
        watchdog.start()
        assert server.stderr
        port = int(re.findall(r":(\d+)/mcp", server.stderr.readline())[0])
        threading.Thread(target=server.stderr.read, daemon=True).start()  # so that the log does not fill its pipe
        print(f"{options.requests} good requests alone: {measure(port, options.requests)}", flush=True)
        bad = [sys.executable, str(HERE), "--attack", str(port), "--bad", str(options.bad)]
        with subprocess.Popen(bad, stdout=subprocess.PIPE, text=True) as attacker:
            stack.callback(attacker.kill)
            assert attacker.stdout and attacker.stdout.readline() == "all there\n"
            print(f"{options.requests} good requests beside {options.bad} slow clients:"
                  f" {measure(port, options.requests)} (aim: p99 under {AIM:g} ms)", flush=True)
            assert attacker.poll() is None and server.poll() is None
            attacker.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
