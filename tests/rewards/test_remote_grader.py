from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from reward_cases import answered

from limes.config.reward import RewardConfig
from limes.rewards import Grade, build_grader
from limes.rewards.remote import RemoteGrader


class Server:
    """Answers each request with the next of `replies`: (status, body), or None for no answer; then with the last."""

    def __init__(self, replies, address="127.0.0.1", family=None):
        self.replies, self.bodies = list(replies), []
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                if reply is None:
                    server.released.wait(60)
                    self.close_connection = True
                    return
                status, body = reply
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        class Threads(ThreadingHTTPServer):
            daemon_threads = True
            if family is not None:
                address_family = family

        self.http = Threads((address, 0), Handler)
        self.port = self.http.server_address[1]
        self.url = f"http://{address}:{self.port}/score"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()


def ask(url, samples=None, **options) -> list[Grade]:
    async def run():
        grader = RemoteGrader(url, **options)
        found = await grader.grade(samples or [answered("5", "5", prompt="2+3?", metadata={"row": 1})])
        await grader.close()
        await grader.close()
        return found

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("0.5", 0.5),
        ("1", 1.0),
        ("true", 1.0),
        ("null", None),
        ('{"score": 0.25, "why": "x"}', {"score": 0.25, "why": "x"}),
    ],
)
def test_answers(body, reward):
    with Server([(200, body)]) as server:
        assert ask(server.url) == [Grade(reward)]
    assert server.bodies == [{"prompt": "2+3?", "response": "5", "label": "5", "metadata": {"row": 1}}]


def test_messages_and_odd_characters_travel():
    sample = answered("\ud800 \u00e9", {"a": [1]}, prompt=[{"role": "user", "content": "hi"}])
    with Server([(200, "1")]) as server:
        assert ask(server.url, [sample]) == [Grade(1.0)]
    (body,) = server.bodies
    assert (body["response"], body["label"], body["prompt"]) == (sample.response, sample.label, sample.prompt)


def test_key_of_the_settings_must_be_there():
    with Server([(200, '{"quality": 0.25}')]) as server:
        assert ask(server.url, key="quality") == [Grade({"quality": 0.25})]
        (grade,) = ask(server.url)
    assert grade.reward is None
    assert "no entry 'score'" in grade.error


def test_two_errors_then_an_answer():
    with Server([(500, "oops"), (429, "busy"), (200, "1")]) as server:
        assert ask(server.url, backoff_s=0.01) == [Grade(1.0)]
    assert len(server.bodies) == 3


def test_errors_that_do_not_pass():
    with Server([(503, "down")]) as server:
        (grade,) = ask(server.url, backoff_s=0.01, retries=2)
    assert grade.reward is None
    assert grade.error.startswith("RemoteFault: ")
    assert "3 tries" in grade.error
    assert "503" in grade.error
    assert "down" in grade.error
    assert len(server.bodies) == 3


def test_wrong_requests_are_not_repeated():
    with Server([(404, "no such path")]) as server:
        (grade,) = ask(server.url)
    assert "404" in grade.error
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "body", ["", "<html>", '"good"', "[1]", "NaN", "Infinity", "{}", '{"score": "1"}', '{"score": NaN}']
)
def test_garbage_is_an_error_and_never_a_reward(body):
    with Server([(200, body)]) as server:
        (grade,) = ask(server.url)
    assert grade.reward is None
    assert grade.error
    assert len(server.bodies) == 1


def test_u120_server_that_never_answers_is_an_error_within_the_limit():
    with Server([None]) as server:
        found = ask(server.url, [answered("1"), answered("2")], timeout_s=0.3)
    assert [grade.reward for grade in found] == [None, None]
    assert all(grade.error.startswith("TimedOut: ") and "0.3 s" in grade.error for grade in found)


def test_a_try_that_hangs_is_repeated():
    with Server([None, (200, "1")]) as server:
        assert ask(server.url, try_timeout_s=0.3, backoff_s=0.01, timeout_s=30) == [Grade(1.0)]


def test_nobody_listens():
    with Server([(200, "1")]) as server:
        url = server.url
    (grade,) = ask(url, retries=1, backoff_s=0.01)
    assert grade.error.startswith("RemoteFault: ")
    assert "ConnectError" in grade.error


def test_one_bad_sample_costs_itself():
    with Server([(200, "1")]) as server:
        found = ask(server.url, [answered("1"), answered("2", object()), answered("3")])
    assert [grade.reward for grade in found] == [1.0, None, 1.0]
    assert found[1].error.startswith("TypeError")


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Server([(200, "1")]) as server:
        assert ask(server.url) == [Grade(1.0)]


def test_more_samples_than_connections():
    with Server([(200, "1")]) as server:
        assert ask(server.url, [answered("1")] * 20, max_connections=2) == [Grade(1.0)] * 20


def test_one_grader_serves_several_event_loops():
    with Server([(200, "1")]) as server:
        grader = RemoteGrader(server.url)

        async def run():
            found = await grader.grade([answered("1")] * 3)
            await grader.close()
            return found

        assert asyncio.run(run()) == asyncio.run(run()) == [Grade(1.0)] * 3


def test_ipv6():
    import socket

    try:
        server = Server([(200, "1")], address="::1", family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with server:
        assert ask(f"http://[::1]:{server.port}/score") == [Grade(1.0)]


@pytest.mark.parametrize("url", ["", "localhost:8000/score", "ftp://host/x", "http://", "http://::1:8000/x"])
def test_urls_that_are_none_are_refused_at_build(url):
    with pytest.raises(ValueError, match=r"reward\.options: url = .*\[::1\]"):
        build_grader(RewardConfig(kind="remote", options={"url": url}))
