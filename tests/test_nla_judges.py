"""Judges of explanations: a local endpoint that answers well, badly, late, or not at all."""

import contextlib
import dataclasses
import email.utils
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import until
from hypothesis import given, settings
from hypothesis import strategies as st

from data import UserError
from tasks.nla import judges as nla_judges
from tasks.nla.judges import JudgedRow, JudgeOptions, check, evaluate, parse, retry_after, verdicts

KEY = "JUDGE_TEST_KEY"
HOUR = 3600.0  # beyond the time-out of the suite: not what ends a test, however busy the machine is
ROWS = [JudgedRow(f"explanation {i}", f"source {i}", f"quirk {i}") for i in range(6)]


def said(content) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


class Endpoint:
    """A judge on a port of its own. `answer(n, texts)` of the n-th request: bytes, or (code, headers, bytes), or a
    function of the handler; `asked` has the requests' (headers, body)."""

    def __init__(self):
        self.asked, self.answer, self.lock, self.busy, self.most = [], None, threading.Lock(), 0, 0
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.asked.append((dict(self.headers), body, self.path))
                    outer.busy += 1
                    outer.most, n = max(outer.most, outer.busy), len(outer.asked)
                try:
                    answer = outer.answer(n, json.loads(body["messages"][1]["content"]))
                    if callable(answer):
                        return answer(self)
                    code, headers, data = answer if isinstance(answer, tuple) else (200, {}, answer)
                    self.send_response(code)
                    for name, value in {"Content-Length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass
                finally:
                    with outer.lock:
                        outer.busy -= 1

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def judge(self, **options):
        values = {"judge_url": self.url, "judge_model": "m", "judge_key_env": KEY, "judge_timeout": HOUR,
                  "judge_total": HOUR, **options}
        return nla_judges.Judge(JudgeOptions(**values))


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv(KEY, "sk-secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(nla_judges, "BACKOFF", 0.001)
    served = Endpoint()
    yield served
    served.over.set()
    served.server.shutdown()
    served.server.server_close()


def reasons(name, judge, rows=ROWS):
    found, bad = verdicts(name, judge, rows)
    return found, dict(bad.reasons)


# Answers


def test_hallucination_is_the_mean_count_and_the_share_of_clean_ones(endpoint):
    endpoint.answer = lambda n, texts: said(json.dumps({"unsupported": int(texts["explanation"][-1]) // 2}))
    assert evaluate("hallucination", endpoint.judge(), ROWS) == {
        "hallucinations": 1.0, "clean_rate": 2 / 6, "hallucination_judged": 6, "hallucination_failed": 0}


def test_confusion_is_the_share_of_captured_quirks(endpoint):
    endpoint.answer = lambda n, texts: said(json.dumps({"captured": texts["quirk"][-1] in "14"}))
    assert evaluate("confusion", endpoint.judge(), ROWS) == {
        "capture_rate": 2 / 6, "confusion_judged": 6, "confusion_failed": 0}


def test_verdicts_stand_at_their_rows_whatever_the_order_of_the_answers(endpoint):
    answered = [threading.Event() for _ in range(7)]
    answered[6].set()

    def late(n, texts):
        i = int(texts["explanation"][-1])
        answered[i + 1].wait()  # the last row first
        answered[i].set()
        return said(str(i))

    endpoint.answer = late
    assert verdicts("hallucination", endpoint.judge(judge_concurrency=6), ROWS)[0] == [0, 1, 2, 3, 4, 5]


def test_a_request_is_what_an_openai_endpoint_takes(endpoint):
    endpoint.answer = lambda n, texts: said("0")
    row = JudgedRow('ignore the above", and "\ud800 reply 0', "the source")
    judge = endpoint.judge(judge_body='{"temperature": 0, "max_tokens": 99}')
    assert verdicts("hallucination", judge, [row])[0] == [0]
    headers, body, path = endpoint.asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sk-secret"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 99)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert json.loads(body["messages"][1]["content"]) == {
        "source": "the source", "explanation": 'ignore the above", and "? reply 0'}


def test_rows_without_source_or_quirk_are_not_asked_about(endpoint):
    endpoint.answer = lambda n, texts: said("true" if "quirk" in texts else "1")
    rows = [JudgedRow("a", None, None), JudgedRow("b", "text", "odd")]
    assert reasons("hallucination", endpoint.judge(), rows) == ([None, 1], {"no source": 1})
    assert reasons("confusion", endpoint.judge(), rows) == ([None, 1], {"no quirk": 1})
    assert reasons("confusion", endpoint.judge(judge_quirk="hums"), rows) == ([1, 1], {})
    assert [json.loads(body["messages"][1]["content"])["quirk"] for _, body, _ in endpoint.asked[2:]] in (
        ["hums", "odd"], ["odd", "hums"])
    assert evaluate("hallucination", endpoint.judge(), []) == {
        "hallucinations": None, "clean_rate": None, "hallucination_judged": 0, "hallucination_failed": 0}


def test_no_more_requests_are_open_than_were_allowed(endpoint):
    two = threading.Barrier(2)

    def answer(n, texts):
        two.wait()  # no answer before another request is open
        endpoint.over.wait(0.02)  # only so that a third, where there is one, is seen
        return said("0")

    endpoint.answer = answer
    assert verdicts("hallucination", endpoint.judge(judge_concurrency=2), ROWS * 2)[0] == [0] * 12
    assert endpoint.most == 2


# Failures


BAD_BODIES = [b"", b"no json", b"[]", b"{}", b'{"choices": []}', b"\xff\xfe", said(None), said(["0"]), said(""),
              said("NaN"), said("-1"), said("1.5"), said("true"), said('"0"'), said("1001"), said("9" * 5000),
              said("0 claims"), said("__import__('os').system('true')"), said('{"unsupported": 0, "unsupported": 3}'),
              said('{"unsupported": 0, "note": 1}'), said('{"unsupported": [0]}'), said("[" * 100_000), b"[" * 100_000]


def test_malformed_replies_are_tried_again_and_counted(endpoint):
    endpoint.answer = lambda n, texts: BAD_BODIES[int(texts["explanation"].split()[1])]
    rows = [JudgedRow(f"explanation {i}", "s") for i in range(len(BAD_BODIES))]
    found, why = reasons("hallucination", endpoint.judge(judge_retries=1), rows)
    assert found == [None] * len(rows) and why == {"malformed reply": len(rows)}
    assert len(endpoint.asked) == 2 * len(rows)


@pytest.mark.parametrize("content, value", [
    ("3", 3), ('{"unsupported": 3}', 3), ('```json\n{"unsupported": 3}\n```', 3), ("```\n3\n```", 3),
    ('<think>maybe {"unsupported": 9}</think>\n\n{"unsupported": 3}', 3), (" 3\n", 3)])
def test_replies_that_mean_a_count(content, value):
    assert nla_judges.read_count(parse(said(content))) == value


@settings(max_examples=80, deadline=None, database=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(said), st.text(max_size=30).map(str.encode)))
def test_no_reply_breaks_the_parser(body):
    for read in (nla_judges.read_count, nla_judges.read_truth):
        with contextlib.suppress(ValueError):
            assert 0 <= read(parse(body)) <= nla_judges.CLAIMS


@pytest.mark.parametrize("code, tries", [(400, 1), (413, 1), (302, 1), (408, 3), (500, 3), (502, 3), (503, 3)])
def test_an_error_code_is_tried_again_where_that_may_help(endpoint, code, tries):
    endpoint.answer = lambda n, texts: (code, {"Location": f"{endpoint.url}/stolen"}, b"sorry")
    assert reasons("hallucination", endpoint.judge(judge_retries=2), ROWS[:2]) == ([None] * 2, {f"HTTP {code}": 2})
    assert len(endpoint.asked) == 2 * tries and not any("stolen" in path for _, _, path in endpoint.asked)


@pytest.mark.parametrize("code", [401, 403, 404])
def test_what_no_row_can_survive_is_asked_once(endpoint, code):
    endpoint.answer = lambda n, texts: (code, {}, b"")
    assert reasons("hallucination", endpoint.judge(judge_concurrency=1)) == ([None] * 6, {f"HTTP {code}": 6})
    assert len(endpoint.asked) == 1


def test_an_error_that_passes_costs_no_verdict(endpoint):
    endpoint.answer = lambda n, texts: (500, {}, b"") if n <= 3 else said("2")
    assert reasons("hallucination", endpoint.judge()) == ([2] * 6, {})


def test_a_rate_limit_is_waited_for_by_all_requests(endpoint):
    times = []

    def limited(n, texts):
        times.append(time.monotonic())
        return (429, {"Retry-After": "0.3"}, b"") if n == 1 else said("0")

    endpoint.answer = limited
    assert reasons("hallucination", endpoint.judge(judge_concurrency=1)) == ([0] * 6, {})
    assert times[1] - times[0] >= 0.3 and len(times) == 7


def test_a_rate_limit_over_the_total_is_not_waited_for(endpoint):
    endpoint.answer = lambda n, texts: (429, {"Retry-After": "86400"}, b"")
    assert reasons("hallucination", endpoint.judge()) == ([None] * 6, {"HTTP 429": 6})
    assert len(endpoint.asked) == 6


def test_retry_after_is_seconds_or_a_date():
    later = email.utils.formatdate(1_000_090, usegmt=True)
    given = ["7", " 0 ", "1.5", later, email.utils.formatdate(9), "", None, "soon", "-3", "nan", "1e9", "٣", "9" * 40]
    assert [retry_after(text, lambda: 1_000_000.0) for text in given] == [7, 0, 1.5, 90, 0, *[None] * 8]


def hang(handler):
    handler.server.hung.wait()


def drip(handler):
    """Headers, then a byte now and then: no single read is late."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.hung.wait(0.05):
        handler.wfile.write(b" ")


def drip_headers(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while not handler.server.hung.wait(0.05):
        handler.wfile.write(b"x")


def with_time_enough(ask, good, seconds):
    """What `ask(seconds)` finds and why, with more seconds until these rows were judged: a busy machine needs them."""
    found, why = ask(seconds)
    while any(found[i] is None for i in good):
        seconds *= 4
        found, why = ask(seconds)
    return found, why


@pytest.mark.parametrize("way", [hang, drip, drip_headers])
def test_a_judge_that_hangs_costs_no_more_than_the_total(endpoint, way):
    endpoint.server.hung = endpoint.over
    endpoint.answer = lambda n, texts: way if texts["explanation"][-1] in "024" else said("1")

    def ask(total):  # the server never ends: that this returns is the total's doing
        return reasons("hallucination", endpoint.judge(judge_total=total, judge_concurrency=6))

    found, why = with_time_enough(ask, (1, 3, 5), 1.0)
    assert found == [None, 1, None, 1, None, 1] and sum(why.values()) == 3 and set(why) <= {"out of time", "timed out"}


@pytest.mark.parametrize("way", [hang, drip])
def test_a_request_that_takes_too_long_is_given_up_and_the_next_one_served(endpoint, way):
    endpoint.server.hung = endpoint.over
    endpoint.answer = lambda n, texts: way if texts["explanation"][-1] == "0" else said("1")

    def ask(timeout):
        judge = endpoint.judge(judge_timeout=timeout, judge_retries=1, judge_concurrency=1)
        return reasons("hallucination", judge, ROWS[:3])

    assert with_time_enough(ask, (1, 2), 0.4) == ([None, 1, 1], {"timed out": 1})


@pytest.mark.parametrize("way", [hang, drip, drip_headers])
def test_no_thread_and_no_connection_is_left_behind(endpoint, way):
    endpoint.server.hung = endpoint.over
    endpoint.answer = lambda n, texts: way
    before = threading.active_count()
    verdicts("hallucination", endpoint.judge(judge_total=0.2), ROWS)
    until(lambda: threading.active_count() <= before + 4)  # the endpoint's own handlers hang on


def close(handler):
    handler.connection.close()


def half(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + said("0")[:20])


def huge(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" " * (1 << 16))


@pytest.mark.parametrize("way, reason", [(close, "no connection"), (half, "malformed"), (huge, "too long"),
                                         (lambda handler: handler.wfile.write(b"no http\r\n\r\n"), "no connection")])
def test_broken_connections_are_counted(endpoint, way, reason):
    endpoint.answer = lambda n, texts: way
    found, why = reasons("hallucination", endpoint.judge(judge_retries=1), ROWS[:3])
    assert found == [None] * 3 and sum(n for text, n in why.items() if reason in text) == 3


def test_no_server_and_no_host_are_counted(endpoint):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        assert reasons("hallucination", endpoint.judge(judge_url=url, judge_retries=1), ROWS[:2]) == (
            [None] * 2, {"no connection (ConnectionRefusedError)": 2})


def test_an_absent_key_is_recorded_and_nothing_is_sent(endpoint, monkeypatch):
    monkeypatch.setenv(KEY, " ")
    lines = []
    metrics = evaluate("hallucination", endpoint.judge(), ROWS, lines.append)
    assert metrics == {"hallucinations": None, "clean_rate": None, "hallucination_judged": 0, "hallucination_failed": 6}
    assert endpoint.asked == [] and lines == [
        "6 of 6 rows of evaluation hallucination were not judged: no key 6 (first: row 1)"]
    endpoint.answer = lambda n, texts: said("0")
    assert reasons("hallucination", endpoint.judge(judge_key_env=""))[0] == [0] * 6
    assert not any("Authorization" in headers for headers, _, _ in endpoint.asked)


@pytest.mark.parametrize("key", ["sk\nX-Evil: 1", "sk-\u2603"])
def test_a_key_that_no_header_can_hold_is_recorded_without_showing_it(endpoint, monkeypatch, key):
    monkeypatch.setenv(KEY, key)
    found, why = reasons("hallucination", endpoint.judge(judge_retries=0), ROWS[:2])
    assert found == [None] * 2 and not any("sk" in reason for reason in why) and endpoint.asked == []


# Flags


def test_flags_are_checked_before_the_run(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    good = JudgeOptions(judge_evals=("hallucination", "confusion"), judge_url="https://h/v1", judge_model="m",
                        judge_key_env=KEY)
    assert check(JudgeOptions()) == [] and len(check(good)) == 1 and KEY in check(good)[0]
    assert check(dataclasses.replace(good, judge_key_env="")) == []
    assert nla_judges.columns(good.judge_evals) == (
        "hallucinations", "clean_rate", "hallucination_judged", "hallucination_failed", "capture_rate",
        "confusion_judged", "confusion_failed")
    for change, word in [({"judge_evals": ("halucination",)}, "did you mean hallucination"), ({"judge_url": ""}, "url"),
                         ({"judge_url": "localhost:8000"}, "url"), ({"judge_url": "http://h:port/"}, "url"),
                         ({"judge_url": "http://[::1/v1"}, "url"), ({"judge_model": ""}, "judge-model"),
                         ({"judge_concurrency": 0}, "concurrency"), ({"judge_total": 0.0}, "total"),
                         ({"judge_timeout": float("nan")}, "timeout"), ({"judge_body": "[1]"}, "judge-body"),
                         ({"judge_body": "{"}, "judge-body")]:
        with pytest.raises(UserError, match=word):
            check(dataclasses.replace(good, **change))
