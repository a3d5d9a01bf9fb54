"""Block attention against a slow float64 softmax over explicit positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree
from jspec.pallas import (
    IMPLEMENTATIONS,
    block_attention,
    choose,
    live,
    obstacle,
    reference,
)

GARBAGE = 1e30


def inputs(seed, batch, nodes, heads, kv_heads, dim, slots):
    keys = jax.random.split(jax.random.key(seed), 7)
    normal = jax.random.normal
    length = jax.random.randint(keys[5], (batch,), 0, slots + 1)
    live = jnp.arange(slots) < length[:, None]
    k_cache = normal(keys[1], (batch, kv_heads, dim, slots))
    v_cache = normal(keys[2], (batch, kv_heads, slots, dim))
    # Whatever stands in dead slots must not matter.
    k_cache = jnp.where(live[:, None, None], k_cache, GARBAGE)
    v_cache = jnp.where(live[:, None, :, None], v_cache, GARBAGE)
    q = normal(keys[0], (batch, nodes, heads, dim))
    k = normal(keys[3], (batch, nodes, kv_heads, dim))
    v = normal(keys[4], (batch, nodes, kv_heads, dim))
    parent = [
        [-1]
        + [int(r) for r in np.random.default_rng(seed + b).integers(0, range(1, nodes))]
        for b in range(batch)
    ]
    masks = {
        "chain": tree.ancestors(
            jnp.broadcast_to(jnp.arange(nodes) - 1, (batch, nodes))
        ),
        "tree": tree.ancestors(jnp.array(parent)),
        "diffusion": jnp.ones((batch, nodes, nodes), bool),
    }
    return q, k_cache, v_cache, length, k, v, masks


def slow(q, k_cache, v_cache, length, k, v, mask, *, scale, window=None, softcap=None):
    q, k_cache, v_cache, k, v = (
        np.asarray(x, np.float64) for x in (q, k_cache, v_cache, k, v)
    )
    mask, length = np.asarray(mask), np.asarray(length)
    out = np.zeros_like(q)
    batch, nodes, heads, _ = q.shape
    group = heads // k.shape[2]
    depth = mask.sum(-1) - 1
    for b, i, h in np.ndindex(batch, nodes, heads):
        kv = h // group
        here = length[b] + depth[b, i]
        keys, values, where = [], [], []
        for s in range(length[b]):
            keys.append(k_cache[b, kv, :, s])
            values.append(v_cache[b, kv, s])
            where.append(s)
        for j in np.flatnonzero(mask[b, i]):
            keys.append(k[b, j, kv])
            values.append(v[b, j, kv])
            where.append(length[b] + depth[b, j])
        seen = [n for n, p in enumerate(where) if window is None or here - p < window]
        s = np.array([keys[n] for n in seen]) @ q[b, i, h] * scale
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        p = np.exp(s - s.max())
        out[b, i, h] = p / p.sum() @ np.array([values[n] for n in seen])
    return out


SHAPES = {
    "one row": (2, 1, 4, 4, 8, 16),
    "grouped": (3, 5, 6, 2, 8, 24),
    "one kv head": (1, 7, 4, 1, 16, 12),
}


@pytest.mark.parametrize("kind", ["chain", "tree", "diffusion"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"window": 4}])
def test_equals_the_slow_softmax(shape, kind, extra):
    if kind == "diffusion" and extra.get("window"):
        extra = {"window": 9}  # every node of such a block has the same depth
    *arrays, masks = inputs(1, *SHAPES[shape])
    got = jax.jit(lambda *a: block_attention(*a, scale=0.3, **extra))(
        *arrays, masks[kind]
    )
    want = slow(*arrays, masks[kind], scale=0.3, **extra)
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_mask_of_the_wrong_shape_is_refused():
    *arrays, masks = inputs(1, *SHAPES["grouped"])
    with pytest.raises(ValueError, match="mask has shape"):
        block_attention(*arrays, masks["chain"][:, :-1], scale=1.0)


def test_a_length_beyond_the_cache_is_refused():
    q, k, v, length, *rest, masks = inputs(1, *SHAPES["grouped"])
    with pytest.raises(ValueError, match="length 25 is beyond the cache of 24 slots"):
        block_attention(q, k, v, length + 25 - length, *rest, masks["chain"], scale=1.0)


def test_a_kernel_that_cannot_run_here_is_refused():
    *arrays, masks = inputs(1, *SHAPES["grouped"])
    with pytest.raises(NotImplementedError, match="needs a TPU"):
        block_attention(*arrays, masks["chain"], scale=1.0, impl="tpu")


class Tpu:
    """A mesh of one TPU that is not there, as far as the choice of a kernel goes."""

    empty, size, manual_axes = False, 1, ()

    class abstract_device:
        platform = "tpu"


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((1, 2, 2, 1, 80, 64), "float32", "head size 80 is not one of"),
        ((1, 2, 2, 1, 64, 64), "float16", "cache of float16 is not one of"),
        ((1, 129, 2, 1, 64, 64), "float32", "129 rows"),
    ],
)
def test_what_a_kernel_cannot_do_is_named(monkeypatch, shape, dtype, message):
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", Tpu)
    q, k, v, length, own_k, own_v, masks = inputs(1, *shape)
    arrays = [x.astype(dtype) for x in (q, k, v)], [own_k, own_v]
    arguments = *arrays[0], length, *arrays[1], masks["chain"]
    with pytest.raises(NotImplementedError, match=message):
        block_attention(*arguments, scale=1.0, impl="tpu")
    assert choose(q.astype(dtype), k.astype(dtype), own_k) == "xla"


def test_what_the_gpu_kernel_cannot_do_is_named(monkeypatch):
    class Gpu(Tpu):
        class abstract_device:
            platform = "cuda"

    q, k, _, _, own, _, _ = inputs(1, 1, 2, 2, 1, 64, 96)
    q, k, own = (x.astype(jnp.bfloat16) for x in (q, k, own))
    assert "needs a GPU" in obstacle("gpu", q, k, own)
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", Gpu)
    if "gpu" not in IMPLEMENTATIONS:
        assert "needs jax >= 0.11.2" in obstacle("gpu", q, k, own)
        return
    assert "96 slots are no multiple of 64" in obstacle("gpu", q, k, own)
    assert "window 5" in obstacle("gpu", q, k[..., :64], own, 5)
    assert "float32" in obstacle("gpu", q, k.astype(jnp.float32), own)
    assert obstacle("gpu", q, k[..., :64], own) is None
    assert choose(q, k[..., :64], own) == "xla"  # until it has been measured


def test_the_kernel_of_the_platform_is_chosen(monkeypatch):
    q, k, _, _, own, _, _ = inputs(1, 1, 2, 2, 1, 64, 64)
    assert choose(q, k, own) == "xla"
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", Tpu)
    assert choose(q, k, own) == "tpu"


def test_an_unknown_implementation_is_refused():
    *arrays, masks = inputs(1, *SHAPES["grouped"])
    with pytest.raises(ValueError, match="cuda"):
        block_attention(*arrays, masks["chain"], scale=1.0, impl="cuda")


@pytest.mark.parametrize("longest", [0, 1, 128, 129, 256, 257, 300])
@pytest.mark.parametrize("extra", [{}, {"window": 40}])
def test_a_large_cache_is_read_as_far_as_it_is_live(longest, extra):
    q, k_cache, v_cache, _, k, v, masks = inputs(3, 2, 5, 6, 2, 8, 300)
    length = jnp.array([longest // 2, longest])
    dead = jnp.arange(300) >= length[:, None]
    k_cache = jnp.where(dead[:, None, None], GARBAGE, jnp.sin(k_cache))
    v_cache = jnp.where(dead[:, None, :, None], GARBAGE, jnp.cos(v_cache))
    arguments = q, k_cache, v_cache, length, k, v, masks["tree"]
    got = jax.jit(lambda *a: block_attention(*a, scale=0.3, **extra))(*arguments)
    wanted = reference.block_attention(*arguments, scale=0.3, **extra)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    if longest <= 256:  # slots beyond the next of `sizes` are not even read
        nan = jnp.full_like(v_cache, jnp.nan)
        read = next(size for size in live.sizes(300) if size >= longest)
        v_cache = jnp.where(jnp.arange(300)[:, None] < read, v_cache, nan)
        arguments = q, k_cache, v_cache, *arguments[3:]
        got = live.block_attention(*arguments, scale=0.3, **extra)
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_sizes_double_up_to_the_slots():
    assert live.sizes(64) == [64]
    assert live.sizes(128) == [128]
    assert live.sizes(832) == [128, 256, 512, 832]


@pytest.mark.parametrize("slots", [0, 300])
@pytest.mark.parametrize("topology", ["chain", "tree"])
@pytest.mark.parametrize("extra", [{}, {"window": 40}])
def test_wide_blocks_are_cut_where_no_row_sees_a_node_after_it(slots, topology, extra):
    nodes = 3 * live._ROWS + 5
    *arrays, masks = inputs(4, 2, nodes, 4, 2, 8, slots)
    arguments = *arrays, masks[topology]
    wanted = reference.block_attention(*arguments, scale=0.3, **extra)
    got = live.block_attention(*arguments, scale=0.3, ordered=True, **extra)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    if not extra:  # the promise is kept, so that what lies after a part is not read
        last = nodes // live._ROWS
        k, v = (x.at[:, -1].set(jnp.nan) for x in arguments[4:6])
        arguments = *arguments[:4], k, v, arguments[6]
        got = live.block_attention(*arguments, scale=0.3, ordered=True)
        ends = nodes * (last - 1) // last
        np.testing.assert_allclose(got[:, :ends], wanted[:, :ends], atol=1e-5)


def test_without_a_cache_a_block_attends_to_itself():
    *arrays, masks = inputs(5, *SHAPES["grouped"][:-1], 0)
    for mask in masks.values():
        got = block_attention(*arrays, mask, scale=0.3)
        np.testing.assert_allclose(got, slow(*arrays, mask, scale=0.3), atol=1e-5)
