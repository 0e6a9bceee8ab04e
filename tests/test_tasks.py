"""The tasks extension (SEP-2663): work that outlives its connection, and the handle by which its user finds it."""

import asyncio
import datetime
import decimal
import json
import sqlite3
import threading

import pytest
from support import (
    PATIENCE,
    TASKS,
    Listener,
    Recorder,
    alive,
    call_tool,
    eventually,
    message,
    octets,
    respond,
    running,
    sweep,
)

import reference_server
from reference_server import (
    TEXT,
    Cancelled,
    Rejection,
    Server,
    StoreTrouble,
    TaskRequest,
    ToolError,
    demo_server,
    elicit,
    input_required,
    takes,
)

HAS_TASKS = {"extensions": {TASKS: {}}}
CAN_ASK = HAS_TASKS | {"elicitation": {}}
NOT_FOUND = {"code": -32602, "message": "There is no such task"}
MAY = {"month": "May"}
ACTIVE = ("working", "input_required")


@pytest.fixture(scope="module")
def demo():
    with alive(demo_server(0)) as server:
        yield server


@pytest.fixture
def server():
    """A server of one tool for each way in which a task can end; `server.go` lets `gated` go on."""
    with alive(Server("tasks", "1")) as server:
        server.go, server.runs = threading.Event(), []
        add_tools(server)
        yield server
        server.go.set()


def add_tools(server):
    @server.tool("gated", "Waits for the test.", takes())
    def gated(arguments, request):
        request.as_task()
        server.runs.append(request)
        while not server.go.is_set():
            request.sleep(0.001)
        return "through the gate"

    @server.tool("fails", "Fails in a way that a model can act on.", takes())
    def fails(arguments, request):
        request.as_task()
        raise ToolError("not like this")

    @server.tool("rejects", "Ends with a JSON-RPC error.", takes())
    def rejects(arguments, request):
        request.as_task()
        raise Rejection(-32603, "API rate limit exceeded", {"limit": 1})

    @server.tool("crashes", "Has a fault.", takes())
    def crashes(arguments, request):
        request.as_task()
        raise KeyError("swordfish")

    @server.tool("required", "Cannot do without a task.", takes())
    def required(arguments, request):
        request.as_task(required=True)
        return "done"

    @server.tool("asks", "Asks two things, then a third.", takes())
    def asks(arguments, request):
        request.as_task()
        two = request.ask({"a": elicit("?", {"x": TEXT}), "b": elicit("?", {"x": TEXT})})
        three = request.ask({"a": elicit("?", {"x": TEXT}), "c": elicit("?", {"x": TEXT})})
        return json.dumps([two, three])

    @server.tool("asks_first", "Asks before it becomes a task.", takes())
    def asks_first(arguments, request):
        if not request.responses:
            return input_required({"q": elicit("?", {"x": TEXT})}, "kept")
        request.as_task()
        return f"{request.state} {request.accepted('q')}"

    @server.tool("short", "Is kept for one second.", takes())
    def short(arguments, request):
        request.as_task(ttl_ms=1000)
        server.runs.append(request)
        request.sleep(PATIENCE)

    @server.tool("steps", "Reports progress and log messages.", takes())
    def steps(arguments, request):
        request.as_task()
        request.log("error", "not on a task")
        request.progress(1, 2, "half")
        request.progress(2)
        for value in (2, 1, float("nan"), float("inf")):
            request.progress(value, 2, "no progress")
        return "done"


def create(server, name, arguments=None, user="anonymous", capabilities=HAS_TASKS, **more):
    result = call_tool(server, name, arguments, user, capabilities=capabilities, **more)["result"]
    assert result["resultType"] == "task", result
    return result["taskId"]


def get(server, task, user="anonymous"):
    result = respond(server, "tasks/get", {"taskId": task}, user, capabilities=HAS_TASKS)["result"]
    assert result["resultType"] == "complete"
    return result


def update(server, task, responses, user="anonymous"):
    return respond(server, "tasks/update", {"taskId": task, "inputResponses": responses}, user, capabilities=HAS_TASKS)


def cancel(server, task, user="anonymous"):
    return respond(server, "tasks/cancel", {"taskId": task}, user, capabilities=HAS_TASKS)


def wait_for(server, task, *statuses, user="anonymous"):
    """The task as soon as it has one of these statuses (by default: a terminal one)."""
    wanted = statuses or ("completed", "failed", "cancelled")
    assert eventually(lambda: get(server, task, user)["status"] in wanted), get(server, task, user)
    return get(server, task, user)


def is_acknowledgement(server, answer):
    return answer["result"] == {"resultType": "complete", "_meta": {"io.modelcontextprotocol/serverInfo": server.info}}


def text_of(view):
    return view["result"]["content"][0]["text"]


# ---- who gets a task ----


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"extensions": {}},
        {"extensions": {"com.example/tasks": {}}},
        {"tasks": {}},
        {"tasks": {"requests": {"tools": {"call": {}}}}},
    ],
)
def test_a_client_that_does_not_know_tasks_never_gets_one(demo, capabilities):
    """MUST NOT (Tasks Extension › Capability Negotiation): CreateTaskResult without the capability on that request."""
    result = call_tool(demo, "build_report", MAY, capabilities=capabilities)["result"]
    assert (result["resultType"], result["content"][0]["text"]) == ("complete", "The report for May is ready.")
    assert "taskId" not in result


def test_the_declaration_counts_for_its_own_request_only():
    """MUST NOT (Tasks Extension › Capability Negotiation): regardless of prior declarations, also on one connection."""
    with running(demo_server(0)) as server, server.connect() as connection:
        params = {"name": "build_report", "arguments": MAY}
        for declared in (HAS_TASKS, {}, HAS_TASKS, {}):
            result = connection.call("tools/call", params, capabilities=declared).message["result"]
            assert result["resultType"] == ("task" if declared else "complete")


def test_a_tool_that_cannot_do_without_a_task_needs_the_capability(server):
    """MUST (Tasks Extension › Capability Negotiation): -32021 with the required extension."""
    answer = call_tool(server, "required")
    assert answer["error"]["code"] == -32021
    assert answer["error"]["data"] == {"requiredCapabilities": HAS_TASKS}
    assert text_of(wait_for(server, create(server, "required"))) == "done"


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
def test_the_methods_of_tasks_need_the_capability(demo, method):
    """MUST (Tasks Extension › Protocol Errors): -32021 for non-declaring clients, before the task is looked for."""
    task = create(demo, "build_report", MAY)
    for one in (task, "nothing"):
        answer = respond(demo, method, {"taskId": one, "inputResponses": {}})
        assert answer["error"]["code"] == -32021
        assert answer["error"]["data"] == {"requiredCapabilities": HAS_TASKS}


def test_the_old_task_parameter_is_ignored(demo):
    """MUST (Tasks Extension › Backward Compatibility): treat the `task` parameter as unknown."""
    params = {"name": "build_report", "arguments": MAY, "task": {"ttl": 60_000, "pollInterval": 100}}
    assert respond(demo, "tools/call", params)["result"]["resultType"] == "complete"


@pytest.mark.parametrize("method", ["tasks/result", "tasks/list", "tasks/", "tasks"])
def test_the_old_methods_are_gone(demo, method):
    """MUST (Tasks Extension › Backward Compatibility): tasks/result is -32601."""
    assert respond(demo, method, {"taskId": "x"}, capabilities=HAS_TASKS)["error"]["code"] == -32601


# ---- the handle ----


def test_the_handle_says_what_is_known_and_nothing_else(server):
    """MUST (Tasks Extension › Polymorphic Results): resultType "task"; and no member that has no value yet."""
    result = call_tool(server, "gated", capabilities=HAS_TASKS)["result"]
    assert result.keys() == {
        "resultType",
        "taskId",
        "status",
        "createdAt",
        "lastUpdatedAt",
        "ttlMs",
        "pollIntervalMs",
        "_meta",
    }
    assert (result["resultType"], result["status"], result["ttlMs"]) == ("task", "working", 3_600_000)
    assert isinstance(result["pollIntervalMs"], int)
    for key in ("createdAt", "lastUpdatedAt"):
        assert abs(
            datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(result[key])
        ) < datetime.timedelta(minutes=1)
    same = {key: value for key, value in get(server, result["taskId"]).items() if key != "resultType"}
    assert same == {key: value for key, value in result.items() if key != "resultType"}


def test_the_task_is_there_before_its_handle_is(demo):
    """MUST NOT (Tasks Extension › Task Creation): return CreateTaskResult until a tasks/get would resolve."""
    for _ in range(20):
        assert get(demo, create(demo, "build_report", MAY))["status"] in ("working", "completed")


def test_a_handle_cannot_be_guessed(server):
    """MUST (Tasks Extension › Security Implications): sufficient entropy that nobody can enumerate or guess them."""
    handles = {create(server, "gated") for _ in range(20)}
    assert len(handles) == 20
    assert {len(handle) for handle in handles} == {32}  # 24 octets at 6 bits a character
    assert len({handle[:4] for handle in handles}) > 10


@pytest.mark.parametrize("method", ["tasks/get", "tasks/update", "tasks/cancel"])
@pytest.mark.parametrize("task", ["", "nothing", "x" * 10_000, "\0", "' OR 1=1 --", "%", "\ud800"])
def test_a_task_that_does_not_exist_is_an_error(demo, method, task):
    """MUST (Tasks Extension › Protocol Errors): -32602 for tasks/get; SHOULD for tasks/update and tasks/cancel."""
    answer = respond(demo, method, {"taskId": task, "inputResponses": {}}, capabilities=HAS_TASKS)
    assert answer.get("error") == NOT_FOUND


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tasks/get", {}),
        ("tasks/get", {"taskId": 1}),
        ("tasks/cancel", {"taskId": None}),
        ("tasks/update", {"taskId": "x"}),
        ("tasks/update", {"taskId": "x", "inputResponses": None}),
        ("tasks/update", {"taskId": "x", "inputResponses": []}),
    ],
)
def test_params_of_the_wrong_shape_are_an_error(demo, method, params):
    """MUST (Tasks Extension › Protocol Errors): -32602 for an invalid taskId."""
    assert respond(demo, method, params, capabilities=HAS_TASKS)["error"]["code"] == -32602


def test_the_task_id_is_mirrored_into_mcp_name():
    """MUST (Tasks Extension › Streamable HTTP: Routing Headers): Mcp-Name is params.taskId."""
    with running(demo_server(0)) as server, server.connect() as connection:
        task = connection.call(
            "tools/call", {"name": "build_report", "arguments": MAY}, capabilities=HAS_TASKS
        ).message["result"]["taskId"]
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            body = message(method, {"taskId": task, "inputResponses": {}}, capabilities=HAS_TASKS)
            for name, status in ((task, 200), (None, 400), ("other", 400), (task.swapcase(), 400)):
                connection.send(octets(body, Mcp_Name=name))
                reply = connection.reply()
                assert (reply.status, reply.message.get("error", {}).get("code")) == (
                    status,
                    None if status == 200 else -32020,
                )


# ---- how a task ends ----


ENDS = [
    ("required", "completed", None),
    ("fails", "completed", None),
    ("rejects", "failed", {"code": -32603, "message": "API rate limit exceeded", "data": {"limit": 1}}),
    ("crashes", "failed", {"code": -32603, "message": "Internal error"}),
]


@pytest.mark.parametrize(("name", "status", "error"), ENDS)
def test_only_a_json_rpc_error_is_a_failure(server, name, status, error):
    """MUST NOT (Tasks Extension › Task Execution Errors): `failed` for errors within the result of a method."""
    view = wait_for(server, create(server, name))
    assert view["status"] == status
    if error:
        assert view["error"] == error
        assert view["statusMessage"] == error["message"]
        assert "result" not in view
    else:
        assert "error" not in view
        assert view["result"].get("isError", False) is (name == "fails")


def test_a_completed_task_holds_what_the_call_would_have_returned(server, demo):
    """MUST (Tasks Extension › Task Execution Errors): what the underlying request would have returned."""
    for one, name, arguments in ((server, "fails", None), (demo, "build_report", MAY)):
        assert wait_for(one, create(one, name, arguments))["result"] == call_tool(one, name, arguments)["result"]


@pytest.mark.parametrize("name", ["required", "fails", "rejects", "crashes"])
@pytest.mark.parametrize("answer", [{"action": "accept"}, {"action": "no"}, 7, None])
def test_nothing_changes_a_task_that_has_ended_and_nobody_is_told(server, name, answer):
    """SHOULD (Tasks Extension › Task Update Requests): ignore what is not outstanding; what is terminal stays as it is.

    A good answer and a bad one alike: there is no question that the bad one could be an answer to.
    """
    task = create(server, name)
    before = wait_for(server, task)
    written = server.store.read("SELECT max(number) FROM changes")[0][0]
    assert eventually(lambda: server.subscriptions.seen == written)
    with Listener(server, {"taskIds": [task], "toolsListChanged": True}, capabilities=HAS_TASKS) as listener:
        assert is_acknowledgement(server, cancel(server, task))
        assert is_acknowledgement(server, update(server, task, {"a": answer}))
        sweep(server)
        server.list_changed("tools")
        assert listener.next()["method"] == "notifications/tools/list_changed"
    assert get(server, task) == before


OWN_TROUBLE = [
    sqlite3.OperationalError("the tool's own"),
    sqlite3.IntegrityError("the tool's own"),
    StoreTrouble("passed on"),
    asyncio.CancelledError(),
    GeneratorExit(),
    KeyboardInterrupt(),
    SystemExit(0),
    Cancelled("of its own accord"),
    MemoryError(),
    RecursionError(),
    Rejection(-32000, "no JSON", data={"object": object()}),
    Rejection(-32000, "no JSON", data=float("nan")),
]


def endings():
    """Ways in which a function can end that are not foreseen, each in a tool of its own."""

    def raises(problem):
        def tool(arguments, request):
            request.as_task()
            raise problem

        return tool

    def returns(value):
        return lambda arguments, request: request.as_task() or value

    def reports(*values):
        return lambda arguments, request: request.as_task() or request.progress(*values) or "reported"

    yield from ((type(one).__name__, raises(one)) for one in OWN_TROUBLE)
    for value in (float("nan"), float("inf"), {1}, object(), decimal.Decimal(1), b"octets"):
        yield f"returns {value!r:.12}", returns({"content": [], "structuredContent": value})
    yield from ((f"returns {value!r:.12}", returns(value)) for value in (None, 7, [], {"content": [object()]}))
    yield "progress Decimal", reports(decimal.Decimal(1))
    yield "progress object", reports(object())
    yield "progress with a message that is no text", reports(1, 2, object())
    yield "progress beyond floats", reports(10**400)
    yield "asks with what is no JSON", lambda arguments, request: request.as_task() or request.ask(
        {"q": elicit(object(), {})})
    yield "asks what is no input request", lambda arguments, request: request.as_task() or request.ask({"q": 7})
    yield "asks by an unknown method", lambda arguments, request: request.as_task() or request.ask(
        {"q": {"method": "unknown/ask", "params": {}}})
    yield "returns state alone", returns(input_required(None, state={"x": 1}))
    yield "returns no question", returns(input_required({}))
    yield "returns a question with what is no JSON", returns(input_required({"q": elicit(object(), {})}))


@pytest.mark.parametrize(("way", "function"), list(endings()))
def test_however_the_function_ends_the_task_has_failed_once(server, way, function, log):
    """MUST (Tasks Extension › Task Execution Errors): error for a JSON-RPC error; no second run."""
    runs = []

    @server.tool("odd", "Ends in some way.", takes())
    def odd(arguments, request):
        if isinstance(request, TaskRequest):
            runs.append(request)
        return function(arguments, request)

    task = create(server, "odd", capabilities=CAN_ASK)
    view = wait_for(server, task)
    assert view["status"] == "failed", view
    assert view["error"]["code"] in (-32603, -32000) and isinstance(view["statusMessage"], str)
    assert eventually(lambda: not server.tasks.running)
    sweep(server)
    assert len(runs) == 1 and get(server, task) == view


def test_a_large_number_is_progress(server):
    """Choice: what a call could have sent is recorded, though it is larger than SQLite's integers."""
    server.tool("far", "", takes())(lambda arguments, request: request.as_task() or request.progress(10**30) or "far")
    view = wait_for(server, create(server, "far"))
    assert (view["status"], view["statusMessage"]) == ("completed", "1e+30")


def test_what_a_thread_of_the_tool_still_reports_goes_nowhere(server, log):
    """Choice: after the outcome, and after a question, the run is over; no later run is touched, nothing is printed."""
    late, go, runs = [], threading.Event(), []

    @server.tool("leaves", "Leaves a thread behind.", takes())
    def leaves(arguments, request):
        request.as_task()
        runs.append(request)
        if len(runs) == 1:
            def report():
                assert go.wait(PATIENCE)
                request.progress(9)
                request.log("error", "late")
                late.append(request)

            threading.Thread(target=report).start()
        request.ask({"q": elicit("?", {})})
        request.progress(1, 2)
        server.go.wait(PATIENCE)
        return "done"

    task = create(server, "leaves", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    update(server, task, {"q": {"action": "accept"}})
    assert eventually(lambda: get(server, task).get("statusMessage") == "1 of 2")
    go.set()
    assert eventually(lambda: late)
    assert get(server, task)["statusMessage"] == "1 of 2"
    server.go.set()
    assert text_of(wait_for(server, task)) == "done"
    assert "Traceback" not in log.text


def test_a_cancelled_task_stays_cancelled(server):
    """Choice: cancelling is final, whatever the worker does afterwards; cancelling again changes nothing."""
    task = create(server, "gated")
    assert is_acknowledgement(server, cancel(server, task))
    before = get(server, task)
    assert before["status"] == "cancelled"
    assert before.keys().isdisjoint({"result", "error", "inputRequests"})
    server.go.set()
    assert eventually(lambda: not server.tasks.running)
    assert is_acknowledgement(server, cancel(server, task))
    assert get(server, task) == before


@pytest.mark.parametrize("step", range(1, 11))
def test_a_report_can_be_cancelled_at_every_step(demo, step, monkeypatch, capsys):
    """SHOULD (Tasks Extension › Task Cancellation): the work stops where it is; the steps done before stay known."""
    reached, sleep = threading.Event(), TaskRequest.sleep

    def sleep_at(request, seconds):
        if int(request.done) + 1 == step:
            reached.set()
            sleep(request, PATIENCE)

    monkeypatch.setattr(TaskRequest, "sleep", sleep_at)
    task = create(demo, "build_report", MAY)
    assert reached.wait(PATIENCE)
    assert is_acknowledgement(demo, cancel(demo, task))
    assert eventually(lambda: not demo.tasks.running)
    view = get(demo, task)
    assert view["status"] == "cancelled"
    assert view.get("statusMessage") == (f"step {step - 1} of 10" if step > 1 else None)
    assert f"build_report cancelled at step {step} (tasks/cancel)" in capsys.readouterr().err


def test_a_cancellation_notification_does_not_cancel_a_task(server):
    """MUST NOT (Tasks Extension › Task Cancellation): notifications/cancelled is not for tasks."""
    with running(demo_server(0)) as http, http.connect() as connection:
        params = {"name": "build_report", "arguments": MAY}
        task = connection.call("tools/call", params, id=5, capabilities=CAN_ASK).message["result"]["taskId"]
        wait_for(http.server, task, "input_required")
        for request_id in (5, task):
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": request_id}}
            connection.send(octets(note))
            assert connection.reply().status == 202
        assert get(http.server, task)["status"] == "input_required"


# ---- the work and its connection ----


def test_the_client_dies_and_another_one_of_the_same_user_reads_the_report():
    """MUST (Overview › Statelessness): the handle is all that is needed; hanging up cancels no task."""
    with running(demo_server(0)) as server:
        with server.connect() as killed:
            killed.send(
                octets(
                    message("tools/call", {"name": "build_report", "arguments": MAY}, capabilities=CAN_ASK),
                    user="alice",
                )
            )
            task = killed.reply().message["result"]["taskId"]
        assert eventually(lambda: not server.http.connections)
        with server.connect() as another:

            def poll():
                return another.call("tasks/get", {"taskId": task}, "alice", capabilities=HAS_TASKS).message["result"]

            assert eventually(lambda: poll()["status"] == "input_required")
            yes = {"charts": {"action": "accept", "content": {"charts": True}}}
            another.call("tasks/update", {"taskId": task, "inputResponses": yes}, "alice", capabilities=HAS_TASKS)
            assert eventually(lambda: poll()["status"] == "completed")
            assert text_of(poll()) == "The report for May is ready, with charts."


ANSWERS = [
    ({"action": "accept", "content": {"charts": True}}, "with"),
    ({"action": "accept", "content": {"charts": False}}, "without"),
    ({"action": "decline"}, "without"),
    ({"action": "cancel"}, "without"),
    ({"action": "decline", "content": {"charts": True}}, "without"),
    ({"action": "cancel", "content": {"charts": True}}, "without"),
    ({"action": "accept", "content": {"charts": True, "more": "yes"}}, "with"),
]


def ask_about_charts(server):
    """A report that has come to its question."""
    task = create(server, "build_report", MAY, capabilities=CAN_ASK)
    asked = wait_for(server, task, "input_required")
    assert asked["inputRequests"]["charts"]["params"]["requestedSchema"]["properties"] == {
        "charts": {"type": "boolean", "title": "Charts", "description": "one for each week"}
    }
    assert asked["statusMessage"] == "step 5 of 10"
    return task, asked


@pytest.mark.parametrize(("answer", "charts"), ANSWERS)
def test_the_report_has_charts_only_if_the_user_says_so(demo, answer, charts):
    """MUST (Elicitation › Error Handling): handle that the user declines or cancels; whatever stands beside it."""
    task, _ = ask_about_charts(demo)
    assert is_acknowledgement(demo, update(demo, task, {"charts": answer}))
    view = wait_for(demo, task)
    assert (view["status"], text_of(view)) == ("completed", f"The report for May is ready, {charts} charts.")
    assert "inputRequests" not in view


@pytest.mark.parametrize(
    "answer",
    [
        {"action": "accept", "content": {"charts": "yes"}},
        {"action": "accept", "content": {"charts": "true"}},
        {"action": "accept", "content": {"charts": 1}},
        {"action": "accept", "content": {"charts": None}},
        {"action": "accept", "content": {"charts": [True]}},
        {"action": "accept", "content": {}},
        {"action": "accept", "content": None},
        {"action": "accept"},
        {"action": "accept", "content": "yes"},
        {"action": "accept", "content": ["charts"]},
        {"action": "decline", "content": "no"},
        {"action": True, "content": {"charts": True}},
        {"action": "yes"},
        {"action": ["accept"]},
        {},
        "accept",
        True,
        1,
        None,
        ["accept"],
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_refused_and_the_question_stays(demo, answer):
    """SHOULD (Elicitation › Form Mode Security): validate the received data against the schema: "yes" is not true."""
    task, asked = ask_about_charts(demo)
    assert update(demo, task, {"charts": answer})["error"]["code"] == -32602
    assert get(demo, task) == asked
    assert is_acknowledgement(demo, update(demo, task, {"charts": {"action": "decline"}}))
    assert text_of(wait_for(demo, task)) == "The report for May is ready, without charts."


@pytest.mark.parametrize("elicitation", [None, {"url": {}}])
def test_a_client_that_cannot_be_asked_is_not_asked(demo, elicitation):
    """MUST NOT (Elicitation › Capabilities): modes that the client does not support; no question, no charts."""
    capabilities = HAS_TASKS | ({"elicitation": elicitation} if elicitation else {})
    assert (
        text_of(wait_for(demo, create(demo, "build_report", MAY, capabilities=capabilities)))
        == "The report for May is ready."
    )


# ---- questions of a task ----


def accept(x):
    return {"action": "accept", "content": {"x": x}}


def test_answers_come_in_parts_and_each_question_is_asked_once(server):
    """MAY (Tasks Extension › Task Update Requests): a partial set; MUST: every outstanding request in inputRequests."""
    task = create(server, "asks", capabilities=CAN_ASK)
    assert wait_for(server, task, "input_required")["inputRequests"].keys() == {"a", "b"}
    assert is_acknowledgement(server, update(server, task, {"a": accept("1")}))
    assert get(server, task)["inputRequests"].keys() == {"b"}
    assert get(server, task)["status"] == "input_required"
    update(server, task, {"b": accept("2")})
    assert eventually(lambda: get(server, task).get("inputRequests", {}).keys() == {"c"})  # `a` was answered before
    update(server, task, {"c": accept("3")})
    assert json.loads(text_of(wait_for(server, task))) == [
        {"a": accept("1"), "b": accept("2")},
        {"a": accept("1"), "c": accept("3")},
    ]


@pytest.mark.parametrize("ignored", [{}, {"unknown": accept("9")}, {"unknown": 9}, {"c": accept("9")}, {"": None}])
def test_answers_to_what_is_not_outstanding_are_ignored(server, ignored):
    """SHOULD (Tasks Extension › Task Update Requests): ignore keys that were never issued or are already answered."""
    task = create(server, "asks", capabilities=CAN_ASK)
    before = wait_for(server, task, "input_required")
    assert is_acknowledgement(server, update(server, task, ignored))
    assert get(server, task) == before
    update(server, task, {"a": accept("1")})
    before = get(server, task)
    assert is_acknowledgement(server, update(server, task, {"a": accept("99")} | ignored))
    assert get(server, task) == before
    update(server, task, {"b": accept("2")} | ignored)
    assert wait_for(server, task, "input_required")
    assert eventually(lambda: "c" in get(server, task).get("inputRequests", {}))
    update(server, task, {"c": accept("3")})
    assert json.loads(text_of(wait_for(server, task)))[0]["a"] == accept("1")


@pytest.mark.parametrize("wrong", ["x", None, {"action": "accept"}, {"action": "accept", "content": {"x": 1}}])
def test_an_answer_of_the_wrong_shape_is_an_error_and_changes_nothing(server, wrong):
    """MUST (Tasks Extension › Protocol Errors): -32602; and the question stays outstanding."""
    task = create(server, "asks", capabilities=CAN_ASK)
    before = wait_for(server, task, "input_required")
    assert update(server, task, {"a": accept("1"), "b": wrong})["error"]["code"] == -32602
    assert get(server, task) == before
    cancel(server, task)


def test_a_task_that_waits_for_an_answer_can_be_cancelled(server):
    """SHOULD (Tasks Extension › Task Cancellation): also while the task waits for an answer."""
    task = create(server, "asks", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    cancel(server, task)
    assert get(server, task)["status"] == "cancelled"
    assert "inputRequests" not in get(server, task)
    assert eventually(lambda: not server.tasks.running)
    assert is_acknowledgement(server, update(server, task, {"a": accept("1"), "b": accept("2")}))
    assert get(server, task)["status"] == "cancelled"


def test_answers_and_cancellations_wake_the_work_at_once(server, monkeypatch):
    """Choice: the work looks for answers now and then, for those that came to another instance; here it is told."""
    monkeypatch.setattr(reference_server, "KEEPER_SECONDS", 10 * PATIENCE)
    answered, cancelled = (create(server, "asks", capabilities=CAN_ASK) for _ in range(2))
    for task in (answered, cancelled):
        wait_for(server, task, "input_required")
    update(server, answered, {"a": accept("1"), "b": accept("2")})
    assert eventually(lambda: "c" in get(server, answered).get("inputRequests", {}))
    cancel(server, cancelled)
    assert eventually(lambda: cancelled not in server.tasks.running)
    cancel(server, answered)


def test_the_function_runs_from_the_top_when_it_is_answered_and_knows_what_is_behind_it(server):
    """Choice: a question, a crash and a restart are one mechanism; nobody waits in between."""
    runs = []

    @server.tool("twice", "Runs twice.", takes())
    def twice(arguments, request):
        request.as_task()
        runs.append((request.done, dict(request.responses), request.row["run"]))
        for step in range(int(request.done) + 1, 3):
            request.progress(step)
        try:
            request.ask({"q": elicit("?", {"x": TEXT})})
        except Exception:
            return "a question is no Exception"
        return "answered"

    task = create(server, "twice", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    assert eventually(lambda: not server.tasks.running)
    update(server, task, {"q": accept("1")})
    assert text_of(wait_for(server, task)) == "answered"
    assert runs == [(0, {}, 1), (2, {"q": accept("1")}, 2)]


def test_a_question_that_a_task_returns_is_asked(server):
    """Choice: a tool that asks by `input_required` asks so as a task, too; its state comes back in the next run."""

    @server.tool("returns", "Asks twice by returning.", takes())
    def returns(arguments, request):
        request.as_task()
        if "a" not in request.responses:
            return input_required({"a": elicit("?", {"x": TEXT})}, state={"round": 1})
        if "b" not in request.responses:
            return input_required({"b": elicit("?", {"x": TEXT})}, state={"round": request.state["round"] + 1})
        return f"{request.state} {request.accepted('a')} {request.accepted('b')}"

    task = create(server, "returns", capabilities=CAN_ASK)
    assert wait_for(server, task, "input_required")["inputRequests"].keys() == {"a"}
    update(server, task, {"a": accept("1")})
    assert eventually(lambda: get(server, task).get("inputRequests", {}).keys() == {"b"})
    update(server, task, {"b": accept("2")})
    assert text_of(wait_for(server, task)) == "{'round': 2} {'x': '1'} {'x': '2'}"


def test_a_key_that_was_answered_is_never_asked_again(server, log):
    """MUST NOT (Tasks Extension › Task Update Requests): reuse a key after a response has been delivered."""
    server.tool("again", "Is never content.", takes())(
        lambda arguments, request: request.as_task() or input_required({"q": elicit("?", {"x": TEXT})}))
    task = create(server, "again", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    update(server, task, {"q": accept("1")})
    assert wait_for(server, task)["error"] == {"code": -32603, "message": "Internal error"}


@pytest.mark.parametrize("question", ["ask", "return"])
def test_a_question_where_none_can_be_asked_fails_the_task_as_it_would_the_call(server, question):
    """MUST NOT (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): none that are undeclared."""
    wanted = {"q": elicit("?", {"x": TEXT})}
    server.tool("asking", "", takes())(lambda arguments, request: request.as_task() or (
        request.ask(wanted) if question == "ask" else input_required(wanted)))
    view = wait_for(server, create(server, "asking"))
    assert (view["status"], view["error"]["code"]) == ("failed", -32021)


def test_a_question_that_the_client_cannot_answer_fails_the_task(server):
    """MUST NOT (Multi Round-Trip Requests › Server Requirements (Basic Workflow)): none that are undeclared."""
    view = wait_for(server, create(server, "asks", capabilities=HAS_TASKS))
    assert view["status"] == "failed"
    assert view["error"]["code"] == -32021
    assert view["error"]["data"] == {"requiredCapabilities": {"elicitation": {"form": {}}}}


def test_questions_before_the_task_are_asked_by_round_trips(server):
    """SHOULD (Tasks Extension › Task Creation): resolve all MRTR exchanges before the CreateTaskResult."""
    first = call_tool(server, "asks_first", capabilities=CAN_ASK)["result"]
    assert first["resultType"] == "input_required"
    task = create(
        server,
        "asks_first",
        capabilities=CAN_ASK,
        id=2,
        inputResponses={"q": accept("1")},
        requestState=first["requestState"],
    )
    assert text_of(wait_for(server, task)) == "kept {'x': '1'}"


# ---- progress, notifications ----


def test_progress_is_the_status_message_and_nothing_is_sent_for_it(server):
    """MUST NOT (Tasks Extension › Task Status Notifications): progress and log messages, which tasks do not support."""
    channel = Recorder()
    with Listener(server, {"toolsListChanged": True}, capabilities=HAS_TASKS) as listener:
        task = create(server, "steps", exchange=channel, progressToken="p", log_level="debug")
        assert wait_for(server, task)["statusMessage"] == "2"
        assert channel.messages == []
        assert listener.messages.empty()


def test_every_change_of_a_task_is_told(demo, monkeypatch):
    """MUST (Tasks Extension › Task Status Notifications): each carries the complete task for its status."""
    gate, sleep = threading.Event(), TaskRequest.sleep
    monkeypatch.setattr(TaskRequest, "sleep", lambda request, seconds: gate.wait(PATIENCE) and sleep(request, seconds))
    task = create(demo, "build_report", MAY, capabilities=CAN_ASK)
    with Listener(demo, {"taskIds": [task, "other"]}, id=9, capabilities=HAS_TASKS) as listener:
        assert listener.first["params"]["notifications"] == {"taskIds": [task]}
        gate.set()
        told = [listener.next()["params"]]
        while told[-1]["status"] != "input_required":
            told.append(listener.next()["params"])
        update(demo, task, {"charts": {"action": "decline"}})
        while told[-1]["status"] != "completed":
            told.append(listener.next()["params"])
    assert {one["_meta"]["io.modelcontextprotocol/subscriptionId"] for one in told} == {9}
    assert {one["taskId"] for one in told} == {task}
    assert {one["status"] for one in told} - {"working"} == {"input_required", "completed"}
    assert all(("inputRequests" in one) is (one["status"] == "input_required") for one in told)
    assert [one["lastUpdatedAt"] for one in told] == sorted(one["lastUpdatedAt"] for one in told)
    last = get(demo, task)
    assert told[-1] == {key: value for key, value in last.items() if key != "resultType"} | {"_meta": told[-1]["_meta"]}


def test_a_cancellation_is_told(server):
    """MUST (Tasks Extension › Task Status Notifications): a terminal status too."""
    task = create(server, "gated")
    with Listener(server, {"taskIds": [task]}, capabilities=HAS_TASKS) as listener:
        cancel(server, task)
        assert listener.next()["params"]["status"] == "cancelled"


# ---- expiry ----


def test_a_task_that_expires_is_freed_and_its_work_stops(server, capsys):
    """MAY (Tasks Extension › Task Polling): discard a task after its TTL; nobody finds it or works on it."""
    task, other = create(server, "short"), create(server, "gated")
    assert eventually(lambda: len(server.runs) == 2)
    assert get(server, task)["ttlMs"] == 1000
    server.store.execute("UPDATE tasks SET created = created - 1.5")
    assert eventually(lambda: set(server.tasks.running) == {other})
    assert respond(server, "tasks/get", {"taskId": task}, capabilities=HAS_TASKS)["error"] == NOT_FOUND
    assert "short cancelled at step 1 (expired)" in capsys.readouterr().err
    assert get(server, other)["status"] == "working"


def too_late(monkeypatch, server, statement, task):
    """What has become of the task between the two looks of tasks/update at it; the looks, as they come."""
    find, looks = server.tasks.find, []

    def look(request, rows):
        looks.append(rows)
        if len(looks) == 2:  # the second look is the one in the transaction
            server.store.execute(statement, task)
        return find(request, rows)

    monkeypatch.setattr(server.tasks, "find", look)
    return looks


def test_a_task_that_expires_while_it_is_answered_is_unknown(server, monkeypatch, log):
    """MUST (Tasks Extension › Protocol Errors): -32602 for a task that is gone, whenever it went."""
    task = create(server, "asks", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    looks = too_late(monkeypatch, server, "DELETE FROM tasks WHERE id = ?", task)
    assert update(server, task, {"a": {"action": "decline"}})["error"]["code"] == -32602
    assert len(looks) == 2 and not server.tasks.running
    assert "Traceback" not in log.text


def test_a_task_that_is_cancelled_while_it_is_answered_stays_cancelled(server, monkeypatch):
    """Choice: cancelling is final: what is written was read in the same transaction."""
    task = create(server, "asks", capabilities=CAN_ASK)
    wait_for(server, task, "input_required")
    too_late(monkeypatch, server, "UPDATE tasks SET status = 'cancelled' WHERE id = ?", task)
    assert is_acknowledgement(server, update(server, task, {"a": accept("1"), "b": accept("2")}))
    monkeypatch.undo()
    assert get(server, task)["status"] == "cancelled"
    assert eventually(lambda: not server.tasks.running)


def test_a_task_that_is_cancelled_before_its_run_can_be_stopped_does_not_run(server, monkeypatch):
    """Choice: between the row and the worker's entry the feed has nobody to stop; so a run begins with a look."""
    admit = server.tasks.admit

    def late(row):
        server.store.execute("UPDATE tasks SET status = 'cancelled' WHERE id = ?", row["id"])
        server.store.tell("task", row["id"])
        written = server.store.read("SELECT max(number) FROM changes")[0][0]
        assert eventually(lambda: server.subscriptions.seen == written)
        return admit(row)

    monkeypatch.setattr(server.tasks, "admit", late)
    task = create(server, "gated")
    assert eventually(lambda: not server.tasks.running)
    assert get(server, task)["status"] == "cancelled" and server.runs == []


def test_a_finished_task_expires_too(server):
    """MAY (Tasks Extension › Protocol Errors): a purged task cannot be found."""
    task = create(server, "fails")
    wait_for(server, task)
    server.store.execute("UPDATE tasks SET created = created - 3601")
    assert eventually(lambda: cancel(server, task).get("error") == NOT_FOUND)


# ---- as many as there are ----


def test_a_user_has_a_bounded_number_of_unfinished_tasks_and_the_model_is_told(server, monkeypatch):
    """Choice: a tool error that says what to do, for that user alone; a finished one makes room."""
    monkeypatch.setattr(reference_server, "MAX_TASKS", 2)
    first, _ = create(server, "gated"), create(server, "gated")
    refused = call_tool(server, "gated", capabilities=HAS_TASKS)["result"]
    assert refused["isError"] and "2 of your tasks are unfinished" in refused["content"][0]["text"]
    create(server, "gated", user="bob")
    cancel(server, first)
    create(server, "gated")


def test_a_user_has_a_bounded_number_of_finished_tasks_too(server, monkeypatch):
    """Choice: beyond MAX_KEPT the model is told so; what was promised is kept until it expires."""
    monkeypatch.setattr(reference_server, "MAX_KEPT", 3)
    kept = [create(server, "fails") for _ in range(3)]
    for task in kept:
        wait_for(server, task)
    refused = call_tool(server, "fails", capabilities=HAS_TASKS)["result"]
    assert refused["isError"] and "no room for more" in refused["content"][0]["text"]
    create(server, "fails", user="bob")
    server.store.execute("UPDATE tasks SET created = 0 WHERE id = ?", kept[0])
    assert eventually(lambda: "taskId" in call_tool(server, "fails", capabilities=HAS_TASKS)["result"])
    assert get(server, kept[1])["status"] == "completed"


def test_a_users_tasks_have_a_bounded_number_of_octets(server, monkeypatch):
    """Choice: requests, answers and outcomes together: one user cannot fill the file."""
    monkeypatch.setattr(reference_server, "MAX_KEPT_OCTETS", 10_000)
    server.tool("long", "", takes())(lambda arguments, request: request.as_task() or "x" * 5000)
    first = create(server, "long")
    wait_for(server, first)
    assert call_tool(server, "long", {"much": "x" * 5000}, capabilities=HAS_TASKS)["result"]["isError"]
    create(server, "long")


def test_forty_calls_at_once_at_the_limit_give_exactly_as_many_tasks_as_there_is_room_for(server, monkeypatch):
    """Choice: counting and inserting are one transaction, so that no two calls take the last place."""
    monkeypatch.setattr(reference_server, "MAX_TASKS", 30)
    together, results = threading.Barrier(40), []

    def call():
        together.wait(PATIENCE)
        results.append(call_tool(server, "gated", capabilities=HAS_TASKS)["result"])

    threads = [threading.Thread(target=call) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [one["resultType"] for one in results].count("task") == 30
    assert [one.get("isError") for one in results].count(True) == 10
    assert len(server.store.read("SELECT id FROM tasks")) == 30


class NoThreads(threading.Thread):
    """As on a system that gives no more of them; for workers of tasks alone, while `none` is set."""

    none = threading.Event()

    def start(self):
        if self.name == "task worker" and self.none.is_set():
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.fixture
def no_threads(monkeypatch):
    monkeypatch.setattr(reference_server.threading, "Thread", NoThreads)
    NoThreads.none.clear()
    yield NoThreads.none
    NoThreads.none.clear()


def test_without_a_thread_there_is_an_error_and_no_task(server, no_threads, log):
    """MUST NOT (Tasks Extension › Task Creation): a handle for what nobody will work on."""
    no_threads.set()
    request = message("tools/call", {"name": "gated", "arguments": {}}, capabilities=HAS_TASKS)
    answer = reference_server.respond(server, request, Recorder(), "anonymous")
    error = json.loads(answer.body)["error"]
    assert error["code"] == -32603 and "can't start new thread" in error["message"]
    assert answer.status == 503 and "Retry-After" in answer.fields
    assert server.store.read("SELECT * FROM tasks") == []
    no_threads.clear()
    create(server, "gated")
    assert "Traceback" not in log.text


def test_without_a_thread_an_answer_is_refused_and_can_be_given_again(server, no_threads):
    """Choice: answers, status and the next run are one transaction behind a thread that is there."""
    task = create(server, "asks", capabilities=CAN_ASK)
    before = wait_for(server, task, "input_required")
    no_threads.set()
    both = {"a": accept("1"), "b": accept("2")}
    assert update(server, task, both)["error"]["code"] == -32603
    assert get(server, task) == before
    no_threads.clear()
    update(server, task, both)
    assert eventually(lambda: "c" in get(server, task).get("inputRequests", {}))


def test_orphans_are_taken_up_as_there_are_threads_for_them(server, no_threads, log):
    """Choice: a start with a thousand orphans and few threads takes up what it can, and the rest later."""
    no_threads.set()
    saved = json.dumps({"params": {"name": "fails", "arguments": {}}, "responses": {}, "state": None})
    for number in range(20):
        server.store.execute("INSERT INTO tasks (id, user, tool, created, updated, ttl_ms, request) VALUES"
                             " (?, 'u', 'fails', 9e9, 0, 60000, ?)", f"orphan {number}", saved)
    with pytest.raises(Rejection):
        server.tasks.take_up()
    assert server.keeper.is_alive()
    assert server.store.read("SELECT count(*) FROM tasks WHERE owner IS NULL")[0][0] == 20
    no_threads.clear()
    done = "SELECT count(*) FROM tasks WHERE status = 'completed'"
    assert eventually(lambda: server.store.read(done)[0][0] == 20)
    assert "Traceback" not in log.text


def test_a_thread_whose_row_is_not_written_ends_without_a_run(server, monkeypatch):
    """Choice: the thread waits behind a gate that says run or stop; here the insertion fails."""
    monkeypatch.setattr(server.store, "check_room", lambda *_: 1 / 0)
    assert call_tool(server, "gated", capabilities=HAS_TASKS)["error"]["code"] == -32603
    assert server.store.read("SELECT * FROM tasks") == [] and server.runs == []
    assert eventually(lambda: not [one for one in threading.enumerate() if one.name == "task worker"])
