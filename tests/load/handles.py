"""Two processes on one state file: each walk a hundred times, fifty kills of the owner of ten tasks (make handles).

    python tests/load/handles.py [--walks 100] [--kills 50] [--seed N]

Prints figures; a violation is an AssertionError, and exit status 1.
"""

import argparse
import contextlib
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from processes import PATIENCE, ROOT, Process, process
from support import eventually
from walks import KNOWS_TASKS, WALKS, Client, RoundRobin, walk_changes

HERE = Path(__file__).parent
TASKS_AT_ONCE, STEPS = 10, 10
LEASE_SECONDS, STEP_SECONDS = 0.5, 0.03


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
        self.command = (str(HERE / "instance.py"), self.journal, str(LEASE_SECONDS), str(STEP_SECONDS),
                        "--rate", "0", "--state", self.state)
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
        self.instances[victim].kill()
        killed = time.monotonic()
        before = self.recorded(tasks)
        unfinished = [task for task in tasks if self.status(task) == "working"]
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
          f" {max(battle.recovery):.2f} s (lease {LEASE_SECONDS} s)")


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", type=int, default=100, help="how often each walk is done (default: 100)")
    parser.add_argument("--kills", type=int, default=50, help="how often an owner is killed (default: 50)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random steps (default: any)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        print("two instances behind a round robin:", flush=True)
        walk_all(folder, options.walks)
        print(f"  {time.monotonic() - began:.0f} s\nkills, seed {options.seed}:", flush=True)
        began = time.monotonic()
        kill_often(folder, options.kills, options.seed)
        print(f"  {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
