"""Streams of random numbers: shapes, laws, and who shares what with whom."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec import sampling as smp


def make(batch=1, vocab=12, eos_ids=(2,), **kwargs):
    return smp.options(batch, vocab_size=vocab, eos_ids=eos_ids, **kwargs)


def test_noise_has_its_shapes_and_ranges():
    o = make(3, temperature=1.0)
    _, judge = smp.row_keys(o, jnp.arange(3))
    noise = jax.jit(smp.noise, static_argnums=(3, 4, 5))(
        judge, o, jnp.asarray([5, 6, 7]), 9, 4, 300
    )
    assert noise.accept.shape == (3, 9)
    assert noise.next.shape == (3,)
    assert noise.race.shape == (3, 4, 300)
    for u in (noise.accept, noise.next):
        assert np.all((u >= 0) & (u < 1))
    assert noise.race.dtype == jnp.float32
    assert np.all((noise.race > 0) & np.isfinite(noise.race))


def test_a_race_depends_on_seed_and_position_only():
    o = make(2, seed=[4, 9])
    race = smp.race(o, jnp.asarray([5, 7]), 4, 50)
    other = smp.race(make(1, seed=9, temperature=2.0), jnp.asarray([8]), 2, 50)
    np.testing.assert_array_equal(race[1, 1:3], other[0])
    flat = np.asarray(race).reshape(8, 50)
    assert len({row.tobytes() for row in flat}) == 8


def test_a_race_draws_the_law():
    p = np.asarray([0.5, 0.0, 0.3, 0.2], np.float32)
    race = smp.race(make(1, seed=3), jnp.asarray([0]), 40_000, 4)[0]
    count = np.bincount(jnp.argmin(race / p, -1), minlength=4)
    expected = 40_000 * p
    assert count[1] == 0
    chi2 = np.sum((count - expected)[p > 0] ** 2 / expected[p > 0])
    assert chi2 < 13.8  # 2 degrees of freedom: 1 in 1000
    assert abs(float(race.mean()) - 1) < 0.01
    assert abs(float(race.var()) - 1) < 0.03


def test_no_two_streams_share_a_key():
    o = make(2, seed=0)
    keys = [*smp.row_keys(o, jnp.zeros(2, int)), *smp.row_keys(o, jnp.ones(2, int))]
    data = np.concatenate([jax.random.key_data(k) for k in [o.key, *keys]])
    assert len({row.tobytes() for row in data}) == 10
    draft, judge = smp.row_keys(o, jnp.zeros(2, int))
    u = jax.vmap(lambda k: jax.random.uniform(k, (9,)))(draft)
    noise = smp.noise(judge, o, jnp.ones(2, int), 9, 1, 9)
    assert not np.intersect1d(u, noise.accept).size
    assert not np.intersect1d(noise.next, noise.accept).size


def test_seeds():
    def data(o):
        return jax.random.key_data(o.key)

    one = data(make(3, seed=7))
    assert len({row.tobytes() for row in np.asarray(one)}) == 3
    np.testing.assert_array_equal(one[:1], data(make(1, seed=[7])))
    listed = data(make(3, seed=[5, 7, 7]))
    np.testing.assert_array_equal(listed[1:2], one[:1])
    np.testing.assert_array_equal(listed[1], listed[2])
    big = data(make(3, seed=[0, 2**32, 2**64 - 1]))
    assert len({row.tobytes() for row in np.asarray(big)}) == 3
