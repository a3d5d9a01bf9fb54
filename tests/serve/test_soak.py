"""A real server process under clients that leave, stop and send nonsense; see also
``benchmarks/soak.py``, which does the same for longer."""

import signal
import sys
import threading
import time

import pytest

import jspec
from jspec.testing import tiny, traffic
from jspec.testing.served import free_port, served

CONTEXT, NEW = 128, 24
MODEL = tiny.model(
    seed=3, layers=1, tokenizer=tiny.byte_tokenizer(), vocab_size=257, max_position=256
)
PROMPTS = ["A common start, then this", "A common start, then that", "a", "abcabcabc"]
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc"
)


@pytest.fixture(scope="module")
def known():
    return traffic.cases(MODEL, PROMPTS, NEW, CONTEXT)


def test_nothing_leaks_nothing_mixes_and_a_killed_server_restarts(
    known, tmp_path, monkeypatch
):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    folder = jspec.save(MODEL, tmp_path / "model")
    words = ["--target", str(folder), "--sizes", "3", "--queue", "4", "--gamma", "2"]
    words += ["--context", str(CONTEXT)]
    port, log = free_port(), tmp_path / "log"
    with served(words, port, log) as server:
        tally = traffic.play(server.address, known, 60, clients=8)
        before = server.memory()
        more = traffic.play(server.address, known, 180, clients=8, seed=1)
        assert tally.wrong + more.wrong == []
        assert tally.done + more.done == 240
        assert all(more.counts[name] for name in traffic.MIX)
        assert server.idle()
        assert server.memory() < 1.1 * before

        noticed = threading.Event()

        def ask():
            if traffic.play(server.address, known, 400, clients=8).wrong:
                noticed.set()

        clients = threading.Thread(target=ask)
        clients.start()
        time.sleep(0.3)
        assert server.kill(signal.SIGKILL) == -signal.SIGKILL
        clients.join(60)
        assert noticed.is_set()
    with served(words, port, log) as server:
        assert traffic.play(server.address, known, 30, clients=4).wrong == []
        assert server.idle()


def test_a_server_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match="there is no 'nothing'"),
        served(["--target", "nothing"], free_port(), tmp_path / "log"),
    ):
        pass
