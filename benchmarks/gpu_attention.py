"""Attention of a decode step on a real GPU: our kernel, XLA, JAX's own, and a copy.

Prints, per shape, microseconds and the share of the measured copy bandwidth that the live
cache is read with. Has not run on a GPU yet. Needs a Hopper GPU and jax >= 0.11.2 with
CUDA; takes a few minutes.

  python benchmarks/gpu_attention.py
"""

from __future__ import annotations

import datetime
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from rich.table import Table

from jspec import pallas, report

REPETITIONS, RUNS = 50, 5
SHAPES = [  # batch, nodes, heads, kv heads, head size, cached tokens
    (batch, nodes, 32, 8, 128, 8192) for batch in (1, 8, 32) for nodes in (1, 8, 32)
]


def seconds(call, arguments) -> float:
    """The median of ``RUNS`` of ``REPETITIONS`` calls, each fed with the one before."""

    @jax.jit
    def repeat(first, rest):
        def once(_, x):
            return x + 0 * call(x, *rest).astype(x.dtype)

        return jax.lax.fori_loop(0, REPETITIONS, once, first)

    first, *rest = arguments
    repeat(first, rest).block_until_ready()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        repeat(first, rest).block_until_ready()
        times.append((time.perf_counter() - start) / REPETITIONS)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large array passed through."""
    x = jnp.ones(2**30, jnp.bfloat16)
    return 2 * x.nbytes / seconds(lambda x: x + 1, [x])


def arrays(batch, nodes, heads, kv_heads, dim, slots):
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    q = normal(keys[0], batch, nodes, heads, dim)
    k = normal(keys[1], batch, kv_heads, dim, slots)
    v = normal(keys[2], batch, kv_heads, slots, dim)
    own = [normal(key, batch, nodes, kv_heads, dim) for key in keys[3:]]
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((nodes, nodes), bool)), (batch, nodes, nodes)
    )
    return q, k, v, jnp.full(batch, slots, jnp.int32), *own, mask


def standard(q, k, v, length, k_own, v_own, mask, *, scale):
    """``jax.nn.dot_product_attention`` over cache and block in its own layout."""
    batch, nodes, _, _ = q.shape
    live = jnp.arange(k.shape[1]) < length[:, None, None]
    live = jnp.broadcast_to(live, (batch, nodes, k.shape[1]))
    seen = jnp.concatenate([live, mask], -1)[:, None]
    k, v = jnp.concatenate([k, k_own], 1), jnp.concatenate([v, v_own], 1)
    return jax.nn.dot_product_attention(q, k, v, mask=seen, scale=scale)


def main() -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"needs a GPU; jax found {device.platform}")
    copy = copy_bandwidth()
    table = Table(
        title=f"{device.device_kind}, {datetime.date.today()}, jax {jax.__version__}, "
        f"copy {copy / 1e9:.0f} GB/s"
    )
    for name in ("B x N, cached", "kernel us", "of copy", "XLA us", "jax.nn us"):
        table.add_column(name, justify="right")
    for shape in SHAPES:
        batch, nodes, _, kv_heads, dim, slots = shape
        given = arrays(*shape)
        scale = dim**-0.5
        ours, xla = (
            functools.partial(pallas.block_attention, scale=scale, impl=name)
            for name in ("gpu", "xla")
        )
        q, k, v, *rest = given
        theirs = (q, k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3), *rest)
        kernel = seconds(ours, given)
        live = 2 * batch * kv_heads * dim * slots * 2
        table.add_row(
            f"{batch} x {nodes}, {slots}",
            f"{1e6 * kernel:.0f}",
            f"{100 * live / kernel / copy:.0f}%",
            f"{1e6 * seconds(xla, given):.0f}",
            f"{1e6 * seconds(functools.partial(standard, scale=scale), theirs):.0f}",
        )
    report.console().print(table)


if __name__ == "__main__":
    main()
