"""The client against a server that answers as it is told: what is repeated, and what is not."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sparksmith.draft.errors import UserError
from sparksmith.verify.endpoint import Endpoint, RequestError, Retries

ANSWER = {
    "choices": [
        {
            "index": 0,
            "message": {"content": "hello", "reasoning_content": "hm"},
            "finish_reason": "stop",
            "token_ids": [5, 6],
        }
    ],
    "prompt_token_ids": [1, 2, 3],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
QUICK = Retries(attempts=3, first=0.01, longest=0.02)


class Told(ThreadingHTTPServer):
    """Answers each POST with the next of `answers`: (status, headers, body)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[tuple[int, dict[str, str], Any]] = []
        self.models: Any = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 99}]}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Told

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say(200, {}, self.server.models)
        else:
            self._say(404, {}, {"error": "no"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append({"path": self.path, **json.loads(body)})
        self.server.headers.append(dict(self.headers))
        self._say(*self.server.answers.pop(0))

    def _say(self, status: int, headers: dict[str, str], body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Told]:
    made = Told()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def client(server: Told, **options: Any) -> Endpoint:
    made = Endpoint(server.url, retries=QUICK, **options)
    made.describe()
    return made


def ask(endpoint: Endpoint) -> Any:
    return endpoint.complete([{"role": "user", "content": "hi"}], {"max_tokens": 4})


def test_an_answer_with_everything_that_was_told(server: Told) -> None:
    server.answers = [(200, {}, ANSWER)]
    answer = ask(client(server))
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("hello", "hm", "stop")
    assert (answer.token_ids, answer.prompt_token_ids) == ([5, 6], [1, 2, 3])
    assert (answer.prompt_tokens, answer.completion_tokens, answer.sent) == (3, 2, 1)
    (asked,) = server.asked
    assert asked["path"] == "/v1/chat/completions"
    assert asked["return_token_ids"] is True
    assert asked["model"] == "m"


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int, server: Told) -> None:
    server.answers = [(status, {}, {"error": "busy"})] * 2 + [(200, {}, ANSWER)]
    assert ask(client(server)).sent == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_cannot_pass_is_not(status: int, server: Told) -> None:
    server.answers = [(status, {}, {"error": {"message": "too long for me"}})]
    with pytest.raises(RequestError, match=f"HTTP {status}: too long for me") as caught:
        ask(client(server))
    assert caught.value.sent == 1


def test_it_gives_up_and_says_how_often_it_tried(server: Told) -> None:
    server.answers = [(503, {}, {"error": "busy"})] * 3
    with pytest.raises(RequestError, match=r"HTTP 503: busy \(3 times\)") as caught:
        ask(client(server))
    assert caught.value.sent == 3


def test_it_waits_as_long_as_it_is_asked_to(server: Told) -> None:
    server.answers = [(429, {"Retry-After": "0.4"}, {"error": "slow down"}), (200, {}, ANSWER)]
    start = time.monotonic()
    assert ask(client(server)).sent == 2
    assert time.monotonic() - start >= 0.4


def test_it_does_not_wait_for_hours(server: Told) -> None:
    server.answers = [(429, {"Retry-After": "7200"}, {"error": "tomorrow"})]
    with pytest.raises(RequestError, match="asks to wait 7200 s"):
        ask(client(server))


@pytest.mark.parametrize("body", [b"<html>", b'{"choices": []}', b"[]", b""])
def test_nonsense_is_asked_for_again(body: bytes, server: Told) -> None:
    server.answers = [(200, {}, body), (200, {}, ANSWER)]
    assert ask(client(server)).sent == 2


def test_a_server_that_knows_no_token_ids_is_asked_without(server: Told) -> None:
    refusal = {"error": {"message": "unknown field return_token_ids"}}
    plain = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}
    server.answers = [(400, {}, refusal), (200, {}, plain), (200, {}, plain)]
    endpoint = client(server)
    assert ask(endpoint).token_ids is None
    ask(endpoint)
    assert ["return_token_ids" in asked for asked in server.asked] == [True, False, False]


def test_a_redirect_is_not_followed(server: Told) -> None:
    """To another host the key would go along."""
    server.answers = [(307, {"Location": "http://elsewhere.example/"}, {})]
    with pytest.raises(RequestError, match=r"redirects to http://elsewhere\.example/"):
        ask(client(server))


def test_the_key_goes_to_the_server_and_into_no_message(
    server: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKSMITH_API_KEY", "sk-secret")
    server.answers = [(403, {}, {"error": "no"})]
    with pytest.raises(RequestError) as caught:
        ask(client(server))
    assert server.headers[0]["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(caught.value)


def test_a_stream_is_put_together_by_tokens_and_not_by_pieces(server: Told) -> None:
    def event(**choice: Any) -> str:
        return "data: " + json.dumps({"choices": [{"index": 0, **choice}]}) + "\n\n"

    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
    usage["metrics"] = {
        "speculative_decoding": {
            "per_step_accepted": [2],
            "per_step_drafted": [4],
            "num_spec_tokens": 4,
        }
    }
    text = (
        event(delta={"role": "assistant", "content": ""})
        + event(delta={"content": "a"}, token_ids=[1])
        + ": a comment\n\n"
        + event(delta={"content": "bcd"}, token_ids=[2, 3, 4], finish_reason="stop")
        + f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n"
    )
    server.answers = [(200, {"Content-Type": "text/event-stream"}, text.encode())]
    pieces = []
    endpoint = client(server)
    answer = endpoint.complete(
        [9], {}, stream=True, on_piece=lambda text, tokens: pieces.append((text, tokens))
    )
    assert (answer.text, answer.token_ids) == ("abcd", [1, 2, 3, 4])
    assert [count for _, count in answer.arrivals] == [1, 4]
    assert pieces == [("a", 1), ("bcd", 3)]
    assert answer.steps is not None
    assert (answer.steps.accepted, answer.steps.drafted) == ([2], [4])
    assert server.asked[0]["path"] == "/v1/completions"


def test_a_stream_that_ends_early_is_asked_for_again(server: Told) -> None:
    cut = b'data: {"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]}\n\n'
    whole = cut + b'data: {"choices": [{"delta": {"content": ""}, "finish_reason": "length"}]}\n\n'
    server.answers = [(200, {}, cut), (200, {}, whole)]
    answer = client(server).complete([9], {}, stream=True)
    assert (answer.sent, answer.token_ids, answer.finish_reason) == (2, [1], "length")


@pytest.mark.parametrize(
    ("url", "said"), [("ftp://x", "is no URL"), ("http://127.0.0.1:1", "does not answer")]
)
def test_a_wrong_address(url: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Endpoint(url, retries=QUICK).describe()


def test_which_model(server: Told) -> None:
    server.models = {"data": [{"id": "a"}, {"id": "b"}]}
    with pytest.raises(UserError, match="several"):
        Endpoint(server.url).describe()
    with pytest.raises(UserError, match="is not served"):
        Endpoint(server.url, model="c").describe()
    assert Endpoint(server.url + "/v1/", model="b").describe().model == "b"
    server.models = ["nothing"]
    with pytest.raises(UserError, match="no OpenAI-compatible server"):
        Endpoint(server.url).describe()
