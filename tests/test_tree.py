"""Topologies from parent arrays."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
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


# Topologies


def value(topology, chance):
    """Expected tau by the definition: the root, and every path's probability."""
    return 1 + sum(
        math.prod(chance[d][rank] for d, rank in enumerate(path))
        for path in topology.paths
    )


def every_tree(nodes, depth, ranks):
    """All trees of ``nodes`` nodes whose children are first ranks."""
    grown = {frozenset()}
    for _ in range(nodes - 1):
        grown = {
            tree_ | {(*up, rank)}
            for tree_ in grown
            for up in [(), *tree_]
            for rank in range(ranks)
            if len(up) < depth
            and (*up, rank) not in tree_
            and (rank == 0 or (*up, rank - 1) in tree_)
        }
    return [tree.from_paths(t) for t in grown]


def test_paths_make_a_tree_by_level():
    made = tree.from_paths([[1], [0, 0], [0], [0, 0, 2], [1, 0]])
    assert made.parent == (-1, 0, 0, 1, 2, 3)
    assert made.rank == (-1, 0, 1, 0, 0, 2)
    assert (made.nodes, made.depth, made.level) == (6, 3, (0, 1, 1, 2, 2, 3))
    assert tree.from_paths(made.paths) == made


@pytest.mark.parametrize("paths", [[], [[]], [[0], [0]], [[0, 0]], [[-1]]])
def test_bad_paths_are_refused(paths):
    with pytest.raises(ValueError, match=r"path"):
        tree.from_paths(paths)


def test_chains_and_expansion_vectors():
    assert tree.line(3).parent == (-1, 0, 1, 2)
    made = tree.expansion([2, 1, 2])
    assert (made.nodes, made.depth) == (1 + 2 + 2 + 4, 3)
    for bad in ([], [1, 0]):
        with pytest.raises(ValueError, match="widths"):
            tree.expansion(bad)


def test_published_trees():
    assert (tree.MEDUSA_63.nodes, tree.MEDUSA_63.depth) == (64, 4)
    assert (tree.EAGLE_25.nodes, tree.EAGLE_25.depth) == (26, 5)


@pytest.mark.parametrize("nodes", [2, 4, 5])
def test_sequoia_and_best_first_find_the_best_tree(nodes):
    falling = [[0.6, 0.25, 0.1], [0.5, 0.3, 0.05], [0.4, 0.2, 0.1]]
    best = max(value(t, falling) for t in every_tree(nodes, 3, 3))
    assert value(tree.sequoia(falling, nodes, 3), falling) == pytest.approx(best)
    assert value(tree.best_first(falling, nodes), falling) == pytest.approx(best)


def test_sequoia_takes_acceptance_that_does_not_fall():
    """The second child may be the one that is accepted, as without replacement."""
    chance = [[0.2, 0.7], [0.2, 0.7]]
    best = max(value(t, chance) for t in every_tree(5, 2, 2))
    assert value(tree.sequoia(chance, 5, 2), chance) == pytest.approx(best)
    assert tree.sequoia([0.2, 0.7], 5, 2) == tree.sequoia(chance, 5, 2)


def test_trees_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="8 nodes"):
        tree.sequoia([0.5, 0.2], 8, 2)
    with pytest.raises(ValueError, match="8 nodes"):
        tree.best_first([[0.5, 0.2], [0.5, 0.2]], 8)
    with pytest.raises(ValueError, match="gamma|widths"):
        tree.line(0)
