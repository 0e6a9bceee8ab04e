"""What a person sees of the client: progress, tasks and questions, all on stderr, so that stdout is the result.

Everything a server sends is printed without control characters, since those could steer the terminal.
"""

import json
import sys
from typing import Any
from urllib.parse import urlsplit

Message = dict[str, Any]  # a JSON object


def printable(text: str) -> str:
    """The text with U+FFFD for control characters."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def warn(text: str) -> None:
    """One line on stderr."""
    print(printable(text), file=sys.stderr)


class Terminal:
    """The person in front of `server`, who watches and answers."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.task_id: str | None = None  # the task that is being followed
        self._bar = False  # the cursor stands behind a bar

    def say(self, text: str) -> None:
        """A line of its own, below the bar if there is one."""
        self.end_bar()
        warn(text)

    def end_bar(self) -> None:
        """Leaves the line of the bar, if there is one."""
        if self._bar:
            warn("")
        self._bar = False

    def progress(self, done: float, total: float | None, message: str | None) -> None:
        """A bar, drawn over the last one, on a terminal; a plain line elsewhere."""
        text = f"{done:g}" + (f"/{total:g}" if total else "") + (f" {message}" if message else "")
        if not sys.stderr.isatty():
            return self.say(text)
        filled = int(30 * min(max(done / total, 0), 1)) if total else 0
        print(f"\r[{'#' * filled:.<30}] {printable(text)}\x1b[K", end="", file=sys.stderr, flush=True)
        self._bar = True

    def task(self, task: Message) -> None:
        """One line for each state of a task."""
        self.task_id = task["taskId"]
        self.say(f"task {task['taskId']}: {task.get('status')} {task.get('statusMessage', '')}".rstrip())

    def answer(self, key: str, input_request: Message) -> Message:
        """Shows what the server asks and reads the answer; end of file (Ctrl-D) is "cancel"."""
        if input_request["method"] != "elicitation/create":
            raise ValueError(f"nobody here can answer {input_request['method']} ({key})")
        params = input_request.get("params", {})
        # spec: Elicitation › User Interaction Model: make clear which server asks, provide decline and cancel
        self.say(f"{self.server} asks: {params.get('message', '(it does not say what)')}")
        try:
            return self._open_page(params.get("url")) if params.get("mode") == "url" else self._fill_form(params)
        except EOFError:
            return {"action": "cancel"}

    def _open_page(self, url: Any) -> Message:
        if not isinstance(url, str):
            raise ValueError("the server asks to open a page and does not say which")
        # spec: Elicitation › User Interaction Model: display the target host, gather consent before navigation
        self.say(f"It asks you to open a page on {urlsplit(url).hostname}: {url}")
        return {"action": "accept" if self._ask("Will you open it? [y/n]") == "y" else "decline"}

    def _fill_form(self, params: Message) -> Message:
        # spec: Elicitation › User Interaction Model: allow users to review and modify before sending
        schema = params.get("requestedSchema")
        fields = schema.get("properties") if isinstance(schema, dict) else None
        if not isinstance(fields, dict) or not all(isinstance(field, dict) for field in fields.values()):
            raise ValueError("the server asks for a form and does not say which fields it has")
        while True:
            filled = [(name, self._fill(name, field)) for name, field in fields.items()]
            content = {name: value for name, value in filled if value is not None}
            self.say(f"Your answer: {json.dumps(content, ensure_ascii=False)}")
            match self._ask("Send it? [y]es, [n]o, or [e]dit"):
                case "y":
                    return {"action": "accept", "content": content}
                case "n":
                    return {"action": "decline"}

    def _fill(self, name: str, field: Message) -> Any:
        choices = choices_of(field.get("items", field))
        hint = f"{field.get('type')} {choices or ''} {field.get('description', '')}".rstrip()
        text = self._ask(f"{field.get('title', name)} ({hint}), empty for {field.get('default', 'none')}:")
        if not text:
            return field.get("default")
        if field.get("type") == "boolean":
            text = {"y": "true", "yes": "true", "n": "false", "no": "false"}.get(text.lower(), text)
        try:
            return text if field.get("type") == "string" else json.loads(text)
        except ValueError:
            return text  # the server knows best what is wrong with it

    def _ask(self, question: str) -> str:
        print(printable(question), end=" ", file=sys.stderr, flush=True)
        return input().strip()


def choices_of(schema: Any) -> list[Any]:
    """What a field may be, as far as its schema says so."""
    if not isinstance(schema, dict):
        return []
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    options = schema.get("oneOf") or schema.get("anyOf")
    return [one["const"] for one in options if isinstance(one, dict) and "const" in one] if isinstance(
        options, list) else []
