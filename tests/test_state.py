"""Any instance can answer, and nothing promised is lost: handles, tasks and changes on one state file."""

import contextlib
import itertools
import json
import os
import queue
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path

import pytest
from support import PATIENCE, ROOT, SERVER_MODULE, Listener, alive, call_tool, dies, eventually, respond, running, sweep
from walks import KNOWS_TASKS, WALKS, Client, RoundRobin

import reference_server
from reference_server import (
    APPLICATION_ID,
    SCHEMA_VERSION,
    HttpServer,
    Rejection,
    Server,
    Store,
    StoreBusy,
    StoreTrouble,
    demo_server,
    elicit,
    takes,
    try_lock,
)

A_DAY = 86_400
STEPS = 5


@pytest.fixture(autouse=True)
def _hasty_keeper(monkeypatch):
    """Looks ten times as often for the dead and for others' changes."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.02)


@pytest.fixture
def lines(log):
    """What is written to stderr."""
    return log


@pytest.fixture
def path(tmp_path):
    """Where the state file will be."""
    return str(tmp_path / "state")


# ---- two instances, no sticky routing ----


@pytest.mark.parametrize("name", WALKS)
@pytest.mark.parametrize("first", [0, 1])
def test_each_request_may_meet_another_instance_than_the_one_before(path, name, first):
    """MUST (Overview › Statelessness): nothing is inferred from earlier requests; a handle tells any instance."""
    with (running(demo_server(0, Store(path))) as one, running(demo_server(0, Store(path))) as two,
          RoundRobin(one.port, two.port) as robin):
        for _ in range(first):
            Client(robin.port).call("server/discover")
        WALKS[name](Client(robin.port))
    passed = robin.passed.values()
    assert len(passed) == 2 and max(passed) - min(passed) <= 1


# ---- life is a lock, and a task runs from the top ----


class Clock:
    """Stands in for `time.time`: the real time and what a test has added."""

    def __init__(self):
        self.real, self.added = reference_server.time.time, 0.0

    def __call__(self):
        return self.real() + self.added


@pytest.fixture
def clock(monkeypatch):
    """The clock of all instances."""
    clock = Clock()
    monkeypatch.setattr(reference_server.time, "time", clock)
    return clock


class Instance(Server):
    """Has a task of STEPS steps. Each puts its number into `began` and is recorded once `gate` lets it."""

    def __init__(self, path, name="count"):
        super().__init__("counting", "1.0", store=Store(path))
        self.gate, self.began, self.tail = threading.Semaphore(0), queue.SimpleQueue(), ""

        @self.tool(name, "Counts as far as it is let.", takes())
        def count(arguments, request):
            request.as_task()
            for step in range(int(request.done) + 1, STEPS + 1):
                self.began.put(step)
                assert self.gate.acquire(timeout=PATIENCE)
                request.progress(step, STEPS)
            return f"Counted to {STEPS}.{self.tail}"

        self.prompt("nothing", "Asks for nothing.")(lambda arguments, request: "Never mind.")

    def step(self):
        """The number of the next step that begins here."""
        return self.began.get(timeout=PATIENCE)

    def create(self):
        """A new task, whose first step has begun."""
        task = call_tool(self, "count", capabilities=KNOWS_TASKS)["result"]["taskId"]
        assert self.step() == 1
        return task

    def call(self, verb, task, **params):
        """The response to tasks/get, tasks/update or tasks/cancel."""
        return respond(self, f"tasks/{verb}", {"taskId": task} | params, capabilities=KNOWS_TASKS)

    def status(self, task):
        return self.call("get", task)["result"]["status"]

    def row(self, task):
        """The row as it stands."""
        return dict(self.store.read("SELECT * FROM tasks WHERE id = ?", task)[0])


@contextlib.contextmanager
def counting(path, name="count"):
    """An instance that answers; at the end its workers are let go."""
    with alive(Instance(path, name)) as instance:
        try:
            yield instance
        finally:
            for request in list(instance.tasks.running.values()):
                request.exchange.cancel("the end of the test")
            instance.gate.release(1000)


@pytest.fixture
def one(path):
    with counting(path) as instance:
        yield instance


@pytest.fixture
def two(path):
    with counting(path) as instance:
        yield instance


def finish(instance, task, *steps):
    """Lets it work to the end; these are the steps that it does."""
    instance.gate.release(STEPS)
    assert eventually(lambda: instance.status(task) == "completed")
    assert [instance.step() for _ in steps] == list(steps) and instance.began.empty()


def test_the_work_of_a_dead_instance_is_taken_up_unasked_after_its_last_recorded_step(one, two, lines):
    """Choice: a task outlives the process that has created it, whether or not anybody asks about it."""
    task = one.create()
    one.gate.release()
    assert one.step() == 2
    dies(one)
    assert two.step() == 2  # step 1 is recorded, and not repeated
    assert lines.wait_for(f"[ref] task {task} taken up after step 1 (its instance is gone)")
    finish(two, task, 3, 4, 5)
    assert two.call("get", task)["result"]["result"]["content"][0]["text"] == "Counted to 5."


def test_an_instance_that_starts_takes_up_what_a_dead_one_has_left(one, path):
    """Choice: as above, when there was no other instance at the time."""
    task = one.create()
    dies(one)
    with counting(path) as fresh:
        assert fresh.step() == 1
        finish(fresh, task, 2, 3, 4, 5)


@pytest.mark.parametrize("leap", [0, 3000, -3000])
def test_a_living_instance_keeps_its_task_however_long_it_is_silent(one, two, clock, leap):
    """Choice: an instance is dead when the kernel says so: a suspended one is not, nor is a slow disk or a clock."""
    task = one.create()
    one.stopped.set()  # its keeper hangs, as if suspended
    one.store.committed.set()
    one.keeper.join(PATIENCE)
    clock.added = leap
    for _ in range(5):
        sweep(two)
    assert one.row(task)["deaths"] == 0 and two.began.empty()
    finish(one, task, 2, 3, 4, 5)


def test_a_lock_that_another_process_holds_makes_no_instance_dead(one, two):
    """Choice: who cannot write for a while is alive all the same, and its task is not run by two."""
    task = one.create()
    with locked(one.store):
        one.gate.release()
        assert one.step() == 2
        for _ in range(5):
            sweep(two)
            sweep(one)
    for _ in range(5):
        sweep(two)
    assert two.began.empty() and one.row(task)["deaths"] == 0
    finish(one, task, 3, 4, 5)


def test_a_task_is_taken_up_by_exactly_one_of_many(path):
    """Choice: the claim is one conditional statement, so that one task stays one piece of work."""
    with contextlib.ExitStack() as stack:
        living = [stack.enter_context(counting(path)) for _ in range(4)]
        task = living[0].create()
        living[0].gate.release()
        assert living[0].step() == 2
        for step in range(2, 5):
            holder, = [one for one in living if task in one.tasks.running]
            living.remove(holder)
            dies(holder)
            assert eventually(lambda: any(task in one.tasks.running for one in living))
            for one in living:
                sweep(one)
            runner, = [one for one in living if task in one.tasks.running]
            assert runner.step() == step  # the one that no dead one has recorded
            runner.gate.release()
            assert runner.step() == step + 1
            assert all(one.began.empty() for one in living)


def test_a_worker_whose_row_was_taken_up_by_another_writes_nothing_more(one, two, path, lines):
    """Choice: each write asks for owner and run: should its lock be lost (here: removed), the work is done once."""
    task = one.create()
    one.stopped.set()  # its keeper hangs, or it might be the one that takes up the row
    one.keeper.join(PATIENCE)
    os.remove(f"{path}-instance-{one.store.instance}")  # a missing one counts as free
    assert two.step() == 1
    before = two.row(task)
    one.gate.release(STEPS)
    assert eventually(lambda: not one.tasks.running)
    assert two.row(task) == before and one.began.empty()
    assert [line for line in lines.lines() if "no longer this worker's" in line]
    finish(two, task, 2, 3, 4, 5)


def test_a_worker_of_an_earlier_run_is_a_stranger_to_its_own_instance(one, lines):
    """Choice: a task belongs to a run and not to an instance, or an old worker would write into the new one's row."""
    task = one.create()
    one.store.execute("UPDATE tasks SET owner = NULL")
    assert one.step() == 1  # the second run
    assert one.row(task)["run"] == 2
    one.gate.release(STEPS + 1)
    assert eventually(lambda: one.status(task) == "completed")
    assert eventually(lambda: not one.tasks.running)
    assert sorted(one.step() for _ in range(4)) == [2, 3, 4, 5] and one.began.empty()
    assert "(no longer this worker's)" in lines.text and "Traceback" not in lines.text


def test_an_instance_without_the_tool_leaves_the_task_to_one_that_has_it(one, path):
    """Choice: instances may differ; what one does not know is no failure of the task's."""
    task = one.create()
    with counting(path, "another") as stranger:
        dies(one)
        assert eventually(lambda: stranger.row(task)["owner"] is None)
        sweep(stranger)
        assert (stranger.row(task)["status"], stranger.row(task)["deaths"]) == ("working", 1)
        assert not stranger.tasks.running
        with counting(path) as heir:
            assert heir.step() == 1
            finish(heir, task, 2, 3, 4, 5)


def test_a_task_whose_process_died_three_times_in_a_row_has_failed(one, path):
    """Choice: a tool that kills its process would otherwise kill every instance that takes it up."""
    task = one.create()
    dies(one)
    for _ in range(2):
        with counting(path) as next_victim:
            assert next_victim.step() == 1
            dies(next_victim)
    with counting(path) as heir, Listener(heir, {"taskIds": [task]}, capabilities=KNOWS_TASKS):
        assert eventually(lambda: heir.status(task) == "failed")
        result = heir.call("get", task)["result"]
        assert result["error"] == {"code": -32603, "message": "The process that ran this has died, 3 times in a row"}
        assert heir.began.empty() and not heir.tasks.running


def test_a_tool_that_kills_its_process_does_not_kill_for_ever(path, tmp_path):
    """Choice: as above, with real processes, the innocent task beside it going on."""
    code = ("import os, sys, reference_server as r; s = r.Server('k', '1', store=r.Store(sys.argv[1]))\n"
            "s.tool('kill', '', r.takes())(lambda a, q: q.as_task() or os.kill(os.getpid(), 9))\n"
            "@s.tool('good', '', r.takes())\n"
            "def good(a, q):\n q.as_task()\n return 'good'\n"
            "s.start()\n"
            "import time, threading\n"
            "threading.Event().wait(60)")
    with alive(Instance(path)) as maker:
        for name in ("kill", "good"):
            maker.store.execute("INSERT INTO tasks (id, user, tool, created, updated, ttl_ms, request) VALUES"
                                " (?, 'u', ?, ?, 0, 60000, ?)", name, name, reference_server.time.time(),
                                json.dumps({"params": {"name": name, "arguments": {}}, "responses": {}, "state": None}))
        for _ in range(3):
            with subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT,
                                  stderr=subprocess.DEVNULL) as process:
                assert process.wait(PATIENCE) == -signal.SIGKILL
        assert eventually(lambda: maker.row("kill")["status"] == "failed")
        with subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT, stderr=subprocess.DEVNULL) as heir:
            assert eventually(lambda: maker.row("good")["status"] == "completed")
            assert heir.poll() is None
            heir.kill()


def test_rows_with_a_death_run_one_after_the_other(one, two):
    """Choice: so that the task that kills is found, and the others beside it are not taken for killers."""
    tasks = [one.create() for _ in range(3)]
    dies(one)
    assert two.step() == 1
    assert eventually(lambda: sum(two.row(task)["owner"] is None for task in tasks) == 2)
    for task in tasks:
        assert two.row(task)["deaths"] == 1
    sweep(two)
    assert two.began.empty()
    two.gate.release()  # a recorded step: this one is no killer, the next one may begin
    assert sorted([two.step(), two.step()]) == [1, 2]
    assert sum(two.row(task)["owner"] is None for task in tasks) == 1
    two.gate.release(50)
    assert eventually(lambda: all(two.status(task) == "completed" for task in tasks))


def test_a_recorded_step_ends_the_count_of_deaths(one, two):
    """Choice: a task that gets on is no killer, so that a long one may outlive many processes."""
    task = one.create()
    dies(one)
    assert two.step() == 1 and two.row(task)["deaths"] == 1
    two.gate.release()
    assert two.step() == 2 and two.row(task)["deaths"] == 0


def test_an_instance_that_ends_in_order_counts_as_no_death(path):
    """Choice: a restart, however many of them, is no fault of the task's; another instance goes on at once."""
    with counting(path) as leaving:
        task = leaving.create()
        leaving.gate.release()
        assert leaving.step() == 2
    with counting(path) as heir:
        assert heir.step() == 2
        assert heir.row(task)["deaths"] == 0
        finish(heir, task, 3, 4, 5)


def test_a_cancellation_at_one_instance_ends_the_work_at_the_other(one, two, lines):
    """SHOULD (Tasks Extension › Task Cancellation): the feed carries it to where the work is done."""
    task = one.create()
    assert two.call("cancel", task)["result"]["resultType"] == "complete"
    assert eventually(lambda: one.tasks.running[task].reason == "tasks/cancel")
    one.gate.release(STEPS)
    assert eventually(lambda: not one.tasks.running)
    assert one.status(task) == two.status(task) == "cancelled" and one.row(task)["done"] is None


def test_answers_that_come_to_both_instances_at_once_are_both_kept_and_start_one_run(one, two):
    """Choice: reading and writing the answers is one transaction, or one of two acknowledged answers would be lost."""
    runs = queue.SimpleQueue()
    for server in (one, two):
        @server.tool("ask", "Asks two questions.", takes())
        def ask(arguments, request):
            request.as_task()
            runs.put(request.id)
            question = elicit("Well?", {"answer": {"type": "string"}})
            return json.dumps(request.ask({"left": question, "right": question}))

    for _ in range(10):
        task = call_tool(one, "ask", capabilities=KNOWS_TASKS)["result"]["taskId"]
        assert eventually(lambda task=task: one.status(task) == "input_required")
        together = threading.Barrier(2)

        def answer(server, key, task=task, together=together):
            together.wait(PATIENCE)
            server.call("update", task, inputResponses={key: {"action": "accept", "content": {"answer": key}}})

        threads = [threading.Thread(target=answer, args=pair) for pair in ((one, "left"), (two, "right"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert eventually(lambda task=task: two.status(task) == "completed")
        assert json.loads(one.row(task)["answers"]).keys() == {"left", "right"}
        assert one.row(task)["run"] == 2 and [runs.get(timeout=PATIENCE) for _ in range(2)] == [task] * 2
    assert runs.empty()


def test_an_answer_to_an_instance_without_the_tool_is_taken_and_the_work_goes_on_elsewhere(one, two):
    """Choice: whoever is asked answers; the next run begins where the tool is known."""
    ran = threading.Event()

    @one.tool("ask", "Asks.", takes())
    def ask(arguments, request):
        request.as_task()
        request.ask({"q": elicit("Well?", {"answer": {"type": "string"}})})
        ran.set()
        return "answered"

    task = call_tool(one, "ask", capabilities=KNOWS_TASKS)["result"]["taskId"]
    assert eventually(lambda: one.status(task) == "input_required")
    two.call("update", task, inputResponses={"q": {"action": "decline"}})
    assert ran.wait(PATIENCE)
    assert eventually(lambda: two.status(task) == "completed")


def test_a_killed_process_loses_no_task_and_none_of_its_recorded_steps(path):
    """MUST (Tasks Extension › Task Creation): no handle is returned until the task is durably created."""
    command = [sys.executable, "-X", "dev", *SERVER_MODULE, "--port", "0", "--state", path, "--step-seconds", "0.02"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            client = Client(int(process.stderr.readline().partition("/mcp")[0].rpartition(":")[2]))
            asks_nothing = {"extensions": KNOWS_TASKS["extensions"]}
            tasks = [client.result_of("build_report", {"month": "May"}, capabilities=asks_nothing)["taskId"]
                     for _ in range(3)]
            cart = client.result_of("create_cart")["structuredContent"]["cartId"]
            assert eventually(lambda: client.task("get", tasks[0]).get("statusMessage") == "step 2 of 10")
        finally:
            process.kill()
        process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL
    store = Store(path)
    recorded = {row["id"]: row["done"] or 0 for row in store.read("SELECT * FROM tasks")}
    assert set(recorded) == set(tasks) and recorded[tasks[0]] >= 2
    store.execute("CREATE TEMP TABLE steps (id, done)")
    store.execute("CREATE TEMP TRIGGER record AFTER UPDATE OF done ON tasks WHEN NEW.done IS NOT OLD.done"
                  " BEGIN INSERT INTO steps VALUES (NEW.id, NEW.done); END")
    with alive(demo_server(0, store)) as other:  # takes them up unasked
        finished = "SELECT count(*) AS count FROM tasks WHERE status = 'completed'"
        assert eventually(lambda: other.store.read(finished)[0]["count"] == 3)
        for task in tasks:
            steps = [row["done"] for row in other.store.execute("SELECT done FROM steps WHERE id = ?", task)]
            assert steps == list(range(int(recorded[task]) + 1, 11))
        assert "result" in call_tool(other, "add_to_cart", {"cartId": cart, "sku": "pen"})


# ---- the lock itself ----


def lock_files(path):
    return sorted(name.name for name in Path(path).parent.iterdir() if "-instance-" in name.name)


def test_each_instance_has_a_lock_of_its_own_and_a_start_removes_those_of_the_dead(path):
    """Choice: a file beside the state file; the kernel lets its lock go, however a process dies."""
    with contextlib.closing(Store(path)) as one, contextlib.closing(Store(path)) as two:
        assert lock_files(path) == sorted(f"state-instance-{store.instance}" for store in (one, two))
        with two.transaction():
            assert not two.is_dead(one.instance)
            assert two.is_dead("never was")
    with contextlib.closing(Store(path)) as third:
        assert lock_files(path) == [f"state-instance-{third.instance}"]


def test_a_start_removes_locks_alone(path):
    """Choice: a copy that somebody has made, or a state file with such a name, is nobody's lock."""
    kept = [f"state-instance-{name}" for name in ("0123456789abcdef.bak", "mine")]
    for name in kept:
        Path(path).with_name(name).touch()
    with contextlib.closing(Store(path)) as store:
        assert lock_files(path) == sorted([*kept, f"state-instance-{store.instance}"])


def test_a_task_that_cannot_be_looked_at_before_it_begins_runs_all_the_same(path, monkeypatch, lines):
    """Choice: the first look is a courtesy; the row is this instance's, and nobody else would take it up."""
    with counting(path) as one:
        read, failures = one.store.read, iter([StoreBusy("database is locked")])

        def read_or_fail(statement, *values):
            if statement.startswith("SELECT status, owner, run") and (failure := next(failures, None)):
                raise failure
            return read(statement, *values)

        monkeypatch.setattr(one.store, "read", read_or_fail)
        task = one.create()
        assert next(failures, None) is None  # it has failed
        assert lines.wait_for(f"[ref] task {task} begins without a look at its row: database is locked")
        for _ in range(STEPS):
            one.gate.release()
        assert eventually(lambda: one.status(task) == "completed")


def test_instances_that_name_the_file_differently_find_each_others_locks(tmp_path):
    """Choice: the path is resolved first, or a link would have every instance take the others for dead."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "state")
    with (contextlib.closing(Store(str(tmp_path / "folder" / "state"))) as one,
          contextlib.closing(Store(str(tmp_path / "link"))) as two, two.transaction()):
        assert not two.is_dead(one.instance)


def test_a_child_process_that_lives_on_does_not_hold_the_lock(path):
    """Choice: a forked child has its parent's files open, and would make a dead parent look alive."""
    code = (f"import os, reference_server as r; s = r.Store({path!r}); print(s.instance, flush=True)\n"
            "if os.fork():\n os.kill(os.getpid(), 9)\n"
            "print(flush=True)\nos.read(0, 1)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:
        instance = process.stdout.readline().strip()
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert process.stdout.readline() == "\n"  # the child lives
        with contextlib.closing(Store(path)) as store, store.transaction():
            assert store.is_dead(instance)
        process.stdin.close()


def test_where_there_is_no_flock_a_byte_of_the_file_is_locked(monkeypatch, tmp_path):
    """Choice: on Windows msvcrt locks, in the one place that knows the difference."""
    calls = []

    def locking(descriptor, mode, count):
        if calls:
            raise PermissionError
        calls.append((descriptor, mode, count))

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2))
    with open(tmp_path / "lock", "w") as file:
        monkeypatch.setattr(sys, "platform", "win32")
        assert try_lock(file.fileno()) is True
        assert try_lock(file.fileno()) is False
        assert calls == [(file.fileno(), 2, 1)]
        monkeypatch.undo()


def test_a_worker_that_does_not_stop_keeps_the_lock_beyond_the_end(path):
    """Choice: no two living workers: while a thread still works, the process lives, whatever has been closed."""
    store = Store(path)
    store.running["task"] = None  # a run that does not end
    store.close()
    with contextlib.closing(Store(path)) as other, other.transaction():
        assert not other.is_dead(store.instance)
    os.close(store.life)
    reference_server.LOCKS.discard(store.life)


# ---- what is forgotten ----


def test_an_expired_task_is_purged_and_its_worker_is_told(one, two, clock, lines):
    """MAY (Tasks Extension › Tasks): the server may discard the task after its ttl has elapsed."""
    task = one.create()
    clock.added = one.row(task)["ttl_ms"] / 1000 - 10
    sweep(two)
    assert one.status(task) == "working"
    clock.added += 20
    assert eventually(lambda: "error" in two.call("get", task))
    assert two.call("get", task)["error"]["code"] == -32602
    one.gate.release(STEPS)
    assert eventually(lambda: not one.tasks.running)
    assert [line for line in lines.lines() if line.endswith("(expired)")]
    assert two.store.read("SELECT * FROM tasks") == []


def test_who_listens_for_a_task_hears_that_it_has_expired(one, two, clock):
    """MAY (Tasks Extension › Task Polling): marked as failed after its TTL, and then deleted."""
    task = one.create()
    with Listener(two, {"taskIds": [task]}, capabilities=KNOWS_TASKS) as listener:
        assert listener.first["params"]["notifications"] == {"taskIds": [task]}
        clock.added = one.row(task)["ttl_ms"] / 1000 + 1
        last = listener.next()["params"]
        assert (last["taskId"], last["status"]) == (task, "failed")
        assert last["error"] == {"code": -32603, "message": "The task has expired"}


def test_a_task_that_is_finished_is_kept_until_it_expires(one, clock):
    """MAY (Tasks Extension › Tasks): not before its ttl has elapsed may the server discard a task."""
    task = one.create()
    finish(one, task, 2, 3, 4, 5)
    clock.added = one.row(task)["ttl_ms"] / 1000 - 10
    sweep(one)
    assert one.status(task) == "completed"
    clock.added += 20
    assert eventually(lambda: "error" in one.call("get", task))


def test_a_handle_is_forgotten_a_day_after_its_last_use(clock, path):
    """Choice: 24 hours after the last use, because that is what the tools' descriptions promise."""
    with contextlib.closing(Store(path)) as store:  # without a keeper, so that the test alone looks at the clock
        shop = demo_server(0, store)
        used, unused = (call_tool(shop, "create_cart")["result"]["structuredContent"]["cartId"] for _ in range(2))
        for _ in range(3):
            clock.added += A_DAY / 2
            store.purge()
            assert not call_tool(shop, "add_to_cart", {"cartId": used, "sku": "pen"})["result"].get("isError")
        assert call_tool(shop, "add_to_cart", {"cartId": unused, "sku": "pen"})["result"]["isError"]
        clock.added += A_DAY + 1
        store.purge()
        assert store.read("SELECT * FROM handles") == []


def test_changes_are_forgotten_by_their_number(monkeypatch, clock):
    """Choice: no clock decides how many changes an instance may be behind; the last ones are always there."""
    monkeypatch.setattr(reference_server, "MAX_CHANGES", 3)
    with contextlib.closing(Store()) as store:
        for number in range(1, 6):
            clock.added += 1e6
            store.tell("tools")
            kept = [row["number"] for row in store.read("SELECT number FROM changes ORDER BY number")]
            assert kept == list(range(max(1, number - 2), number + 1))


# ---- one user keeps a bounded amount, and nothing costs more because more is kept ----


def test_one_user_keeps_a_bounded_number_of_handles_and_the_model_is_told(monkeypatch):
    """Choice: beyond MAX_KEPT a tool error that a model can act on; other users do not notice."""
    monkeypatch.setattr(reference_server, "MAX_KEPT", 3)
    with contextlib.closing(Store()) as store:
        shop = demo_server(0, store)
        for _ in range(3):
            call_tool(shop, "place_hold", {"title": "Emma"}, "alice")
        for tool, arguments in (("create_cart", {}), ("place_hold", {"title": "Emma"})):
            result = call_tool(shop, tool, arguments, "alice")["result"]
            assert result["isError"] and "no room for more" in result["content"][0]["text"]
        assert len(store.read("SELECT * FROM handles")) == 3
        assert not call_tool(shop, "create_cart", {}, "bob")["result"].get("isError")


def test_one_user_keeps_a_bounded_number_of_octets_and_the_model_is_told(monkeypatch):
    """Choice: octets, not characters; what goes beyond leaves a cart as it was."""
    monkeypatch.setattr(reference_server, "MAX_KEPT_OCTETS", 4000)
    with contextlib.closing(Store()) as store:
        shop = demo_server(0, store)
        cart = call_tool(shop, "create_cart")["result"]["structuredContent"]["cartId"]
        add = {"cartId": cart, "sku": "\u20ac" * 500}  # as JSON six octets each
        assert not call_tool(shop, "add_to_cart", add)["result"].get("isError")
        refused = call_tool(shop, "add_to_cart", add)["result"]
        assert refused["isError"] and "no room for more" in refused["content"][0]["text"]
        assert call_tool(shop, "place_hold", {"title": "x" * 2000})["result"]["isError"]
        items = call_tool(shop, "add_to_cart", add | {"sku": "pen"})["result"]["structuredContent"]["items"]
        assert items == [add["sku"], "pen"]


def statements(server):
    """What the server executes while everything that it keeps is used and swept once; each with its values."""
    seen, run = {}, Store.run

    def noting(store, db, statement, *values, **more):
        seen[statement] = values
        return run(store, db, statement, *values, **more)

    server.store.run = types.MethodType(noting, server.store)
    cart = call_tool(server, "create_cart")["result"]["structuredContent"]["cartId"]
    call_tool(server, "add_to_cart", {"cartId": cart, "sku": "pen"})
    respond(server, "tools/list")
    call_tool(server, "toggle_beta_tool")
    call_tool(server, "touch_config")
    respond(server, "resources/read", {"uri": "file:///project/config.json"})
    task = call_tool(server, "build_report", {"month": "May"}, capabilities=KNOWS_TASKS)["result"]["taskId"]
    with Listener(server, {"taskIds": [task], "toolsListChanged": True}, capabilities=KNOWS_TASKS):
        def get():
            return respond(server, "tasks/get", {"taskId": task}, capabilities=KNOWS_TASKS)["result"]["status"]

        assert eventually(lambda: get() == "input_required")
        answers = {"taskId": task, "inputResponses": {"charts": {"action": "decline"}}}
        respond(server, "tasks/update", answers, capabilities=KNOWS_TASKS)
        assert eventually(lambda: get() == "completed")
        respond(server, "tasks/cancel", {"taskId": task}, capabilities=KNOWS_TASKS)
    long_ago, other = (1, "alice"), "nobody"
    server.store.execute("INSERT INTO tasks (id, user, tool, created, ttl_ms, request, owner) VALUES"
                         " ('a', ?, 'build_report', 9e9, 1, '{\"params\":{\"name\":\"build_report\",\"arguments\":"
                         "{\"month\":\"May\"}},\"responses\":{},\"state\":null}', ?)", long_ago[1], other)
    assert eventually(lambda: server.store.read("SELECT status FROM tasks WHERE id = 'a'")[0]["status"] == "completed")
    server.store.execute("UPDATE tasks SET created = 0")
    server.store.execute("UPDATE handles SET used = 0")
    assert eventually(lambda: not server.store.read("SELECT 1 FROM tasks UNION SELECT 1 FROM handles"))
    return seen


def test_every_look_up_and_every_sweep_uses_an_index(path):
    """Choice: nothing costs more because more is kept: no statement of the server's reads through a table."""
    with alive(demo_server(0, Store(path))) as server:
        used = statements(server)
        used = {one: values for one, values in used.items() if re.match("SELECT|UPDATE|DELETE|INSERT", one)}
        mine = {one: values for one, values in used.items()
                if one not in ("UPDATE tasks SET created = 0", "UPDATE handles SET used = 0")
                and "UNION" not in one and "sqlite_master" not in one}
        assert len(mine) > 25
        scans = {}
        for statement, values in mine.items():
            plan = [row["detail"] for row in server.store.read(f"EXPLAIN QUERY PLAN {statement}", *values)]
            if any("SCAN" in line and "json_each" not in line and "CONSTANT" not in line for line in plan):
                scans[statement] = plan
        assert scans == {}
        assert "SCAN tasks" in server.store.read("EXPLAIN QUERY PLAN SELECT * FROM tasks WHERE message = 'x'")[0][3]


def test_an_idle_instance_writes_nothing(path, monkeypatch):
    """Choice: with tasks that wait, tasks that have ended and handles kept; beside another instance, too."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.001)
    with counting(path) as one, counting(path) as two, contextlib.closing(sqlite3.connect(path)) as witness:
        for name in ("left", "right"):
            one.tool(name, "Asks.", takes())(
                lambda arguments, request: request.as_task() or request.ask({"q": elicit("?", {})}))
            task = call_tool(one, name, capabilities=KNOWS_TASKS)["result"]["taskId"]
            assert eventually(lambda task=task: one.status(task) == "input_required")
        task = one.create()  # and one that is running: the other instance looks whether this one lives
        looks = itertools.count()
        give_up_dead = two.tasks.give_up_dead
        monkeypatch.setattr(two.tasks, "give_up_dead", lambda: (next(looks), give_up_dead()))
        before = witness.execute("PRAGMA data_version").fetchone()
        assert eventually(lambda: next(looks) > 200)
        assert witness.execute("PRAGMA data_version").fetchone() == before
        one.gate.release()
        assert one.step() == 2
        assert witness.execute("PRAGMA data_version").fetchone() != before


def test_a_task_that_waits_for_an_answer_takes_no_thread():
    """Choice: the function has unwound, and runs again from the top when the answer comes."""
    with alive(Server("asking", "1")) as server:
        server.tool("ask", "Asks.", takes())(
            lambda arguments, request: request.as_task() or str(request.ask({"q": elicit("?", {})})))
        for _ in range(50):
            call_tool(server, "ask", capabilities=KNOWS_TASKS)
        waiting = "SELECT count(*) FROM tasks WHERE status = 'input_required'"
        assert eventually(lambda: server.store.read(waiting)[0][0] == 50)
        assert eventually(lambda: not [one for one in threading.enumerate() if one.name == "task worker"])


# ---- a state file that cannot be used: at the start ----


def start_up(monkeypatch, capsys, path):
    """The exit status and stderr of the command line; 0 if it would serve."""
    opened, connect = [], sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *path, **more: opened.append(connect(*path, **more)) or opened[-1])
        patch.setattr(HttpServer, "serve_forever", HttpServer.server_close)
        patch.setattr(sys, "argv", ["reference_server.py", "--port", "0", "--state", str(path)])
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(reference_server, "raise_descriptor_limit", lambda: None)
        status = reference_server.main()
    for one in opened:  # as the end of the process does
        one.close()
    return status, capsys.readouterr().err


def check_refusal(outcome, path, reason):
    """Status 1, and one clear line."""
    status, text = outcome
    assert status == 1
    assert text == f"reference_server: cannot use {path}: {reason}\n"


def make_state(path):
    """A state file of ours, with a cart in it."""
    store = Store(str(path))
    store.new_handle("cart", "alice", ["x" * 8000] * 4)
    store.close()
    return path.read_bytes()


def made_by(version):
    def make(path):
        make_state(path)
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(f"PRAGMA user_version = {version}")

    return make


ANOTHER = (f"it was made by another version of this program (its format is {{}}, and here {SCHEMA_VERSION}); take a new"
           " file")


def text_file(path):
    path.write_text("Dear diary, today I was mistaken for a state file.\n" * 40)


def sqlite_file(path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE cookies (name TEXT)")


def wiped_file(path):
    octets = make_state(path)
    path.write_bytes(octets[:100] + bytes(len(octets) - 100))


def cut_file(path):
    path.write_bytes(make_state(path)[:5000])


@pytest.mark.parametrize("make, reason", [
    (text_file, "file is not a database"),
    (sqlite_file, "it belongs to another program"),
    (wiped_file, "database disk image is malformed"),
    (cut_file, "database disk image is malformed"),
    (made_by(0), ANOTHER.format(0)),
    (made_by(SCHEMA_VERSION + 1), ANOTHER.format(SCHEMA_VERSION + 1)),
    (Path.mkdir, "unable to open database file"),
    (lambda path: path.parent.rmdir(), "unable to open database file")],
    ids=["text", "foreign", "wiped", "cut", "older", "newer", "folder", "nowhere"])
def test_what_is_no_state_file_is_refused_in_one_line_and_left_alone(monkeypatch, capsys, tmp_path, make, reason):
    """Choice: exit status 1 and one line that names the file; no operator reads a traceback, no file is harmed."""
    path = tmp_path / "folder" / "state"
    path.parent.mkdir()
    make(path)
    before = path.read_bytes() if path.is_file() else None
    check_refusal(start_up(monkeypatch, capsys, path), path, reason)
    assert before is None or path.read_bytes() == before


def test_a_damaged_page_that_is_only_read_later_is_one_line_too(monkeypatch, capsys, tmp_path):
    """Choice: all of start-up that uses the state is in one try, or a later statement would show a traceback."""
    path = tmp_path / "state"
    make_state(path)
    with contextlib.closing(sqlite3.connect(path)) as db:
        page, = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'changes'").fetchone()
        size, = db.execute("PRAGMA page_size").fetchone()
    octets = bytearray(path.read_bytes())
    octets[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(octets)
    check_refusal(start_up(monkeypatch, capsys, path), path, "database disk image is malformed")


def test_a_file_that_may_not_be_written_is_refused_in_one_line(monkeypatch, capsys):
    """Choice: a server that could promise nothing does not start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        make_state(path)
        path.chmod(0o444)
        os.chmod(folder, 0o555)
        before, user = path.read_bytes(), os.geteuid()
        if user == 0:  # to root nothing is read-only
            os.seteuid(65534)
        try:
            check_refusal(start_up(monkeypatch, capsys, path), path, "attempt to write a readonly database")
        finally:
            os.seteuid(user)
            os.chmod(folder, 0o755)
        assert path.read_bytes() == before


def test_a_file_that_another_process_keeps_locked_is_refused_in_one_line(monkeypatch, capsys, tmp_path):
    """Choice: after five seconds (none here) a lock is no busy moment of another instance any more."""
    path = tmp_path / "state"
    make_state(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other, monkeypatch.context() as patch:
        patch.setattr(reference_server, "WRITE_SECONDS", 0.01)
        other.execute("BEGIN IMMEDIATE")
        check_refusal(start_up(monkeypatch, capsys, path), path, "database is locked")
        other.execute("ROLLBACK")
    assert start_up(monkeypatch, capsys, path)[0] == 0


@contextlib.contextmanager
def file_size_limit(octets):
    """No file of this process may grow beyond; Python ignores SIGXFSZ, so that a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("octets", [1000, 10_000, 20_000, 40_000, 60_000])
def test_a_full_disk_at_the_start_is_one_line(monkeypatch, capsys, tmp_path, octets):
    """Choice: wherever in start-up it happens, one line and exit status 1; nothing has been promised yet."""
    path = tmp_path / "state"
    with file_size_limit(octets):
        status, text = start_up(monkeypatch, capsys, path)
    assert status in (0, 1)
    assert text.count("\n") == 1 and (status == 0) == text.startswith("[ref] MCP "), text
    assert status == 0 or text.startswith(f"reference_server: cannot use {path}: "), text
    assert octets > 20_000 or status == 1
    assert start_up(monkeypatch, capsys, path)[0] == 0  # with room on the disk, what is there does no harm


def test_many_instances_may_start_on_a_new_file_at_the_same_moment(tmp_path):
    """Choice: the first makes tables and key in one transaction, so that the others never see half of them."""
    for number in range(5):
        together = threading.Barrier(6)
        secrets = queue.SimpleQueue()

        def start(path=str(tmp_path / f"state{number}"), together=together, secrets=secrets):
            together.wait(PATIENCE)
            store = Store(path)
            demo_server(0, store)
            secrets.put(store.secret)
            store.close()

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert len({secrets.get(timeout=PATIENCE) for _ in threads}) == 1
        for thread in threads:
            thread.join(PATIENCE)


def test_many_processes_may_start_on_a_new_file_at_the_same_moment(tmp_path):
    """Choice: as above, for what only processes have: file locks of their own."""
    code = ("import sys, reference_server as r; print('ready', flush=True); sys.stdin.readline();"
            f" s = r.Store({str(tmp_path / 'state')!r}); r.demo_server(0, s); print(s.secret.hex()); s.close()")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True)) for _ in range(4)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=PATIENCE) for process in processes]
    assert [text for _, text in answers] == [""] * 4
    assert len({secret for secret, _ in answers}) == 1


def test_a_state_file_is_recognised_and_says_whose_it_is(tmp_path):
    """Choice: SQLite's application id, which `file` and other programs can read."""
    make_state(tmp_path / "state")
    with contextlib.closing(sqlite3.connect(tmp_path / "state")) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# ---- a state file that cannot be used: while the server runs ----


def on(store, statement):
    """A statement on the connection that writes, outside of any transaction."""
    with store.lock:
        return store.db.execute(statement).fetchall()


@contextlib.contextmanager
def locked(store):
    """Another process has a transaction open, and nobody waits for it."""
    with (contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other,
          pytest.MonkeyPatch.context() as patch):
        patch.setattr(reference_server, "WRITE_SECONDS", 0.01)
        other.execute("PRAGMA busy_timeout = 10000")
        other.execute("BEGIN IMMEDIATE")
        yield "database is locked"
        other.execute("ROLLBACK")


@contextlib.contextmanager
def full(store):
    """The file may not grow any more."""
    limit = on(store, "PRAGMA max_page_count")[0][0]
    on(store, "PRAGMA max_page_count = 1")  # SQLite makes it the present number of pages
    yield "database or disk is full"
    on(store, f"PRAGMA max_page_count = {limit}")


@contextlib.contextmanager
def failing(store):
    """Each write to the log that SQLite keeps beside the file fails."""
    with file_size_limit(os.path.getsize(store.path + "-wal")):
        yield "disk I/O error"


@contextlib.contextmanager
def read_only(store):
    """The file system has become read-only."""
    on(store, "PRAGMA query_only = 1")
    yield "attempt to write a readonly database"
    on(store, "PRAGMA query_only = 0")


TROUBLES = pytest.mark.parametrize("trouble", [locked, full, failing, read_only])


@TROUBLES
def test_a_running_server_says_that_it_cannot_reach_its_state_and_goes_on(path, lines, trouble):
    """Choice: -32603 to the client, one line with the cause to the operator; what was acknowledged is kept."""
    with running(demo_server(0, Store(path))) as server:
        client, store = Client(server.port), server.server.store
        carts = [client.result_of("create_cart")["structuredContent"]["cartId"] for _ in range(2)]
        with trouble(store) as cause:
            refused = None
            for _ in range(500):  # a page or two may still have room
                response = client.call_tool("create_cart")
                if "error" in response:
                    refused = response["error"]
                    break
                carts.append(response["result"]["structuredContent"]["cartId"])
            assert refused == {"code": -32603, "message": "The server cannot reach its state at the moment"}
            assert [line for line in lines.lines() if not line.startswith("[ref] tools/call ")] == [
                f"[ref] the state cannot be used: {cause}"]
            client.result_of("get_weather", {"location": "Oslo"})
        for cart in carts:
            client.result_of("add_to_cart", {"cartId": cart, "sku": "pen"})
        assert "Traceback" not in lines.text
    with contextlib.closing(Store(path)) as after:
        kept = {row["id"]: json.loads(row["value"]) for row in after.read("SELECT * FROM handles")}
        assert kept == {cart: ["pen"] for cart in carts}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with a megabyte of room; needs root on Linux."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if not sys.platform.startswith("linux") or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True, timeout=PATIENCE)


def fill(disk):
    """A file that takes all the room that is left."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return ballast


def test_a_disk_that_is_really_full_costs_nothing_that_was_acknowledged(small_disk, monkeypatch, capsys):
    """Choice: as above, on a real file system: refused while there is no room, and served again when there is."""
    state = small_disk / "state"
    with alive(demo_server(0, Store(str(state)))) as shop:
        carts = [call_tool(shop, "create_cart")["result"]["structuredContent"]["cartId"]]
        ballast = fill(small_disk)
        for _ in range(500):  # a page or two may still have room
            response = call_tool(shop, "create_cart")
            if "error" in response:
                break
            carts.append(response["result"]["structuredContent"]["cartId"])
        assert response["error"]["code"] == -32603
        text = capsys.readouterr().err
        assert "[ref] the state cannot be used: database or disk is full\n" in text and "Traceback" not in text
        ballast.unlink()
        for cart in carts:
            assert not call_tool(shop, "add_to_cart", {"cartId": cart, "sku": "pen"})["result"].get("isError")
    assert "Traceback" not in capsys.readouterr().err
    ballast = fill(small_disk)
    other = small_disk / "other"
    check_refusal(start_up(monkeypatch, capsys, other), other, "database or disk is full")
    ballast.unlink()
    with contextlib.closing(Store(str(state))) as after:
        assert {row["id"] for row in after.read("SELECT * FROM handles")} == set(carts)


def test_nothing_that_only_reads_waits_for_another_processs_write(one, two, path):
    """Choice: reading has a connection of its own, so lists and polls are answered while somebody holds the lock."""
    task, finished = one.create(), two.create()
    finish(two, finished, 2, 3, 4, 5)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA busy_timeout = 10000")
        other.execute("BEGIN EXCLUSIVE")
        waiting = threading.Thread(target=call_tool, args=(one, "count"), kwargs={"capabilities": KNOWS_TASKS})
        waiting.start()  # a write that waits, in the same process
        for _ in range(20):
            assert one.status(task) == two.status(task) == "working"
            assert one.status(finished) == "completed"
            with Listener(one, {"taskIds": [task], "promptsListChanged": True}, capabilities=KNOWS_TASKS) as listener:
                assert listener.first["params"]["notifications"]["taskIds"] == [task]
        assert waiting.is_alive() and other.in_transaction  # all of that came while the lock was held
        other.execute("ROLLBACK")
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_write_waits_for_others_of_its_own_process_too_but_not_for_ever(monkeypatch, path):
    """Choice: WRITE_SECONDS from the call on, whoever it is that writes; then an exception of the store's own."""
    monkeypatch.setattr(reference_server, "WRITE_SECONDS", 0.05)
    with contextlib.closing(Store(path)) as store:
        problems, begun = [], threading.Event()

        def write():
            begun.set()
            try:
                store.new_handle("cart", "alice", [])
            except StoreTrouble as problem:
                problems.append(problem)

        with store.transaction():
            thread = threading.Thread(target=write)
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert [str(one) for one in problems] == ["database is locked"] and isinstance(problems[0], StoreBusy)
        monkeypatch.setattr(reference_server, "WRITE_SECONDS", PATIENCE)
        with store.transaction():
            begun.clear()
            thread = threading.Thread(target=write)
            thread.start()
            assert begun.wait(PATIENCE)
        thread.join(PATIENCE)
        assert len(problems) == 1 and len(store.read("SELECT * FROM handles")) == 1


def test_the_keepers_writes_do_not_wait_at_all(one, two, path, lines, monkeypatch):
    """Choice: the keeper has more to do than to wait; it tries again, and says nothing of a moment's delay."""
    task = one.create()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA busy_timeout = 10000")
        other.execute("BEGIN IMMEDIATE")
        dies(one)
        with pytest.raises(StoreBusy):
            two.tasks.give_up_dead()
        looks, purge = itertools.count(), two.store.purge
        monkeypatch.setattr(two.store, "purge", lambda: (next(looks), purge()))
        assert eventually(lambda: next(looks) > 200)  # nothing of what it does holds it up
        assert two.keeper.is_alive() and two.began.empty()
        other.execute("ROLLBACK")
    assert two.step() == 1
    assert "cannot be used" not in lines.text
    finish(two, task, 2, 3, 4, 5)


def test_a_process_whose_write_waits_ends_when_it_is_asked_to(path):
    """Choice: no end waits for another process: within three seconds here, though a write would wait for five."""
    command = [sys.executable, "-X", "dev", *SERVER_MODULE, "--port", "0", "--state", path]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        port = int(process.stderr.readline().partition("/mcp")[0].rpartition(":")[2])
        task = Client(port).result_of("build_report", {"month": "May"}, capabilities=KNOWS_TASKS)["taskId"]
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA busy_timeout = 10000")
            other.execute("BEGIN EXCLUSIVE")
            writer = threading.Thread(target=try_to_write, args=(port,))
            writer.start()
            assert Client(port).task("get", task)["status"] == "working"
            process.terminate()
            assert process.wait(3) == 0
            other.execute("ROLLBACK")
        writer.join(PATIENCE)
        assert "Traceback" not in process.stderr.read()


def try_to_write(port):
    with contextlib.suppress(Exception):  # the server goes away under it
        Client(port).call_tool("create_cart")


@TROUBLES
def test_an_answer_to_a_task_is_taken_whole_or_refused(path, lines, trouble):
    """Choice: tasks/update is one transaction: a failing write leaves neither half an answer nor an open one."""
    with running(demo_server(0, Store(path))) as server:
        client, store = Client(server.port), server.server.store
        task = client.result_of("build_report", {"month": "May"}, capabilities=KNOWS_TASKS)["taskId"]
        assert client.becomes(task, "input_required")
        charts = {"action": "accept", "content": {"charts": True}, "note": "x" * 90_000}
        update = {"taskId": task, "inputResponses": {"charts": charts}}
        with trouble(store) as cause:
            response = client.call("tasks/update", update, capabilities=KNOWS_TASKS)
            assert response["error"]["code"] == -32603, response
            assert f"[ref] the state cannot be used: {cause}" in lines.lines()
            assert not store.db.in_transaction
            assert client.task("get", task)["status"] == "input_required"
        client.call("tasks/update", update, capabilities=KNOWS_TASKS)
        assert client.becomes(task, "completed")
        assert client.task("get", task)["result"]["content"][0]["text"].endswith("with charts.")
        assert "Traceback" not in lines.text


@pytest.mark.parametrize("trouble", [locked, full])
def test_a_step_that_cannot_be_written_is_dropped_and_an_outcome_is_written_later(one, lines, trouble):
    """Choice: trouble with the state is no failure of the tool's: it goes on, and how it ended is written in time."""
    task, one.tail = one.create(), "." * 50_000
    one.gate.release()
    assert one.step() == 2
    with trouble(one.store) as cause:
        with pytest.raises(StoreTrouble):
            for _ in range(500):  # a page or two may still have room
                one.store.execute("INSERT INTO settings VALUES (?, 'x')", os.urandom(500).hex())
        one.gate.release(STEPS)
        assert [one.step() for _ in range(3)] == [3, 4, 5]
        assert eventually(lambda: f"how task {task} has ended is not written yet: {cause}" in lines.text)
        assert one.row(task)["status"] == "working" and task in one.tasks.running
    assert eventually(lambda: one.status(task) == "completed")
    assert "is not recorded" in lines.text or trouble is full
    assert "Traceback" not in lines.text
    assert one.row(task)["run"] == 1


@TROUBLES
def test_start_and_stop_do_not_fail_when_the_state_cannot_be_used(one, two, path, lines, trouble):
    """Choice: a server ends with status 0 when it is asked to; the kernel lets its lock go in any case."""
    one.create()
    dies(one)
    assert two.step() == 1
    instance = Instance(path)
    with trouble(instance.store):
        instance.start()
        instance.stop()
    instance.store.close()
    with trouble(two.store):
        two.stop()
    assert "Traceback" not in lines.text


@TROUBLES
def test_a_keeper_that_cannot_do_its_work_says_so_once_and_goes_on(monkeypatch, path, lines, trouble):
    """Choice: one line for each thing that it cannot do, when that begins; more of them would hide everything else."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.001)
    looks = itertools.count()
    with alive(Instance(path)) as instance:
        purge = instance.store.purge
        monkeypatch.setattr(instance.store, "purge", lambda: (next(looks), purge()))
        instance.store.execute("INSERT INTO handles VALUES ('old', 'cart', 'alice', 0, ?)", "x" * 1000)
        instance.store.execute("INSERT INTO tasks (id, created, ttl_ms, request) VALUES ('old', 0, 1, ?)", "x" * 9000)
        assert eventually(lambda: not instance.store.read("SELECT 1 FROM tasks UNION SELECT 1 FROM handles"))
        with trouble(instance.store) as cause:
            before = next(looks)
            assert eventually(lambda: next(looks) > before + 100)
        said = [line for line in lines.lines() if line == f"[ref] the state cannot be used: {cause}"]
        assert len(said) <= 2
        assert lines.text.count("\n") == len(said)
        other = Instance(path)
        with Listener(instance, {"toolsListChanged": True}) as listener:  # and it still keeps
            other.list_changed("tools")
            assert listener.next()["method"] == "notifications/tools/list_changed"
        other.store.close()


@pytest.mark.parametrize("problem", [ValueError("a fault"), SystemExit(3), KeyboardInterrupt(), StoreTrouble("gone"),
                                     reference_server.Cancelled("?"), MemoryError()])
@pytest.mark.parametrize("duty", ["deliver", "take_up", "give_up_dead", "expire"])
def test_the_keeper_survives_every_exception(monkeypatch, lines, problem, duty):
    """Choice: a server whose keeper is dead says 200 and keeps no promise; the other duties are done, too."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.001)
    failures = itertools.count()

    def fail():
        next(failures)
        raise problem

    server = Server("s", "1")
    server.tool("t", "", takes())(lambda arguments, request: "")
    owner = server.subscriptions if duty == "deliver" else server.tasks
    with alive(server):
        original = getattr(owner, duty)
        monkeypatch.setattr(owner, duty, fail)
        server.store.tell("tools")
        assert eventually(lambda: next(failures) > 10)
        assert eventually(lambda: type(problem).__name__ in lines.text or str(problem) in lines.text)
        monkeypatch.setattr(owner, duty, original)
        with Listener(server, {"toolsListChanged": True}) as listener:
            server.list_changed("tools")
            assert listener.next()["method"] == "notifications/tools/list_changed"
        assert lines.text.count("Traceback") <= 1


# ---- the file itself ----


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277])
def test_nobody_else_can_read_what_is_kept_whatever_the_umask(path, umask):
    """Choice: mode 0600 for the state file and all that is made beside it; it holds the key that signs."""
    before = os.umask(umask)
    try:
        with contextlib.closing(Store(path)) as store:
            store.new_handle("cart", "alice", [])
            files = Path(path).parent.iterdir()
            modes = {file.name.removeprefix("state"): file.stat().st_mode & 0o777 for file in files}
    finally:
        os.umask(before)
    assert modes.keys() == {"", "-wal", "-shm", f"-instance-{store.instance}"}
    own_lock = modes.pop(f"-instance-{store.instance}")
    assert set(modes.values()) == {0o600} and own_lock & 0o177 == 0


def remove(path):
    path.unlink()


def replace(path):
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").replace(path)


@pytest.mark.parametrize("change", [remove, replace])
def test_a_state_file_that_is_deleted_or_replaced_under_a_server_has_its_line(monkeypatch, path, lines, change):
    """Choice: SQLite goes on with the file that has no name any more, and all that it keeps would be lost unnoticed."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.01)
    with alive(Instance(path)):
        change(Path(path))
        line = f"[ref] {path} has been deleted or replaced: what is kept from now on will be lost"
        assert lines.wait_for(line)
    assert lines.lines().count(line) == 1


def test_a_tools_own_trouble_with_sqlite_is_the_tools(lines):
    """Choice: the store has an exception of its own, so that a tool's database is not taken for the state."""
    with alive(Server("s", "1")) as server:
        @server.tool("own", "Has a database.", takes())
        def own(arguments, request):
            raise sqlite3.OperationalError("no such table: mine")

        assert call_tool(server, "own")["error"] == {"code": -32603, "message": "Internal error"}
        assert "no such table: mine" in lines.text and "the state cannot be used" not in lines.text


def test_a_value_that_cannot_be_kept_is_the_callers_fault_until_the_store_is_closed():
    """Choice: what SQLite has no type for is no trouble with the state; using it after its end is."""
    store = Store()
    with pytest.raises(sqlite3.ProgrammingError):
        store.execute("INSERT INTO settings VALUES (?, ?)", object(), 1)
    store.execute("INSERT INTO settings VALUES ('after', 'it goes on')")
    store.close()
    with pytest.raises(StoreTrouble):
        store.read("SELECT * FROM settings")
    with pytest.raises(StoreTrouble):
        store.execute("DELETE FROM settings")


def test_a_transaction_takes_effect_whole_or_not_at_all_and_only_then_wakes_the_keeper(path):
    """Choice: inner ones are parts of the outer one; a change is in the feed with what it tells of, or neither is."""
    with contextlib.closing(Store(path)) as store:
        store.committed.clear()
        with pytest.raises(Rejection), store.transaction():
            store.new_handle("cart", "alice", [])
            store.tell("tools")
            raise Rejection(-32602, "no")
        assert not store.committed.is_set() and not store.db.in_transaction
        with store.transaction():
            store.new_handle("cart", "alice", [])
            store.tell("tools")
            assert not store.committed.is_set() and store.read("SELECT * FROM changes") == []
        assert store.committed.is_set()
        assert len(store.read("SELECT * FROM changes")) == len(store.read("SELECT * FROM handles")) == 1
        store.committed.clear()
        store.execute("UPDATE handles SET used = 1 WHERE id = 'unknown'")
        assert not store.committed.is_set()  # nothing has changed
