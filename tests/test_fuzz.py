"""A taste of `make fuzz`: a few hundred mutated inputs, every input that has failed once, and a few mutated starts."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import running

from reference_server import demo_server

sys.path.insert(0, str(Path(__file__).parent / "load"))
import fuzz
import fuzz_starts


def test_mutated_requests_get_well_formed_answers_and_harm_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """RFC 9112 §9.3: one answer a request, whatever arrives; Choice: no input causes a traceback."""
    inputs = [one for one in map(fuzz.make_input, range(300)) if not one.patient] + fuzz.read_kept()
    limits = {"request_timeout": 0.3, "idle_timeout": 0.3, "keep_alive": 0.1}
    with running(demo_server(step_seconds=0), **limits) as server, ThreadPoolExecutor(4) as pool:
        faults = list(pool.map(lambda one: fuzz.find_fault(server.port, one), inputs))
        assert fuzz.canary_lives(server.port)
    assert [(one, fault) for one, fault in zip(inputs, faults, strict=True) if fault] == []
    assert "Traceback" not in capsys.readouterr().err


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("answer", [
    OK + b"Content-Length: 5\r\n\r\nabc", OK + b"Content-Length: 0\r\n\r\nrest", b"HTTP/1.1 200 OK\n\n", b"rest",
    b"HTTP/1.1 299 Odd\r\nContent-Length: 0\r\n\r\n", OK + b"\r\n",
    OK + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", CHUNKED + b"b\r\ndata: {}\n\n\r\n0\r\n\r\n", CHUNKED + b"0\r\n\r\n0\r\n\r\n"])
def test_a_malformed_answer_is_seen(answer: bytes) -> None:
    """Choice: the fuzzer's own judgement is strict, because what it does not see is not tested."""
    with pytest.raises(ValueError):
        list(fuzz.parse_answers(answer, bodiless=False))


@pytest.mark.skipif(sys.platform != "linux", reason="the states of descriptors are Linux's")
def test_a_server_starts_well_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Choice: whatever a parent does to descriptors, and whatever an option's value is, no traceback and no hang."""
    assert fuzz_starts.run([0, 3, 5, 8, 12, 13, 14, 15]) == 0, capsys.readouterr().out


STARTS = {"plain": fuzz_starts.Start(False, [], ("pipe", "pipe", "pipe"), False),
          "edge": fuzz_starts.Start(False, [("--rate", "nan")], ("pipe", "pipe", "pipe"), True),
          "stdio": fuzz_starts.Start(True, [], ("pipe", "broken", "pipe"), False)}


@pytest.mark.parametrize(("start", "served", "status", "text"), [
    ("plain", True, 1, ""), ("plain", True, 0, "Traceback (most recent call last):"), ("plain", False, 1, "No."),
    ("plain", False, 0, ""), ("edge", False, 0, ""), ("edge", False, 2, ""), ("edge", False, 1, "One.\nTwo."),
    ("stdio", False, 0, ""), ("stdio", False, 1, "")])
def test_a_bad_start_is_seen(start: str, served: bool, status: int, text: str) -> None:
    """Choice: the same for starts; the right ones pass."""
    assert fuzz_starts.judge(STARTS[start], served, status, text)
    assert fuzz_starts.judge(STARTS["plain"], True, 0, "whatever it logs") is None
    assert fuzz_starts.judge(STARTS["edge"], False, 2, "usage: x\n       [y]\nx: error: no number") is None
    assert fuzz_starts.judge(STARTS["stdio"], False, 1, "Nobody reads stdout any more.") is None
