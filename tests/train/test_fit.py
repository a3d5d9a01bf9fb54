"""The loop: exact resumption, signals, full disks, devices, and what it writes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run

from jspec.train import metrics, parallel
from jspec.train.fit import files

SCRIPT = Path(small_run.__file__)


def lines(out, drop=("seconds",)):
    """The metrics but for the times."""
    found = metrics.read(files(out).metrics)
    return [{k: v for k, v in line.items() if k not in drop} for line in found]


def saved(out):
    return sorted(int(p.name) for p in files(out).checkpoints.iterdir())


def start(code, *arguments, **environment):
    """A Python process in the repository; ``code`` is a file or a text."""
    what = [str(code)] if isinstance(code, Path) else ["-c", code]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(Path(__file__).parent)])
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path} | environment
    command = [sys.executable, *what, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


def wait_for(process, condition):
    """Waits until ``condition()`` holds while the process runs."""
    while not condition():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 60 steps without an interruption: its folder and parameters."""
    out = tmp_path_factory.mktemp("whole")
    return out, small_run.run(out, 60)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The same with more parameters, 30 steps."""
    out = tmp_path_factory.mktemp("large")
    return out, small_run.run(out, 30, params=small_run.large())


def assert_same(params, other):
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


# --- what a run does ------------------------------------------------------------------


def test_it_is_the_plain_loop(whole):
    """Every step written out, without jit."""
    out, params = whole
    optimizer, plain = small_run.optimizer(), small_run.params()
    state = optimizer.init(plain)
    for step in range(5):
        key = jax.random.fold_in(jax.random.key(0), step)

        def value(p, step=step, key=key):
            return small_run.loss(2.0, p, small_run.data(step), key)

        (loss, extra), grads = jax.value_and_grad(value, has_aux=True)(plain)
        updates, state = optimizer.update(grads, state, plain)
        plain = optax.apply_updates(plain, updates)
        line = lines(out)[step]
        assert line["step"] == step + 1
        assert line["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert line["largest"] == pytest.approx(float(extra["largest"]), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(
            float(optax.tree.norm(grads)), rel=1e-5
        )
        assert line["tokens"] == small_run.ROWS * small_run.TOKENS


def test_it_learns_and_says_so(whole, capfd):
    out, params = whole
    found = {
        k: v["eval/error"] for k, v in enumerate(lines(out), 1) if "eval/error" in v
    }
    assert list(found) == [10, 20, 30, 40, 50, 60]
    assert found[60] < 0.1 * small_run.held_out(small_run.params())["error"]
    assert found[60] == small_run.held_out(params)["error"]
    assert lines(out)[59]["eval/both"] == small_run.held_out(params)["both"].tolist()
    assert [line["step"] for line in lines(out)] == list(range(1, 61))
    assert files(out).curve.read_bytes().startswith(b"\x89PNG")
    assert saved(out) == [50, 60]


def test_progress_without_a_terminal(tmp_path, capfd):
    small_run.run(tmp_path, 10, every=5)
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("step 5: eval/error ")
    assert said[-1].startswith("step 10/10, loss ") and "tokens/s" in said[-1]


def test_parameters_of_the_caller_stay_theirs(tmp_path):
    params = small_run.params()
    small_run.run(tmp_path, 3, params=params)
    assert_same(params, small_run.params())


def test_accumulation_is_a_larger_batch(tmp_path):
    """Two halves of every batch through ``optax.MultiSteps``, without noise."""

    def still(params, batch, key):
        error = jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]
        return (error**2).mean(), {}

    def halves(step):
        part = slice(4 * (step % 2), 4 * (step % 2) + 4)
        return jax.tree.map(lambda x: x[part], small_run.data(step // 2))

    large = small_run.run(tmp_path / "large", 6, loss=still)
    parts = optax.MultiSteps(small_run.optimizer(), every_k_schedule=2)
    small = small_run.run(
        tmp_path / "small", 12, loss=still, data=halves, optimizer=parts
    )
    for a, b in zip(jax.tree.leaves(large), jax.tree.leaves(small), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


# --- resuming -------------------------------------------------------------------------


def test_a_run_is_continued_to_the_bit(whole, tmp_path):
    out, params = whole
    small_run.run(tmp_path, 20)
    small_run.run(tmp_path, 33)
    assert_same(small_run.run(tmp_path, 60), params)
    first = [line for line in lines(tmp_path) if line["step"] != 33]
    assert first == [line for line in lines(out) if line["step"] != 33]


def test_a_finished_run_only_returns(whole):
    out, params = whole
    before = files(out).metrics.read_bytes()
    assert_same(small_run.run(out, 60), params)
    assert files(out).metrics.read_bytes() == before


@pytest.mark.slow
def test_kill_is_survived_to_the_bit(whole, tmp_path):
    out, params = whole
    process = start(SCRIPT, tmp_path, 60, 10, 1, 0.02)
    log = files(tmp_path).metrics
    wait_for(process, lambda: len(metrics.read(log)) >= 25)
    process.kill()
    process.communicate()
    assert saved(tmp_path)[-1] in (20, 30, 40, 50)
    with log.open("a") as file:
        file.write('{"step": 61, "lo')  # a line cut off, as a kill may leave one
    process = start(SCRIPT, tmp_path, 60, 10)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert f"continuing {tmp_path} after step" in said
    assert lines(tmp_path) == lines(out)
    assert_same(small_run.run(tmp_path, 60), params)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_leave(whole, tmp_path, number):
    out, _ = whole
    process = start(SCRIPT, tmp_path, 60, 50, 1, 0.02)
    wait_for(process, lambda: len(metrics.read(files(tmp_path).metrics)) >= 3)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number
    (step,) = saved(tmp_path)
    assert 3 <= step < 50
    assert f"{number.name}: saved after step {step}" in said
    assert "run the same command again" in said
    small_run.run(tmp_path, 60)
    drop = ("seconds", "eval/error", "eval/both")  # evaluated at other steps
    assert lines(tmp_path, drop) == lines(out, drop)


KILLED_SAVING = """
import os, signal, sys, threading, time
import jax.numpy as jnp
import small_run

out = sys.argv[1]

def watch():
    while not any(
        "tmp" in name and name.startswith("20")
        for name in os.listdir(out + "/checkpoints")
    ):
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)

def data(step):
    if step == 15:
        threading.Thread(target=watch, daemon=True).start()
    return small_run.data(step)

small_run.run(out, 30, params=small_run.large(), data=data)
"""


@pytest.mark.slow
def test_a_kill_while_saving_leaves_the_checkpoint_before(large, tmp_path):
    process = start(KILLED_SAVING, tmp_path)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    names = [p.name for p in files(tmp_path).checkpoints.iterdir()]
    assert "10" in names and "20" not in names and len(names) == 2
    out, params = large
    assert_same(small_run.run(tmp_path, 30, params=small_run.large()), params)
    assert lines(tmp_path) == lines(out)
    assert saved(tmp_path) == [20, 30]


FULL = """
import resource, sys
import small_run

def data(step):
    if step == 15:  # from here on files cannot grow: a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    return small_run.data(step)

try:
    small_run.run(sys.argv[1], 30, params=small_run.large(), data=data)
except OSError as error:
    sys.exit(f"OSError: {error}")
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(large, tmp_path):
    process = start(FULL, tmp_path)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "cannot save step 20" in said and "last checkpoint is of step 10" in said
    assert saved(tmp_path) == [10]
    out, params = large
    assert_same(small_run.run(tmp_path, 30, params=small_run.large()), params)
    assert lines(tmp_path) == lines(out)


# --- devices --------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_devices_give_the_same_run(whole, tmp_path):
    out, _ = whole
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    process = start(SCRIPT, tmp_path, 12, 12, 8, XLA_FLAGS=flags)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert len(lines(tmp_path)) == 12
    for ours, theirs in zip(lines(tmp_path), lines(out), strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


UNEVEN = """
import sys
import small_run
from jspec.train import parallel

def data(step):
    return {name: x[:6] for name, x in small_run.data(step).items()}

small_run.run(sys.argv[1], 3, data=data, mesh=parallel.data_mesh())
"""


@pytest.mark.slow
def test_rows_must_fit_the_devices(tmp_path):
    with pytest.raises(ValueError, match="a mesh of 99 devices"):
        parallel.data_mesh(99)
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    process = start(UNEVEN, tmp_path, XLA_FLAGS=flags)
    _, said = process.communicate()
    assert process.returncode == 1
    assert "6 rows cannot be split evenly over 4 devices; use a multiple of 4" in said


# --- mistakes -------------------------------------------------------------------------


def test_another_run_is_refused(whole):
    out, _ = whole
    with pytest.raises(ValueError, match="was begun with seed 0, not 1"):
        small_run.run(out, 60, seed=1)
    with pytest.raises(ValueError, match="has done 60 steps already, more than 50"):
        small_run.run(out, 50)
    wider = small_run.params() | {"in": jnp.zeros((small_run.WIDTH, 17))}
    with pytest.raises(ValueError, match="other parameters or of another optimizer"):
        small_run.run(out, 70, params=wider)
    with pytest.raises(ValueError, match="other parameters or of another optimizer"):
        small_run.run(out, 70, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match="steps 0"):
        small_run.run(out, 0)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    def data(step):
        return jax.tree.map(
            lambda x: x * (np.nan if step == 12 else 1), small_run.data(step)
        )

    with pytest.raises(FloatingPointError, match=r"step 13 is nan.* of step 10"):
        small_run.run(tmp_path, 20, data=data)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 13))
