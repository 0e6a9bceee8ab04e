"""Two processes on one state file: each walk a hundred times, fifty kills of the owner of ten tasks (make handles).

    python tests/load/handles.py [--walks 100] [--kills 50] [--seed N] [--starts 4000] [--suspended 35] [--locked 12]

Then the walks that take their time: an instance that is suspended for longer than any time-out, a process that holds
the write lock under load, a tool that kills its process, starts beside finders of free locks.
Prints figures; a violation is an AssertionError, and exit status 1.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import PATIENCE, ROOT, Process, process
from support import Connection, eventually, message, octets
from walks import KNOWS_TASKS, WALKS, Client, RoundRobin, walk_changes

from reference_server import LOCKS, Store

HERE = Path(__file__).parent
TASKS_AT_ONCE, STEPS, STEP_SECONDS = 10, 10, 0.03
CONFIG = "file:///project/config.json"


def walk_all(folder: str, times: int) -> None:
    """Every walk so many times, each request at the other instance than the one before."""
    command = (str(ROOT / "reference_server.py"), "--step-seconds", "0.01", "--rate", "0", "--state", f"{folder}/walks")
    with process(*command) as one, process(*command) as two, RoundRobin(one.port, two.port) as robin:
        delays: list[float] = []  # from the answer to a change until the other instance's subscriber has heard of it
        for name, walk in (WALKS | {"changes": lambda client: walk_changes(client, delays.append)}).items():
            took, before = [], robin.passed.total()
            for _ in range(times):
                began = time.monotonic()
                walk(Client(robin.port))
                took.append(time.monotonic() - began)
                if robin.passed.total() % 2 == before % 2:  # begin the next one at the other instance
                    Client(robin.port).call("server/discover")
                    before += 1
            print(f"  {name:13} {times} times, {robin.passed.total() - before} requests,"
                  f" median {statistics.median(took) * 1000:.0f} ms, longest {max(took) * 1000:.0f} ms")
        assert abs(robin.passed[one.port] - robin.passed[two.port]) <= 1, robin.passed
        print(f"  {len(delays)} changes reached the other instance's subscriber, median"
              f" {statistics.median(delays) * 1000:.0f} ms, longest {max(delays) * 1000:.0f} ms after the answer")
        assert max(delays) < 0.5, "a change took more than half a second"
        for instance in (one, two):
            assert instance.stop() == 0, "exit status"
            check_log(instance)


def check_log(instance: Process) -> None:
    """No traceback, and no request that met trouble."""
    trouble = [line for line in instance.lines if not line.startswith("[ref] ") or "-32603" in line or "state" in line]
    assert not trouble, trouble


class Battle:
    """Two instances, one of which is killed in each round, and what the file and the journal say about the tasks."""

    def __init__(self, folder: str, chance: random.Random) -> None:
        self.chance, self.journal, self.state = chance, f"{folder}/journal", f"{folder}/kills"
        self.command = command(self.journal, self.state)
        self.instances = [Process(*self.command) for _ in range(2)]
        self.file = sqlite3.connect(self.state, isolation_level=None, timeout=PATIENCE)
        # the file itself notes each step that is recorded and each end, whoever writes it
        self.file.executescript("""
            CREATE TABLE noted (id TEXT, what TEXT);
            CREATE TRIGGER step AFTER UPDATE OF done ON tasks WHEN NEW.done IS NOT OLD.done
                BEGIN INSERT INTO noted VALUES (NEW.id, CAST(NEW.done AS INTEGER)); END;
            CREATE TRIGGER ending AFTER UPDATE OF status ON tasks WHEN NEW.status IS NOT OLD.status
                BEGIN INSERT INTO noted VALUES (NEW.id, NEW.status); END;""")
        self.killed_at: Counter[int] = Counter()
        self.steps = self.unrecorded = 0
        self.recovery: list[float] = []
        self.taken_up: list[float] = []  # seconds from the kill until the other instance's first worker ran

    def close(self) -> None:
        """Both instances end."""
        for instance in self.instances:
            instance.kill()
        self.file.close()

    def recorded(self, tasks: list[str]) -> dict[str, int]:
        """The last recorded step of each task."""
        rows = self.file.execute("SELECT id, coalesce(done, 0) FROM tasks").fetchall()
        done = {one: int(step) for one, step in rows if one in tasks}
        assert set(done) == set(tasks), "a task whose handle was sent is lost"
        return done

    def fight(self) -> None:
        """One round: ten tasks, a kill at a random step, and everybody asks the survivor and the successor."""
        victim = self.chance.randrange(2)
        owner = Client(self.instances[victim].port)
        tasks = [str(owner.result_of("march", capabilities=KNOWS_TASKS)["taskId"]) for _ in range(TASKS_AT_ONCE)]
        one, step = self.chance.choice(tasks), self.chance.randrange(STEPS)
        assert eventually(lambda: self.recorded(tasks)[one] >= step)
        threading.Event().wait(self.chance.uniform(0, STEP_SECONDS))
        heir, seen = self.instances[1 - victim], len(self.instances[1 - victim].lines)
        killed = time.monotonic()
        self.instances[victim].kill()
        before = self.recorded(tasks)
        unfinished = [task for task in tasks if self.status(task) == "working"]
        if unfinished:  # and nobody asks
            assert eventually(lambda: any(" taken up after step " in line for line in heir.lines[seen:]))
            self.taken_up.append(time.monotonic() - killed)
        self.killed_at.update(before.values())
        pid = self.instances[victim].popen.pid
        self.instances[victim] = Process(*self.command)
        with RoundRobin(*(instance.port for instance in self.instances)) as robin:
            for task in self.chance.sample(tasks, len(tasks)):
                assert Client(robin.port).becomes(task, "completed"), "a task did not complete"
                result = Client(robin.port).task("get", task)["result"]
                assert result["content"][0]["text"] == f"Marched {STEPS} steps.", result
        if unfinished:
            self.recovery.append(time.monotonic() - killed)
        self.check(tasks, pid, before)

    def status(self, task: str) -> str:
        """A task's status in the file."""
        return str(self.file.execute("SELECT status FROM tasks WHERE id = ?", (task,)).fetchone()[0])

    def check(self, tasks: list[str], owner: int, before: dict[str, int]) -> None:
        """What was done and recorded: everything, in order, once; only a step that was not recorded may come twice."""
        traces = [line.split() for line in Path(self.journal).read_text().splitlines()]
        for task in tasks:
            noted = [what for what, in self.file.execute("SELECT what FROM noted WHERE id = ? ORDER BY rowid", (task,))]
            assert noted == [str(step) for step in range(1, STEPS + 1)] + ["completed"], noted
            mine = [(int(pid), int(step)) for pid, name, step in traces if name == task]
            first = [step for pid, step in mine if pid == owner]
            second = [step for pid, step in mine if pid != owner]
            assert len({pid for pid, _ in mine if pid != owner}) <= 1, "two instances have taken up the same task"
            assert first == list(range(1, len(first) + 1)), first
            assert len(first) - before[task] in (0, 1), (first, before[task])
            assert second == list(range(before[task] + 1, STEPS + 1)), (before[task], second)
            self.steps += len(mine)
            self.unrecorded += len(mine) - STEPS


def kill_often(folder: str, times: int, seed: int) -> None:
    """So many kills of the owner of ten running tasks."""
    with contextlib.closing(Battle(folder, random.Random(seed))) as battle:
        for number in range(1, times + 1):
            battle.fight()
            if number % 10 == 0:
                print(f"  {number} kills, {number * TASKS_AT_ONCE} tasks: each completed exactly once", flush=True)
        for instance in battle.instances:
            check_log(instance)
        counts = dict(battle.file.execute("SELECT status, count(*) FROM tasks GROUP BY status").fetchall())
    assert counts == {"completed": times * TASKS_AT_ONCE}, counts
    print(f"  at the kill, tasks stood at step {dict(sorted(battle.killed_at.items()))}")
    print(f"  {battle.steps} steps done; {battle.unrecorded} that were under way, and so not recorded, were done again;"
          " no recorded step was")
    print(f"  from the kill until all ten were complete: median {statistics.median(battle.recovery):.2f} s, longest"
          f" {max(battle.recovery):.2f} s")
    print(f"  from the kill until the other instance's first worker ran, unasked: median"
          f" {statistics.median(battle.taken_up) * 1000:.0f} ms, longest {max(battle.taken_up) * 1000:.0f} ms")
    assert max(battle.taken_up) < 0.5, "an orphan waited for more than half a second"


def command(journal: str, state: str, step_seconds: float = STEP_SECONDS) -> tuple[str, ...]:
    """That of an instance that marches."""
    return (str(HERE / "instance.py"), journal, str(step_seconds), "--rate", "0", "--state", state)


def march(client: Client) -> str:
    """A new task of ten steps."""
    return str(client.result_of("march", capabilities=KNOWS_TASKS)["taskId"])


@contextlib.contextmanager
def listening(port: int, task: str) -> Iterator[Iterator[Any]]:
    """The messages of a subscription to the configuration and a task."""
    wanted = {"resourceSubscriptions": [CONFIG], "taskIds": [task]}
    with Connection(port) as connection:
        connection.send(octets(message("subscriptions/listen", {"notifications": wanted}, capabilities=KNOWS_TASKS)))
        assert connection.head()[0] == 200
        events = connection.events()
        assert next(events)["params"]["notifications"] == wanted
        yield events


def suspend(folder: str, seconds: float) -> None:
    """One instance stands still for so long, and is woken: its task is still its own, its subscriber hears of all."""
    journal, state = f"{folder}/journal-suspended", f"{folder}/suspended"
    with process(*command(journal, state, 0.5)) as one, process(*command(journal, state, 0.5)) as two:
        task = march(Client(one.port))
        with listening(one.port, task) as events:
            assert any(event["params"].get("statusMessage") == "1 of 10" for event in events)
            time.sleep(0.2)  # in the middle of a step, and in no transaction
            os.kill(one.popen.pid, signal.SIGSTOP)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                Client(two.port).result_of("touch_config")
                assert Client(two.port).task("get", task)["status"] == "working"
                time.sleep(0.2)
            os.kill(one.popen.pid, signal.SIGCONT)
            woken = time.monotonic()
            assert any(event["method"] == "notifications/resources/updated" for event in events)
            heard = time.monotonic() - woken
            assert any(event["params"].get("status") == "completed" for event in events)
        traces = [line.split() for line in Path(journal).read_text().splitlines()]
        assert [(int(pid), int(step)) for pid, _, step in traces] == [
            (one.popen.pid, step) for step in range(1, STEPS + 1)], traces
        assert not [line for line in two.lines if "taken up" in line]
    print(f"  suspended for {seconds:g} s: the task went on where it was, no step twice; a subscriber heard of the"
          f" change {heard * 1000:.0f} ms after the waking")


def hold_the_lock(folder: str, seconds: float) -> None:
    """Another process holds the write lock: reads are answered at once, writes fail, the server ends when asked to."""
    journal, state = f"{folder}/journal-locked", f"{folder}/locked"
    with process(*command(journal, state, 0.5)) as server, contextlib.closing(
            sqlite3.connect(state, isolation_level=None, timeout=PATIENCE)) as other:
        client = Client(server.port)
        task = march(client)
        took: list[float] = []
        refused: Counter[int] = Counter()
        end = time.monotonic() + seconds

        def read() -> None:
            with Connection(server.port) as connection:
                while time.monotonic() < end:
                    for method, params in (("tasks/get", {"taskId": task}), ("tools/list", {}),
                                           ("resources/read", {"uri": CONFIG})):
                        began = time.monotonic()
                        answer = connection.call(method, params, capabilities=KNOWS_TASKS).message
                        took.append(time.monotonic() - began)
                        assert "result" in answer, answer
                    time.sleep(0.01)

        def write() -> None:
            while time.monotonic() < end - 6:
                refused[client.call_tool("create_cart")["error"]["code"]] += 1

        other.execute("BEGIN IMMEDIATE")
        threads = [threading.Thread(target=one) for one in (read, read, write, write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other.execute("ROLLBACK")
        took.sort()
        p99 = took[len(took) * 99 // 100]
        assert refused.keys() <= {-32603} and p99 < 0.05, (refused, p99)
        assert client.becomes(task, "completed")  # some of its steps are not recorded, its outcome is
        other.execute("BEGIN IMMEDIATE")
        threading.Thread(target=lambda: suppressed(client)).start()
        time.sleep(0.1)
        began = time.monotonic()
        assert server.stop() == 0
        ended = time.monotonic() - began
        other.execute("ROLLBACK")
        assert ended < 1, ended
        assert not [line for line in server.lines if "Traceback" in line]
    print(f"  write lock held for {seconds:g} s: {len(took)} reads, p99 {p99 * 1000:.1f} ms, longest"
          f" {took[-1] * 1000:.1f} ms; {refused.total()} writes refused; SIGTERM beside the lock: {ended:.2f} s")


def suppressed(client: Client) -> None:
    """A call whose server goes away under it."""
    with contextlib.suppress(Exception):
        client.call_tool("create_cart")


def kill_from_within(folder: str) -> None:
    """A tool kills its process, and each process that takes it up, three in all; the others' work is done."""
    journal, state = f"{folder}/journal-die", f"{folder}/die"
    first = Process(*command(journal, state))
    tasks = [march(Client(first.port)) for _ in range(3)]
    with contextlib.suppress(Exception):  # the process may be gone before it answers
        Client(first.port).call_tool("die", capabilities=KNOWS_TASKS)
    assert first.wait() == -signal.SIGKILL
    lives = 1
    while True:
        heir = subprocess_of(command(journal, state))
        lives += 1
        if heir is None:
            continue
        with contextlib.closing(sqlite3.connect(state, isolation_level=None)) as file:
            query = "SELECT count(*) FROM tasks WHERE status IN ('completed', 'failed')"
            assert eventually(lambda: heir.popen.poll() is not None or  # noqa: B023
                              file.execute(query).fetchone()[0] == 4)  # noqa: B023
            statuses = dict(file.execute("SELECT id, status FROM tasks").fetchall())
            outcome = json.loads(file.execute("SELECT outcome FROM tasks WHERE tool = 'die'").fetchone()[0])
        if heir.popen.poll() is None:
            heir.kill()
            break
        heir.wait()
        assert lives < 5, "it kills for ever"
    assert [statuses[task] for task in tasks] == ["completed"] * 3, statuses
    assert lives == 4 and outcome["error"]["code"] == -32603, (lives, outcome)
    print(f"  a tool that kills its process: {lives - 1} died, the fourth lives; {outcome['error']['message']!r}; the"
          " three tasks beside it are complete")


def subprocess_of(arguments: tuple[str, ...]) -> Process | None:
    """An instance; None if it had died before it could say where it listens."""
    with contextlib.suppress(SystemExit):
        return Process(*arguments)
    return None


def start_often(state: str, times: int, failures: "multiprocessing.Queue[str]") -> None:
    """A process that starts instances one after the other, each of which dies soon and leaves its lock file."""
    for _ in range(times):
        try:
            store = Store(state)
            path = f"{state}-instance-{store.instance}"
            time.sleep(random.uniform(0, 0.002))
            if not os.path.exists(path) or not os.path.samestat(os.stat(path), os.fstat(store.life)):
                failures.put("robbed")
            LOCKS.discard(store.life)
            os.close(store.life)
            store.life = -1
            store.close()
        except Exception as problem:
            failures.put(f"refused: {problem}")


def find_often(state: str, over: "multiprocessing.synchronize.Event") -> None:
    """A process that looks for the dead, as fast as it can."""
    store = Store(state)
    while not over.is_set():
        beside = f"{store.path}-instance-"
        with contextlib.suppress(Exception), store.transaction():
            for path in Path(state).parent.glob(f"{Path(state).name}-instance-*"):
                if str(path) != beside + store.instance:
                    store.is_dead(str(path).removeprefix(beside))
    store.close()


def start_beside_finders(folder: str, times: int) -> None:
    """So many starts of instances beside finders of free locks: none is refused, none robbed of its lock."""
    spawn = multiprocessing.get_context("spawn")
    failures, over, state = spawn.Queue(), spawn.Event(), f"{folder}/starts"
    Store(state).close()
    began = time.monotonic()
    finders = [spawn.Process(target=find_often, args=(state, over)) for _ in range(2)]
    starters = [spawn.Process(target=start_often, args=(state, times // 4, failures)) for _ in range(4)]
    for one in finders + starters:
        one.start()
    for one in starters:
        one.join()
    over.set()
    for one in finders:
        one.join()
    trouble = Counter(failures.get() for _ in range(failures.qsize()))
    assert not trouble, trouble
    print(f"  {times} starts beside two finders of locks, {time.monotonic() - began:.0f} s: none refused, none robbed")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", type=int, default=100, help="how often each walk is done (default: 100)")
    parser.add_argument("--kills", type=int, default=50, help="how often an owner is killed (default: 50)")
    parser.add_argument("--starts", type=int, default=4000, help="starts beside finders of free locks (default: 4000)")
    parser.add_argument("--suspended", type=float, default=35, help="seconds for which one stands still (default: 35)")
    parser.add_argument("--locked", type=float, default=12, help="seconds that the write lock is held (default: 12)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random steps (default: any)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        print("two instances behind a round robin:", flush=True)
        walk_all(folder, options.walks)
        print(f"  {time.monotonic() - began:.0f} s\nkills, seed {options.seed}:", flush=True)
        began = time.monotonic()
        kill_often(folder, options.kills, options.seed)
        print(f"  {time.monotonic() - began:.0f} s\nthe walks that take their time:", flush=True)
        kill_from_within(folder)
        suspend(folder, options.suspended)
        hold_the_lock(folder, options.locked)
        start_beside_finders(folder, options.starts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
