"""Any instance can answer, and nothing promised is lost: handles, tasks and changes on one state file."""

import contextlib
import itertools
import json
import os
import queue
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from support import PATIENCE, Listener, alive, call_tool, eventually, respond, running
from walks import KNOWS_TASKS, WALKS, Client, RoundRobin

import reference_server
from reference_server import APPLICATION_ID, HttpServer, Rejection, Server, Store, demo_server, elicit, takes

SERVER = Path(reference_server.__file__)
A_DAY = 86_400
STEPS = 5


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
def test_each_request_may_meet_another_instance_than_the_one_before(path, monkeypatch, name, first):
    """MUST (Overview › Statelessness): nothing is inferred from earlier requests; a handle tells any instance."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.01)
    with (running(demo_server(0, Store(path))) as one, running(demo_server(0, Store(path))) as two,
          RoundRobin(one.port, two.port) as robin):
        for _ in range(first):
            Client(robin.port).call("server/discover")
        WALKS[name](Client(robin.port))
    passed = robin.passed.values()
    assert len(passed) == 2 and max(passed) - min(passed) <= 1


# ---- leases: time stands still unless a test moves it ----


class Clock:
    """Stands in for `time.time`: the real time and what a test has added."""

    def __init__(self):
        self.real, self.added = reference_server.time.time, 0.0

    def __call__(self):
        return self.real() + self.added


@pytest.fixture
def clock(monkeypatch):
    """The clock of all instances, none of whose keepers does anything by itself: no lease is renewed."""
    clock = Clock()
    monkeypatch.setattr(reference_server.time, "time", clock)
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 3600)
    monkeypatch.setattr(reference_server, "LEASE_SECONDS", 30)
    return clock


class Instance(Server):
    """Has a task of STEPS steps. Each puts its number into `began` and is recorded once `gate` lets it."""

    def __init__(self, path):
        super().__init__("counting", "1.0", store=Store(path))
        self.gate, self.began = threading.Semaphore(0), queue.SimpleQueue()

        @self.tool("count", "Counts as far as it is let.", takes())
        def count(arguments, request):
            request.as_task()
            for step in range(int(request.done) + 1, STEPS + 1):
                self.began.put(step)
                assert self.gate.acquire(timeout=PATIENCE)
                request.progress(step, STEPS)
            return f"Counted to {STEPS}."

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
        """The row as it stands; looking changes nothing."""
        return dict(self.store.execute("SELECT * FROM tasks WHERE id = ?", task)[0])


@contextlib.contextmanager
def counting(path):
    """An instance that answers; at the end its workers are let go."""
    with alive(Instance(path)) as instance:
        try:
            yield instance
        finally:
            instance.gate.release(1000)


@pytest.fixture
def one(clock, path):
    with counting(path) as instance:
        yield instance


@pytest.fixture
def two(clock, path):
    with counting(path) as instance:
        yield instance


def poll(instance, task):
    assert instance.status(task) == "working"


def subscribe(instance, task):
    with Listener(instance, {"taskIds": [task]}, capabilities=KNOWS_TASKS) as listener:
        assert listener.first["params"]["notifications"] == {"taskIds": [task]}


def start_anew(instance, task):
    instance.tasks.adopt_all()  # what `start` does


@pytest.mark.parametrize("ask", [poll, subscribe, start_anew])
def test_whoever_asks_about_a_task_whose_lease_has_lapsed_goes_on_after_its_last_recorded_step(one, two, clock, ask):
    """Choice: a task outlives the process that has created it: whoever is asked about it goes on with the work."""
    task = one.create()
    one.gate.release()
    assert one.step() == 2  # and here its worker hangs; nothing renews its lease
    clock.added = 31
    ask(two, task)
    assert two.step() == 2  # step 1 is recorded, and not repeated
    two.gate.release(STEPS)
    assert eventually(lambda: two.status(task) == "completed")
    assert two.call("get", task)["result"]["result"]["content"][0]["text"] == "Counted to 5."
    assert [two.step() for _ in range(3)] == [3, 4, 5] and two.began.empty()


def test_an_instance_that_starts_takes_up_what_a_dead_one_has_left(one, clock, path):
    """Choice: start-up asks about every unfinished task, so that none waits for its client to come back."""
    task = one.create()
    clock.added = 31
    with counting(path) as fresh:
        assert fresh.step() == 1
        fresh.gate.release(STEPS)
        assert eventually(lambda: fresh.status(task) == "completed")


def test_a_task_whose_lease_is_renewed_stays_with_its_worker(one, two, clock):
    """Choice: a lease of two seconds, renewed five times a second, so that a living worker keeps its task."""
    task = one.create()
    for _ in range(5):
        clock.added += 20
        one.tasks.renew()
        poll(two, task)
    assert two.began.empty() and not two.tasks.running
    one.gate.release(STEPS)
    assert eventually(lambda: one.status(task) == "completed")


def test_exactly_one_of_many_that_ask_at_the_same_moment_takes_the_task_up(one, clock, path):
    """Choice: adopting is one statement, so that one task stays one piece of work, however many are asked."""
    task = one.create()
    clock.added = 31
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(counting(path)) for _ in range(3)]
        first = [other.began.qsize() for other in others]  # the first of them has taken it up as it started
        assert eventually(lambda: sum(other.began.qsize() for other in others) == 1), first
        for lapse in range(2, 5):
            clock.added = 31 * lapse
            for other in others:  # each is given up by its holder, and wanted by twelve at once
                for worker in list(other.tasks.running.values()):
                    worker.cancel("the test")
                other.gate.release()
            assert eventually(lambda: not any(other.tasks.running for other in others))
            for other in others:
                other.gate.acquire(blocking=False)
            ask_all_at_once(others, task)
            assert eventually(lambda lapse=lapse: sum(other.began.qsize() for other in others) >= lapse)
            assert sum(other.began.qsize() for other in others) == lapse
            assert sum(len(other.tasks.running) for other in others) == 1


def ask_all_at_once(instances, task):
    """Four threads of each instance ask about the task as nearly at one moment as can be."""
    together = threading.Barrier(4 * len(instances))
    statuses = queue.SimpleQueue()

    def ask(instance):
        together.wait(PATIENCE)
        statuses.put(instance.status(task))

    threads = [threading.Thread(target=ask, args=(instance,)) for instance in instances for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [statuses.get(timeout=PATIENCE) for _ in threads] == ["working"] * len(threads)


def test_a_worker_that_has_lost_its_lease_writes_nothing_more(one, two, clock, lines):
    """Choice: each write asks whether the row is still this worker's: a process may be stopped and go on later."""
    task = one.create()
    clock.added = 31
    poll(two, task)
    assert two.step() == 1
    before = two.row(task)
    one.gate.release(STEPS)
    assert eventually(lambda: not one.tasks.running)
    assert two.row(task) == before and one.began.empty()
    assert [line for line in lines.lines() if "no longer this worker's" in line]
    two.gate.release(STEPS)
    assert eventually(lambda: two.status(task) == "completed")


def test_a_worker_from_before_is_a_stranger_to_its_own_instance(one, two, clock):
    """Choice: a task belongs to a worker and not to an instance, or the old one would write once it comes back."""
    task = one.create()
    clock.added = 31
    poll(two, task)
    assert two.step() == 1
    clock.added = 62
    poll(one, task)  # while its old worker is in its first step
    one.gate.release()
    assert eventually(lambda: not one.tasks.running)
    assert two.row(task)["done"] is None and one.began.empty()
    poll(one, task)
    assert one.step() == 1
    one.gate.release(STEPS)
    assert eventually(lambda: one.status(task) == "completed")
    two.gate.release()
    assert eventually(lambda: not two.tasks.running)


def test_an_instance_does_not_take_over_from_its_own_living_worker(one, clock):
    """Choice: a lease may lapse while its worker lives (a suspended machine); two workers would repeat steps."""
    task = one.create()
    clock.added = 31
    poll(one, task)
    one.gate.release(STEPS)
    assert eventually(lambda: one.status(task) == "completed")
    assert [one.step() for _ in range(STEPS - 1)] == [2, 3, 4, 5] and one.began.empty()


def test_shutdown_lets_go_of_the_tasks_so_that_another_instance_goes_on_at_once(two, path):
    """Choice: leases are given back at shutdown, or whoever asks would wait for one that nobody holds."""
    with counting(path) as leaving:
        task = leaving.create()
        leaving.gate.release()
        assert leaving.step() == 2
        leaving.stop()
        poll(two, task)  # at the same time by the clock
        assert two.step() == 2
    two.gate.release(STEPS)
    assert eventually(lambda: two.status(task) == "completed")


def test_a_cancellation_at_one_instance_ends_the_work_at_the_other(one, two):
    """Choice: a cancelled task stays so, although its worker may hear of it only at its instance's next look."""
    task = one.create()
    assert two.call("cancel", task)["result"]["resultType"] == "complete"
    one.tasks.renew()  # the keeper's next look
    assert all(worker.reason for worker in one.tasks.running.values())
    one.gate.release(STEPS)
    assert eventually(lambda: not one.tasks.running)
    assert one.status(task) == two.status(task) == "cancelled" and one.row(task)["done"] is None


def test_answers_that_come_to_both_instances_at_once_are_both_kept(one, two):
    """Choice: reading and writing the answers is one transaction, or one of two acknowledged answers would be lost."""
    for server in (one, two):
        @server.tool("ask", "Asks two questions.", takes())
        def ask(arguments, request):
            request.as_task()
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
        assert json.loads(one.row(task)["answers"]).keys() == {"left", "right"}


def test_a_killed_process_loses_no_task_and_none_of_its_recorded_steps(path, monkeypatch):
    """MUST (Tasks Extension › Task Creation): no handle is returned until the task is durably created."""
    monkeypatch.setattr(reference_server.time, "time", clock := Clock())
    command = [sys.executable, "-X", "dev", str(SERVER), "--port", "0", "--state", path, "--step-seconds", "0.02"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
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
    with alive(demo_server(0, Store(path))) as other:
        recorded = {row["id"]: row["done"] or 0 for row in other.store.execute("SELECT * FROM tasks")}
        assert set(recorded) == set(tasks) and recorded[tasks[0]] >= 2
        other.store.execute("CREATE TEMP TABLE steps (id, done)")
        other.store.execute("CREATE TEMP TRIGGER record AFTER UPDATE OF done ON tasks"
                            " BEGIN INSERT INTO steps VALUES (NEW.id, NEW.done); END")
        clock.added = 60
        finished = "SELECT count(*) AS count FROM tasks WHERE status = 'completed'"
        for task in tasks:
            respond(other, "tasks/get", {"taskId": task}, capabilities=KNOWS_TASKS)
        assert eventually(lambda: other.store.execute(finished)[0]["count"] == 3)
        for task in tasks:
            steps = [row["done"] for row in other.store.execute("SELECT done FROM steps WHERE id = ?", task)]
            assert steps == list(range(int(recorded[task]) + 1, 11))
        assert "result" in call_tool(other, "add_to_cart", {"cartId": cart, "sku": "pen"})


# ---- what is forgotten ----


def test_an_expired_task_is_purged_and_its_worker_is_told(one, two, clock, lines):
    """MAY (Tasks Extension › Tasks): the server may discard the task after its ttl has elapsed."""
    task = one.create()
    clock.added = one.row(task)["ttl_ms"] / 1000 - 1
    one.tasks.renew()
    assert one.status(task) == "working"
    clock.added += 2
    one.tasks.renew()
    assert two.call("get", task)["error"]["code"] == -32602
    one.gate.release(STEPS)
    assert eventually(lambda: not one.tasks.running)
    assert [line for line in lines.lines() if line.endswith("(expired)")]
    assert two.store.execute("SELECT * FROM tasks") == []


def test_a_task_that_is_finished_is_kept_until_it_expires(one, clock):
    """MAY (Tasks Extension › Tasks): not before its ttl has elapsed may the server discard a task."""
    task = one.create()
    one.gate.release(STEPS)
    assert eventually(lambda: one.status(task) == "completed")
    clock.added = one.row(task)["ttl_ms"] / 1000 - 1
    one.tasks.renew()
    assert one.status(task) == "completed"
    clock.added += 2
    one.tasks.renew()
    assert one.call("get", task)["error"]["code"] == -32602


def test_a_handle_is_forgotten_a_day_after_its_last_use(clock, path):
    """Choice: 24 hours after the last use, because that is what the tools' descriptions promise."""
    with alive(demo_server(0, Store(path))) as shop:
        used, unused = (call_tool(shop, "create_cart")["result"]["structuredContent"]["cartId"] for _ in range(2))
        for _ in range(3):
            clock.added += A_DAY / 2
            shop.store.purge()
            assert not call_tool(shop, "add_to_cart", {"cartId": used, "sku": "pen"})["result"].get("isError")
        assert call_tool(shop, "add_to_cart", {"cartId": unused, "sku": "pen"})["result"]["isError"]
        clock.added += A_DAY + 1
        shop.store.purge()
        assert shop.store.execute("SELECT * FROM handles") == []


def test_changes_are_forgotten_once_every_instance_must_have_seen_them(one, two, clock):
    """Choice: changes are kept for a minute, three hundred times what an instance needs to see them."""
    wanted = {"toolsListChanged": True, "promptsListChanged": True}
    with Listener(two, wanted) as listener, Listener(one, wanted) as own:
        one.list_changed("tools")
        clock.added = 59
        two.store.purge()
        two.subscriptions.deliver_others()
        clock.added = 61
        two.store.purge()
        assert two.store.execute("SELECT * FROM changes") == []
        one.list_changed("tools")  # numbers go on; a purge hides nothing that comes later
        one.subscriptions.deliver_others()  # has told of its own changes already
        two.subscriptions.deliver_others()
        one.list_changed("prompts")
        two.subscriptions.deliver_others()
        for subscriber in (own, listener):
            heard = [subscriber.next()["method"] for _ in range(3)]
            assert heard == [f"notifications/{kind}/list_changed" for kind in ("tools", "tools", "prompts")]


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
    (Path.mkdir, "unable to open database file"),
    (lambda path: path.parent.rmdir(), "unable to open database file")],
    ids=["text", "foreign", "wiped", "cut", "folder", "nowhere"])
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
    connect = sqlite3.connect
    with contextlib.closing(connect(path, isolation_level=None)) as other, monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda path, **options: connect(path, **options | {"timeout": 0.01}))
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
            [sys.executable, "-c", code], cwd=SERVER.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
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


@contextlib.contextmanager
def locked(store):
    """Another process has a transaction open, and nobody waits for it."""
    store.execute("PRAGMA busy_timeout = 0")
    path = store.execute("PRAGMA database_list")[0]["file"]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield "database is locked"
        other.execute("ROLLBACK")


@contextlib.contextmanager
def full(store):
    """The file may not grow any more."""
    limit = store.execute("PRAGMA max_page_count")[0][0]
    store.execute("PRAGMA max_page_count = 1")  # SQLite makes it the present number of pages
    yield "database or disk is full"
    store.execute(f"PRAGMA max_page_count = {limit}")


@contextlib.contextmanager
def failing(store):
    """Each write to the log that SQLite keeps beside the file fails."""
    path = store.execute("PRAGMA database_list")[0]["file"]
    with file_size_limit(os.path.getsize(path + "-wal")):
        yield "disk I/O error"


@contextlib.contextmanager
def read_only(store):
    """The file system has become read-only."""
    store.execute("PRAGMA query_only = 1")
    yield "attempt to write a readonly database"
    store.execute("PRAGMA query_only = 0")


TROUBLES = pytest.mark.parametrize("trouble", [locked, full, failing, read_only])


@TROUBLES
def test_a_running_server_says_that_it_cannot_reach_its_state_and_goes_on(monkeypatch, path, lines, trouble):
    """Choice: -32603 to the client, one line with the cause to the operator; what was acknowledged is kept."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 3600)
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
        kept = {row["id"]: json.loads(row["value"]) for row in after.execute("SELECT * FROM handles")}
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
        assert {row["id"] for row in after.execute("SELECT * FROM handles")} == set(carts)


def test_a_task_that_needs_no_adoption_can_be_polled_while_the_file_is_locked(one, two, clock):
    """Choice: a poll only reads; it writes, and waits for others' writes, when there is an orphan to adopt."""
    running, finished = one.create(), two.create()
    two.gate.release(STEPS)
    assert eventually(lambda: two.status(finished) == "completed")
    with locked(two.store):
        poll(two, running)
        clock.added = 31
        assert two.status(finished) == "completed"
        assert two.call("get", running)["error"]["code"] == -32603
    poll(two, running)


@TROUBLES
def test_an_answer_to_a_task_is_taken_whole_or_refused(monkeypatch, path, lines, trouble):
    """Choice: tasks/update is one transaction: a failing write leaves neither half an answer nor an open one."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.01)
    monkeypatch.setattr(reference_server, "LEASE_SECONDS", 0.2)  # if the trouble stops the worker, too
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
        client.call("tasks/update", update, capabilities=KNOWS_TASKS)
        assert client.becomes(task, "completed")
        assert client.task("get", task)["result"]["content"][0]["text"].endswith("with charts.")
        assert "Traceback" not in lines.text


@TROUBLES
def test_a_task_that_cannot_be_written_goes_on_later_after_its_last_step(one, clock, lines, trouble):
    """Choice: trouble with the state is no failure of the tool's, so the task is left as it is, and taken up again."""
    task = one.create()
    one.gate.release()
    assert one.step() == 2
    with trouble(one.store) as cause:
        for topic in itertools.chain(["large" * 100] * 100, ["small"] * 500):  # a page or two may still have room
            with contextlib.suppress(sqlite3.Error):
                one.store.execute("INSERT INTO changes (topic) VALUES (?)", topic)
        one.gate.release()
        assert eventually(lambda: not one.tasks.running)
    assert one.row(task)["status"] == "working" and one.began.empty()
    assert [line for line in lines.lines() if cause in line] and "Traceback" not in lines.text
    recorded = one.row(task)["done"]
    clock.added = 31
    poll(one, task)
    assert one.step() == recorded + 1
    one.gate.release(STEPS)
    assert eventually(lambda: one.status(task) == "completed")


@TROUBLES
def test_a_task_that_fails_while_nothing_can_be_written_is_no_traceback(one, lines, trouble):
    """Choice: whatever ends the work, trouble with the state is one line, and the task is taken up again."""

    @one.tool("fail", "Ends as a failed task.", takes())
    def fail(arguments, request):
        request.as_task()
        assert one.gate.acquire(timeout=PATIENCE)
        raise Rejection(-32000, "x" * 100_000)

    task = call_tool(one, "fail", capabilities=KNOWS_TASKS)["result"]["taskId"]
    with trouble(one.store) as cause:
        one.gate.release()
        assert eventually(lambda: not one.tasks.running)
    assert one.row(task)["status"] == "working"
    assert [line for line in lines.lines() if cause in line] and "Traceback" not in lines.text


@TROUBLES
def test_start_and_stop_do_not_fail_when_the_state_cannot_be_used(one, two, clock, path, lines, trouble):
    """Choice: a server ends with status 0 when it is asked to; leases that it cannot give back lapse by themselves."""
    one.create()
    clock.added = 31
    instance = Instance(path)
    with trouble(instance.store):
        instance.start()  # where it would take up the task, and cannot
        instance.stop()
    instance.store.close()
    two.create()
    with trouble(two.store):
        two.stop()
    assert "Traceback" not in lines.text


@TROUBLES
def test_a_keeper_that_cannot_do_its_work_says_so_once_and_goes_on(monkeypatch, path, lines, trouble):
    """Choice: one line when the trouble begins, because five a second would hide everything else."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 0.001)
    looks = itertools.count()
    with alive(Instance(path)) as instance:
        renew = instance.tasks.renew
        monkeypatch.setattr(instance.tasks, "renew", lambda: (next(looks), renew()))
        with trouble(instance.store) as cause:
            instance.store.execute("SELECT 1")
            before = next(looks)
            assert eventually(lambda: next(looks) > before + 100)
        said = [line for line in lines.lines() if line == f"[ref] the state cannot be used: {cause}"]
        assert len(said) <= 1
        assert lines.text.count("\n") == len(said)
        other = Instance(path)
        with Listener(instance, {"toolsListChanged": True}) as listener:  # and it still keeps
            other.list_changed("tools")
            assert listener.next()["method"] == "notifications/tools/list_changed"
        other.store.close()
