"""A small run for the loop's tests; as a script, one that can be killed.

python small_run.py OUT STEPS EVERY [DEVICES] [PAUSE]
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import Partial

from jspec.train import parallel
from jspec.train.fit import fit

ROWS, TOKENS, WIDTH = 8, 6, 5
TRUTH = np.random.default_rng(7).normal(size=(WIDTH, WIDTH)).astype(np.float32)


def data(step):
    rng = np.random.default_rng([3, step])
    x = rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.tanh(x @ TRUTH)}


def loss(scale, params, batch, key):
    """Regression with noise on the inputs, so that the key counts."""
    x = batch["x"] + 0.01 * jax.random.normal(key, batch["x"].shape)
    h = jnp.tanh(x @ params["in"]) @ params["out"]
    error = scale * (h - batch["y"]) ** 2
    return error.mean(), {"largest": error.max()}


def params(seed=0):
    k_in, k_out = jax.random.split(jax.random.key(seed))
    return {
        "in": 0.5 * jax.random.normal(k_in, (WIDTH, 16)),
        "out": 0.5 * jax.random.normal(k_out, (16, WIDTH)),
    }


def large():
    """The same with 6 MB of parameters beside, so that saving takes a while."""
    return params() | {"idle": jax.random.normal(jax.random.key(2), (3, 500_000))}


@functools.cache  # equal optimizers share a compiled step
def optimizer(rate=0.02):
    schedule = optax.cosine_decay_schedule(rate, 200)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


def held_out(params):
    value, extra = loss(1.0, params, data(10_000), jax.random.key(0))
    return {"error": value, "both": jnp.stack([value, extra["largest"]])}


def run(out, steps, every=10, **arguments):
    given = {
        "loss": Partial(loss, jnp.float32(2.0)),
        "params": params(),
        "data": data,
        "optimizer": optimizer(),
        "evaluate": held_out,
    }
    return fit(steps=steps, out=out, every=every, **given | arguments)


if __name__ == "__main__":
    out, steps, every, devices, pause = [*sys.argv[1:], "1", "0"][:5]

    def slow(step):
        time.sleep(float(pause))
        return data(step)

    run(out, int(steps), int(every), mesh=parallel.data_mesh(int(devices)), data=slow)
