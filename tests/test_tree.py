"""Topologies from parent arrays."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jspec import tree


@st.composite
def parents(draw):
    n = draw(st.integers(1, 20))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]


@given(parents())
def test_masks_depths_and_paths_follow_the_parents(parent):
    mask = np.asarray(tree.ancestors(jnp.array(parent)))
    for i in range(len(parent)):
        path, node = [], i
        while node >= 0:
            path.append(node)
            node = parent[node]
        assert np.flatnonzero(mask[i]).tolist() == sorted(path)
        assert int(tree.depth(jnp.array(mask))[i]) == len(path) - 1
        got = np.asarray(tree.path_to(jnp.array(mask), jnp.array(i)))
        assert got[got >= 0].tolist() == path[::-1]


def test_batches_are_independent():
    parent = jnp.array([[-1, 0, 1, 2], [-1, 0, 0, 0]])
    both = tree.ancestors(parent)
    assert (both[0] == tree.ancestors(parent[0])).all()
    assert (both[1] == tree.ancestors(parent[1])).all()
