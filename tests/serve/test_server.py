"""The server under the real ``openai`` client, over a real socket."""

import contextlib
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn
from starlette.testclient import TestClient

import jspec
from jspec import drafters
from jspec.serve.engine import Engine
from jspec.serve.server import Limits, Server
from jspec.testing import tiny
from jspec.testing.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}>"
)
MODEL = tiny.model(seed=3, tokenizer=TOKENIZER, vocab_size=257)
CONTEXT, KEY = 160, "a secret"


@contextlib.contextmanager
def listening(server):
    """Runs a server on a free port; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(server.app, port=port, log_level="error", ws="none")
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run)
    thread.start()
    while not runner.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    runner.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def engine():
    draft = jspec.Draft(drafters.ngram(gamma=3, longest=2, shortest=1), name="ngram")
    made = Engine(MODEL, draft, sizes=3, context=CONTEXT, queue=4, log_prob=True)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def address(engine):
    """Of a server that was stopped and started again over the same engine."""
    with listening(Server(engine, "tiny")) as url:
        got = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert got.json()["usage"]["completion_tokens"] == 16
    assert engine.load == (0, 0) and not engine.serving
    limits = Limits(body=4000, tokens=100)
    with listening(Server(engine, "tiny", KEY, limits)) as url:
        yield url


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(
        base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=60
    ) as made:
        yield made


def expected(prompt, **options):
    return jspec.generate(
        MODEL, None, [prompt], slots=CONTEXT, log_prob=True, **options
    )


def test_a_completion(client):
    want = expected("hello hello", max_new_tokens=20, chat=False)
    got = client.completions.create(
        model="tiny", prompt="hello hello", max_tokens=20, temperature=0, logprobs=0
    )
    assert got.choices[0].text == want.text[0]
    assert got.choices[0].finish_reason == "length"
    assert got.choices[0].logprobs.token_logprobs == pytest.approx(
        want.log_prob[0], abs=1e-4
    )
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (11, 20)
    drafts = got.usage.speculation
    assert drafts["rounds"] + drafts["accepted"] == 20
    details = got.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == drafts["accepted"]


def test_a_seed_gives_the_text_of_generate(client):
    options = dict(temperature=0.8, top_p=0.9, seed=7)
    want = expected([1, 2, 3], max_new_tokens=12, **{**options, "seed": [7]})
    got = client.completions.create(
        model="tiny", prompt=[1, 2, 3], max_tokens=12, **options
    )
    assert got.choices[0].text == want.text[0]


def test_a_chat_streams(client):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    want = expected("system:s;user:hi;>", max_new_tokens=30, chat=False)
    options = dict(model="tiny", messages=messages, max_tokens=30, temperature=0)
    whole = client.chat.completions.create(**options, logprobs=True)
    assert whole.choices[0].message.content == want.text[0]
    assert len(whole.choices[0].logprobs.content) == 30
    events = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(e.choices[0].delta.content for e in events if e.choices)
    assert text == want.text[0]
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_not_part_of_the_text(client, stream):
    text = expected("abc", max_new_tokens=40, chat=False).text[0]
    stop = text[10:12]
    got = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=40,
        temperature=0,
        stop=[stop, "never"],
        stream=stream,
    )
    parts = list(got) if stream else [got]
    assert "".join(p.choices[0].text for p in parts) == text[: text.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n = 2 is not supported"),
        ({"max_tokens": 101}, "integer from 1 to 100"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop": ["a", ""]}, "none empty"),
        ({"logprobs": 3}, "alternatives"),
        ({"prompt": "x" * 200}, "has 200 tokens"),
        ({"prompt": [1, 999]}, "outside the vocabulary"),
        ({"prompt": ["a", "b"]}, "one text"),
        ({"prompt": ""}, "is empty"),
        ({"logit_bias": {"1": 200}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(9)}}, "room for 8"),
        ({"extra_body": {"colour": "red"}}, "unknown field 'colour'"),
        ({"extra_body": {"timeout": 0}}, "timeout is 0"),
        ({"extra_body": {"speculate": "no"}}, "speculate"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_fields_are_4xx_with_a_reason(client, options, message):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 5} | options
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**body)


@pytest.mark.parametrize(
    ("messages", "more", "message"),
    [
        ([], {}, "not empty"),
        ([{"role": "tool", "content": "x"}], {}, "role 'tool'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "needs text"),
        ([{"role": "user", "content": "x"}], {"top_logprobs": 2}, "top_logprobs = 2"),
        ([{"role": "user", "content": "x"}], {"tools": [{"type": "f"}]}, "tools"),
    ],
)
def test_bad_chats_are_4xx_with_a_reason(client, messages, more, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="tiny", messages=messages, **more)


def test_bad_bodies(address):
    def post(data, key=KEY):
        return httpx.post(
            f"{address}/v1/completions",
            content=data,
            headers={"Authorization": f"Bearer {key}"},
        )

    assert post(b"{").status_code == 400
    assert "not JSON" in post(b"\xff").json()["error"]["message"]
    assert post(b"[1]").status_code == 400
    assert post(b"{}").status_code == 400
    assert post(b" " * 5000).status_code == 413
    assert post(b"{}", key="guess").status_code == 401
    assert httpx.get(f"{address}/v1/completions").status_code == 405
    assert httpx.get(f"{address}/nowhere").status_code == 404


def idle(address):
    """Waits until no request is left."""
    for _ in range(400):
        health = httpx.get(f"{address}/health").json()
        if (health["running"], health["waiting"]) == (0, 0):
            return True
        time.sleep(0.05)
    return False


def test_a_client_that_leaves_frees_its_slot(address, client):
    body = {"prompt": "abc", "max_tokens": 100, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}"}
    for stream in (True, False):
        for _ in range(3):
            with (
                contextlib.suppress(httpx.TimeoutException),
                httpx.stream(
                    "POST",
                    f"{address}/v1/completions",
                    json=body | {"stream": stream},
                    headers=headers,
                    timeout=0.05 if not stream else 20,
                ) as response,
            ):
                next(response.iter_lines())
    assert idle(address)
    want = expected("abc", max_new_tokens=10, chat=False).text[0]
    got = client.completions.create(
        model="tiny", prompt="abc", max_tokens=10, temperature=0
    )
    assert got.choices[0].text == want


def test_a_full_queue_is_429(address, engine, monkeypatch):
    monkeypatch.setattr(engine._waiting, "most", 0)
    got = httpx.post(
        f"{address}/v1/completions",
        json={"prompt": "a"},
        headers={"Authorization": f"Bearer {KEY}"},
    )
    assert got.status_code == 429 and got.headers["retry-after"] == "1"
    assert "try again" in got.json()["error"]["message"]


def test_models_metrics_and_health(client, address):
    assert [m.id for m in client.models.list()] == ["tiny"]
    client.completions.create(model="tiny", prompt="abc", max_tokens=3)
    text = httpx.get(f"{address}/metrics").text
    values = dict(
        line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")
    )
    assert float(values["jspec_completion_tokens_total"]) >= 3
    assert float(values['jspec_requests_total{reason="length"}']) >= 1
    assert float(values['jspec_refused_total{status="429"}']) >= 0
    assert httpx.get(f"{address}/health").json()["status"] == "ok"


def test_concurrent_clients_get_their_own_answers(address):
    prompts = [f"{i}{i}{i}" for i in range(7)]
    want = [expected(p, max_new_tokens=25, chat=False).text[0] for p in prompts]
    got = {}

    def ask(prompt):
        with openai.OpenAI(
            base_url=f"{address}/v1", api_key=KEY, max_retries=20, timeout=60
        ) as client:
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=25, temperature=0
            )
            got[prompt] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(p,)) for p in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[p] for p in prompts] == want


def test_an_engine_has_one_server(engine, address):
    """Two threads would hand the same buffers to the device."""
    with (
        pytest.raises(RuntimeError, match="served already"),
        TestClient(Server(engine, "tiny").app),
    ):
        pass
    with pytest.raises(RuntimeError, match="served already"):
        engine.serve(threading.Event())
    assert httpx.get(f"{address}/health").json()["status"] == "ok"
