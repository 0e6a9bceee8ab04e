"""A small MCP client, the other half of the lesson: the standard library, headers.py and sse.py, nothing else.

    python tests/lessons/client.py URL                                 lists the tools
    python tests/lessons/client.py URL TOOL '{"json": "arguments"}'    calls one; Ctrl-C cancels it
    python tests/lessons/client.py --era URL                           says which revisions a server speaks, and why

    --tasks    lets the server turn the call into a task, if it likes
    --retry    calls once more, with a new id, when the stream breaks: the tool may then run twice

$MCP_USER says who asks (default: alice).

Every request is a POST of its own on a connection of its own and says who asks, in which version and with which
capabilities: there is no session to open, to keep or to lose. What is left for a client to do, in this order:

1. `ResponseStream`: read one JSON object or a stream, and hang up at once, because that is the cancellation.
2. `Client.request`: mirror the headers, agree on a version, ask again when a stream broke.
3. `Client.call_tool`: answer what the server asks (`rounds`), follow a task (`follow_task`).
4. `judge_era`: find out whether a server speaks this revision at all.

What a person sees of it (progress, questions) is in terminal.py. A server may say anything: checks.py looks at each
message before it is believed.
"""

import http.client
import io
import itertools
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import by_hand  # noqa: F401  (before the others: it looks at Python)
from checks import (
    FINISHED,
    McpError,
    check_output,
    checked_task,
    cursor_after,
    granted_in,
    not_granted,
    outcome_of,
    poll_seconds,
    progress_in,
    questions_in,
    result_of,
    supported_versions,
    tools_in,
)
from terminal import Terminal, printable, warn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from headers import headers_for, mirrored_parameters, valid_tools
from sse import EventParser, decode_json, encode_json

Message = dict[str, Any]  # a JSON object
Listener = Callable[[Message], object]
Progress = Callable[[float, float | None, str | None], object]  # done, total, message
Answer = Callable[[str, Message], Message]  # an input request's key, the input request -> the response to it

VERSION, CLIENT_INFO, CAPABILITIES, LOG_LEVEL, TASKS = (
    f"io.modelcontextprotocol/{name}"
    for name in ("protocolVersion", "clientInfo", "clientCapabilities", "logLevel", "tasks")
)
METHOD_NOT_FOUND, HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION = -32601, -32020, -32021, -32022

TIMEOUT = 60.0  # seconds for one request, whatever arrives meanwhile
REISSUE = 2  # how often to ask again, after a broken stream, what only reads or may be said twice: lists, tasks/*
MAX_ROUNDS = 20  # how often one request may be answered with questions
MAX_PAGES = 1000  # of one list
MAX_MESSAGE = 16 << 20  # octets

class BrokenStream(ConnectionError):
    """The connection, or the sense of what came over it, ended before the response did."""


class ResponseStream:
    """One request under way: iterate over its notifications and, last, its response.

    McpError for an HTTP answer without JSON-RPC, BrokenStream, TimeoutError, or OSError before it is sent. Iterate
    in one thread, close in any: the socket belongs to the thread that iterates, others only wake it.
    """

    def __init__(self, url: str, message: Message, headers: dict[str, str], timeout: float | None) -> None:
        self.id: int = message["id"]
        self.status: int | None = None  # HTTP's, as soon as there is one
        self.closed = False  # close() was called; any thread may set it
        self._deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        self._messages = self._read()
        parts = parsed_url(url)
        connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = connection(parts.hostname or "", parts.port or connection.default_port, timeout=timeout)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            with suppress(ConnectionError):  # a server may refuse before it has read everything; _read() will see
                self._connection.request("POST", target, encode_json(message), headers)
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "ResponseStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        return self._messages

    def close(self) -> None:
        """Hangs up, without reading what is left; after that the iteration simply ends."""
        self.closed = True
        # spec: Cancellation › Transport-Specific Cancellation: closing the response stream is the signal
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(ValueError):  # "already executing": the thread that reads wakes up and releases the socket
            self._messages.close()
            self._connection.close()

    def _read(self) -> Generator[Message, None, None]:
        response = None
        try:
            response = self._connection.getresponse()
            self.status = response.status
            streamed = response.headers.get_content_type() == "text/event-stream"
            for message in self._read_events(response) if streamed else self._read_json(response):
                if self._belongs(message):
                    yield message
                    # spec: Streamable HTTP › Receiving Messages: the response SHOULD terminate the stream
                    if "method" not in message:
                        return
            reason = "the stream ended before its response"
        except (http.client.HTTPException, ConnectionError, ValueError) as error:
            reason = f"the stream broke: {error!r}"
        finally:
            if response is not None:
                response.close()
            self._connection.close()
        if not self.closed:
            raise BrokenStream(reason)

    def _read_events(self, response: http.client.HTTPResponse) -> Iterator[Message]:
        parser = EventParser(MAX_MESSAGE)
        for piece in self._pieces(response):
            for event in parser.feed(piece):
                if event.event == "message" and event.data:
                    yield decode_message(event.data.encode())

    def _read_json(self, response: http.client.HTTPResponse) -> Iterator[Message]:
        body = b""
        for piece in self._pieces(response):
            body += piece
            if len(body) > MAX_MESSAGE:
                raise ValueError(f"an answer of more than {MAX_MESSAGE} octets")
        try:
            yield decode_message(body)
        except ValueError as error:
            if response.status == 200 and (not body or response.headers.get_content_type() == "application/json"):
                raise  # it was cut off
            text = body[:500].decode("utf-8", "replace")
            said = f": {' '.join(text.split())}" if text.strip() else ""
            raise McpError(None, f"HTTP {response.status} {response.reason}{said}", text, response.status) from error

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        # spec: Cancellation › Timeouts: SHOULD always enforce a maximum timeout, regardless of progress
        while not self.closed and not response.isclosed():  # http.client closes the socket behind a last answer
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(None if left == math.inf else left)
            piece = response.read1(1 << 16)
            if not piece:
                return
            yield piece

    def _belongs(self, message: Message) -> bool:
        # spec: Streamable HTTP › Receiving Messages: a server MUST NOT send requests
        # An error without an id answers a request that could not be read; 1, 1.0 and true are different ids.
        id = message.get("id")
        unread = id is None and ("method" in message or "error" in message)
        ours = unread or ("method" not in message and type(id) is int and id == self.id)
        if not ours:
            warn(f"ignored what does not belong to request {self.id}: {message}")
        return ours


def parsed_url(url: str) -> SplitResult:
    """The parts of a URL; ValueError, with what is missing, for one that names no HTTP server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no HTTP URL; write the scheme too, as in http://127.0.0.1:3000/mcp")
    if parts.port == 0:  # `port` itself raises ValueError for what is no port
        raise ValueError(f"{url!r} names port 0, at which nothing can listen")
    return parts


def decode_message(data: bytes) -> Message:
    """One JSON-RPC message; ValueError when it is none."""
    message = decode_json(data)
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise ValueError("not a JSON-RPC message")
    return message


class Client:
    """Talks to one MCP endpoint, and remembers nothing of it but the tools it listed.

    `versions`: the protocol versions this client speaks, best first. `wait`: how it waits between two polls.
    """

    def __init__(self, url: str, user: str = "alice", capabilities: Message | None = None,
                 client_info: Message | None = None, versions: Sequence[str] = ("2026-07-28",),
                 wait: Callable[[float], object] = time.sleep) -> None:
        self.url, self.user, self.versions = url, user, list(versions)
        self.capabilities: Message = {"extensions": {TASKS: {}}} if capabilities is None else capabilities
        self.client_info = client_info or {"name": "lesson-client", "version": "1.0.0"}
        self.tools: dict[str, Message] = {}  # by name, from the last list_tools()
        self._ids, self._wait = itertools.count(1), wait

    def stream(self, method: str, params: Message | None = None, timeout: float | None = TIMEOUT) -> ResponseStream:
        """Sends a request; what comes back is in the ResponseStream. `timeout` None: wait for ever."""
        params = params or {}
        # spec: Overview › `_meta`: every request carries the version and the client's capabilities
        meta = {VERSION: self.versions[0], CLIENT_INFO: self.client_info, CAPABILITIES: self.capabilities}
        params = params | {"_meta": meta | params.get("_meta", {})}
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        # spec: Streamable HTTP › Sending Messages: an Accept header listing both content types
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
                   "Authorization": f"Bearer {self.user}"}
        # spec: Streamable HTTP › Client Behavior: the standard headers, and Mcp-Param-* as the tool's schema says
        tool = self.tools.get(params["name"]) if method == "tools/call" else None
        headers |= headers_for(message, mirrored_parameters(tool["inputSchema"]) if tool else ())
        return ResponseStream(self.url, message, headers, timeout)

    def request(self, method: str, params: Message | None = None, *, on_notification: Listener | None = None,
                timeout: float | None = TIMEOUT, reissue: int = 0) -> Message:
        """The result of a request. `reissue`: how often to ask again, with a new id, when its stream broke."""
        listed_anew = False
        while True:
            try:
                with self.stream(method, params, timeout) as stream:
                    return self._result(method, stream, on_notification)
            except BrokenStream:
                if reissue <= 0:
                    raise
                reissue -= 1
            except McpError as error:
                # spec: Streamable HTTP › Client Behavior: SHOULD look for changes of the inputSchema, then retry
                if error.code == HEADER_MISMATCH and method == "tools/call" and not listed_anew:
                    self.list_tools()
                    listed_anew = True
                else:
                    self._choose_version(error)

    def _result(self, method: str, stream: ResponseStream, on_notification: Listener | None) -> Message:
        for message in stream:
            if "method" not in message:
                return result_of(method, message, stream.status)
            if on_notification:
                on_notification(message)
        raise BrokenStream("closed while it was read")

    def _choose_version(self, error: McpError) -> None:
        # spec: Versioning and Compatibility › Protocol Version Negotiation: SHOULD select a mutually supported one
        # and retry, or surface the error
        supported = supported_versions(error) if error.code == UNSUPPORTED_VERSION else []
        common = [version for version in self.versions[1:] if version in supported]
        if not common:
            raise error
        self.versions = common

    def list_tools(self) -> list[Message]:
        """The tools of all pages of tools/list whose x-mcp-header annotations are valid."""
        tools: list[Message] = []
        cursors: set[str] = set()
        params: Message = {}
        for _ in range(MAX_PAGES):
            page = self.request("tools/list", params, reissue=REISSUE)
            tools += tools_in(page)
            if (cursor := cursor_after(page, cursors)) is None:
                return self._keep(tools)
            cursors.add(cursor)
            params = {"cursor": cursor}
        raise McpError(None, f"tools/list has more than {MAX_PAGES} pages")

    def _keep(self, tools: list[Message]) -> list[Message]:
        # spec: Streamable HTTP › Schema Extension: MUST exclude an invalid tool, SHOULD log its name and the reason
        kept, dropped = valid_tools(tools)
        dropped += [("", "it has no name") for tool in kept if not isinstance(tool.get("name"), str)]
        kept = [tool for tool in kept if isinstance(tool.get("name"), str)]
        for name, reason in dropped:
            warn(f"left out tool {name!r:.80}: {reason}")
        self.tools = {tool["name"]: tool for tool in kept}
        return kept

    def call_tool(self, name: str, arguments: Message | None = None, *, progress: Progress | None = None,
                  log_level: str | None = None, log: Listener | None = None, answer: Answer | None = None,
                  on_task: Listener | None = None, timeout: float | None = TIMEOUT, reissue: int = 0) -> Message:
        """The CallToolResult, after as many rounds or as long a task as the server makes of the call.

        `log(params)` is called for each log message, `answer(key, input_request)` for what the server asks,
        `on_task(task)` with each state of a task. `reissue`: how often to call again after a broken stream, when
        nobody knows whether the tool has run. A tool's own hints do not decide that.
        """
        meta: Message = {"progressToken": next(self._ids)} if progress else {}
        if log_level:
            meta[LOG_LEVEL] = log_level
        if answer:  # capabilities belong to a request: this one has somebody to answer
            meta[CAPABILITIES] = {"elicitation": {}} | self.capabilities
        listener = partial(notify, progress, log)
        # spec: Tools › Tool: annotations are untrusted, so idempotentHint and readOnlyHint repeat nothing here
        issue = partial(self.request, "tools/call", on_notification=listener, timeout=timeout, reissue=reissue)
        result = rounds(issue, {"name": name, "arguments": arguments or {}, "_meta": meta}, answer or nobody)
        if result.get("resultType") == "task":
            result = self.follow_task(checked_task(result, "tools/call"), answer, on_task)
        check_output(self.tools.get(name, {}), result)
        return result

    def follow_task(self, task: Message, answer: Answer | None = None, on_task: Listener | None = None) -> Message:
        """The result of the request that became this task; `{"taskId": …}` is enough to go on after a crash.

        KeyboardInterrupt cancels the task. No other end of this client does, for a task has no stream to close.
        """
        answered: set[str] = set()  # keys of input requests
        try:
            # The call's own result (resultType "task") says only that there is a task; tasks/get says the rest.
            while task.get("resultType") == "task" or task.get("status") not in FINISHED:
                if on_task:
                    on_task(task)
                self._answer_task(task, answered, answer or nobody)
                self._wait(poll_seconds(task))
                state = self.request("tasks/get", {"taskId": task["taskId"]}, reissue=REISSUE)
                task = checked_task(state, "tasks/get")
        except KeyboardInterrupt:
            self.cancel_task(task["taskId"])
            raise
        if on_task:
            on_task(task)
        return outcome_of(task)

    def _answer_task(self, task: Message, answered: set[str], answer: Answer) -> None:
        # sep-2663 › Task Update Requests: a key stands for one request as long as the task lives
        new = {key: ask for key, ask in questions_in(task).items() if key not in answered}
        if new:
            responses = {key: answer(key, ask) for key, ask in new.items()}
            self.request("tasks/update", {"taskId": task["taskId"], "inputResponses": responses}, reissue=REISSUE)
            answered.update(new)

    def cancel_task(self, task_id: str) -> None:
        """Asks the server to stop a task; whether and when it does is for the server to decide."""
        self.request("tasks/cancel", {"taskId": task_id}, reissue=REISSUE)

    def listen(self, notifications: Message, timeout: float | None = None) -> Iterator[Message]:
        """The change notifications that the filter asks for, first the acknowledgment, until the server ends them.

        BrokenStream for any other end: listen again, and read anew what may have changed in between. What was asked
        for and is not granted is said on stderr; a stream that does not begin with an acknowledgment is an McpError.
        """
        acknowledged = False
        with self.stream("subscriptions/listen", {"notifications": notifications}, timeout) as stream:
            for message in stream:
                if "method" not in message:
                    result_of("subscriptions/listen", message, stream.status)
                    return
                if not acknowledged:
                    for problem in not_granted(notifications, granted_in(message)):
                        warn(problem)
                    acknowledged = True
                yield message


def notify(progress: Progress | None, log: Listener | None, message: Message) -> None:
    """Hands a notification on to who wants to know; one that says nothing is dropped."""
    if message["method"] == "notifications/progress" and progress and (seen := progress_in(message)):
        progress(*seen)
    elif message["method"] == "notifications/message" and log and isinstance(message.get("params"), dict):
        log(message["params"])


def rounds(issue: Callable[[Message], Message], params: Message, answer: Answer) -> Message:
    """Multi round trips: issues a request, and again with the answers, until its result asks for nothing more."""
    result = issue(params)
    for _ in range(MAX_ROUNDS):
        if result.get("resultType") != "input_required":
            return result
        # spec: Multi Round-Trip Requests › Client Requirements (Basic Workflow): the original params, the inputs
        # that were asked for, and requestState exactly as it came, or none if none came
        retry, questions = dict(params), questions_in(result)
        if questions:
            retry["inputResponses"] = {key: answer(key, ask) for key, ask in questions.items()}
        if "requestState" in result:
            retry["requestState"] = result["requestState"]
        elif not questions:
            raise McpError(None, "the server wants an answer and has asked nothing", result)
        result = issue(retry)
    raise McpError(None, f"the server still asks after {MAX_ROUNDS} rounds", result)


def nobody(key: str, input_request: Message) -> Message:
    """The answer of a caller that has none."""
    raise McpError(None, f"the server asks for {key!r} and nobody is here to answer", input_request)


def era(url: str, user: str = "alice", timeout: float | None = TIMEOUT) -> str:
    """A server's era: "modern", "legacy" if it waits for `initialize`, or "neither"."""
    return judge_era(url, user, timeout)[0]


def judge_era(url: str, user: str = "alice", timeout: float | None = TIMEOUT) -> tuple[str, str]:
    """A server's era and the reason; McpError if its answer tells nothing, as a 401 or a 503 does."""
    try:
        discovered = Client(url, user).request("server/discover", timeout=timeout)
        if isinstance(versions := discovered.get("supportedVersions"), list):
            return "modern", f"server/discover says that it speaks {', '.join(map(str, versions))[:200]}"
        return "legacy", "its answer to server/discover names no versions"
    except McpError as error:
        # spec: Streamable HTTP › Backward Compatibility: a modern error in the body decides, for both eras use
        # the same statuses. spec: Streamable HTTP › Protocol Version Header: an unknown method is 404 and -32601
        modern = error.code in (HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION)
        if modern or (error.code == METHOD_NOT_FOUND and error.status == 404):
            return "modern", f"HTTP {error.status} with an error of this revision in the body: {error}"
        # choice: any other JSON-RPC error with 200 is legacy too, because a modern server knows server/discover
        if error.code is not None and error.status in (200, 400, 404, 405):
            return "legacy", f"HTTP {error.status} with an error that is none of this revision's: {error}"
        if error.status in (400, 404, 405):
            return try_initialize(url, str(error), timeout)
        raise


def try_initialize(url: str, refusal: str, timeout: float | None) -> tuple[str, str]:
    """The era of a server that refused server/discover without a word of JSON-RPC: old, or no MCP server at all."""
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "lesson", "version": "1.0.0"}}
    message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}
    fields = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    answer: Any = None
    with suppress(McpError, BrokenStream), ResponseStream(url, message, fields, timeout) as stream:
        answer = next((one for one in stream if "method" not in one), None)
    if answer is None:
        return "neither", f"no MCP server is here: {refusal}, and no answer to initialize either"
    result = answer.get("result")
    version = result.get("protocolVersion") if isinstance(result, dict) else None
    return "legacy", f"{refusal} to server/discover, but initialize is answered" + (
        f" with version {version[:40]}" if isinstance(version, str) else "")


OPTIONS = {"--era", "--tasks", "--retry"}


def main(arguments: list[str]) -> int:
    """Judges a server's era, lists the tools or calls one; 0 for a result that is no error."""
    options, words = OPTIONS.intersection(arguments), [word for word in arguments if word not in OPTIONS]
    if not 1 <= len(words) <= (1 if "--era" in options else 3) or words[0].startswith("-"):
        print(__doc__, file=sys.stdout if words[:1] == ["--help"] else sys.stderr)
        return 0 if words[:1] == ["--help"] else 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal that is not UTF-8 cannot show comes as \N or \uNNNN
            stream.reconfigure(errors="backslashreplace")
    terminal = Terminal(words[0])
    try:
        return run(terminal, options, *words)
    except KeyboardInterrupt:
        gone = "closed the response stream: the request is cancelled"
        terminal.say(f"asked the server to cancel task {terminal.task_id}" if terminal.task_id else gone)
        return 130
    except (McpError, OSError, ValueError) as error:
        terminal.say(f"{type(error).__name__}: {error}")
        return 1


def run(terminal: Terminal, options: set[str], url: str, name: str = "", text: str = "{}") -> int:
    """What the command line asks for."""
    user, terminal.server = os.environ.get("MCP_USER", "alice"), parsed_url(url).netloc
    if "--era" in options:
        print(printable(": ".join(judge_era(url, user))))
        return 0
    able: Message = {"elicitation": {"form": {}, "url": {}}} | ({"extensions": {TASKS: {}}} if "--tasks" in options
                                                                  else {})
    client, arguments = Client(url, user, able), json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a tool are a JSON object, not {text[:80]}")
    tools = client.list_tools()  # a call needs them too: for the headers to mirror and for the schema of its result
    if not name:
        for tool in tools:
            print(printable(f"{tool['name']}: {tool.get('description', '')}"))
        return 0
    result = client.call_tool(name, arguments, progress=terminal.progress, answer=terminal.answer,
                              on_task=terminal.task, reissue="--retry" in options)
    terminal.end_bar()
    print(printable(json.dumps(result, indent=2, ensure_ascii=False)))
    return 1 if result.get("isError") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
