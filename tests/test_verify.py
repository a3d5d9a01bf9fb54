"""Accept rules: single verdicts, rows that are no law, shapes, programs."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec import verify
from jspec.types import POINT_MASS, Block, DraftShape, Law, Noise, TargetLaw

CHAIN_RULES = ("token", "block")


# Single verdicts

NODES, VOCAB = 7, 5  # every single block is padded to these: one compilation a rule


@functools.cache
def compiled(name):
    return jax.jit(verify.LOSSLESS[name])


def noise(nodes, vocab, seed=0, accept=None, last=None, rows=None):
    random = np.random.default_rng(seed)
    u = random.uniform(size=nodes) if accept is None else np.full(nodes, accept)
    v = random.uniform() if last is None else last
    race = random.exponential(size=(rows or nodes, vocab))
    return Noise(*(np.asarray(x, np.float32) for x in (u, v, race)))


def law_of(p):
    p = np.asarray(p, np.float32)
    return TargetLaw(p, np.argmax(p, -1).astype(np.int32))


def tree_block(token, parent, law=POINT_MASS, live=None, vote=None):
    """A block padded with dead nodes, and its ``q [N, V']`` with zeros."""
    n = len(token)
    pad = NODES - n
    if law.q is not None:
        wide = VOCAB - law.q.shape[-1]
        law = dataclasses.replace(law, q=np.pad(law.q, ((0, pad), (0, wide))))
    return Block(
        np.array([*token, *[0] * pad], np.int32),
        np.array([*parent, *range(n - 1, NODES - 1)], np.int32),
        np.array([*(np.ones(n, bool) if live is None else live), *[False] * pad]),
        np.array([*(np.ones(n, bool) if vote is None else vote), *[True] * pad]),
        law,
    )


def chain_block(*token, law=POINT_MASS):
    return tree_block(token, range(-1, len(token) - 1), law)


def judge(name, block, p, **kw):
    """``(path, n_accept, next_token)`` with the path cut to the rows of ``p``."""
    n, v = np.shape(p)
    p = np.pad(np.asarray(p, np.float32), ((0, NODES - n), (0, VOCAB - v)))
    out = compiled(name)(noise(NODES, VOCAB, **kw), block, law_of(p))
    path = out.path.tolist()
    assert path[n:] == [-1] * (NODES - n)
    return path[:n], int(out.n_accept), int(out.next_token)


def flat(nodes=NODES, vocab=VOCAB, replace=True):
    return Law(np.full((nodes, vocab), 1 / vocab, np.float32), replace=replace)


def one_hot(*best):
    return np.eye(VOCAB, dtype=np.float32)[list(best)]


# The root's best child is node 2 (token 3), whose best child is node 5 (token 1).
PARENT = [-1, 0, 0, 1, 1, 2, 2]
TOKEN = [0, 4, 3, 3, 2, 1, 0]
BEST = [3, 2, 1, 0, 0, 4, 2]


@pytest.mark.parametrize(
    "name", ["greedy", "walk", "coupled", "recursive", "traversal"]
)
@pytest.mark.parametrize("kind", ["point", "without"])
def test_rules_for_trees_walk_greedily_at_temperature_zero(name, kind):
    law = POINT_MASS if kind == "point" else flat(replace=False)
    block = tree_block(TOKEN, PARENT, law)
    five, two = np.arange(NODES) == 5, np.arange(NODES) == 2
    for seed in range(5):
        found = judge(name, block, one_hot(*BEST), seed=seed)
        assert found == ([0, 2, 5, -1, -1, -1, -1], 2, 4)
        stop = block.replace(live=~five)
        found = judge(name, stop, one_hot(*BEST), seed=seed)
        assert found == ([0, 2, -1, -1, -1, -1, -1], 1, 1)
        probe = block.replace(vote=~two)
        assert judge(name, probe, one_hot(*BEST), seed=seed)[1:] == (0, 3)


@pytest.mark.parametrize("name", verify.LOSSLESS)
def test_rules_for_chains_walk_greedily_at_temperature_zero(name):
    p = one_hot(1, 2, 3, 4)
    for law in (POINT_MASS, flat(4)):
        block = chain_block(0, 1, 2, 0, law=law)
        assert judge(name, block, p) == ([0, 1, 2, -1], 2, 3)
        assert judge(name, chain_block(0, 1, 2, 3, law=law), p)[1:] == (3, 4)


@pytest.mark.parametrize("name", verify.LOSSLESS)
def test_empty_block(name):
    """A root alone, and not padded."""
    block = Block(*(np.array([x]) for x in (2, -1, True, True)), Law(np.zeros((1, 3))))
    out = compiled(name)(noise(1, 3), block, law_of([[0, 0, 1]]))
    assert out.path.tolist() == [0]
    assert (int(out.n_accept), int(out.next_token)) == (0, 2)


def test_greedy_reads_nothing_but_the_best_tokens():
    block = tree_block(TOKEN, PARENT)
    target = TargetLaw(p=None, best=np.array(BEST))  # type: ignore[arg-type]
    out = compiled("greedy")(None, block, target)
    assert out.path.tolist() == [0, 2, 5, -1, -1, -1, -1]


def test_greedy_prefers_the_longest_of_repeated_siblings():
    block = tree_block([0, 3, 3, 1], [-1, 0, 0, 2])
    assert judge("greedy", block, one_hot(3, 1, 1, 0)) == ([0, 2, 3, -1], 2, 0)


def test_walk_counts_repeated_siblings_once():
    block = tree_block([0, 1, 1, 2], [-1, 0, 0, 0])
    p = np.broadcast_to([0.4, 0.3, 0.2, 0.1], (4, 4))
    assert judge("walk", block, p, accept=0.29)[:2] == ([0, 1, -1, -1], 1)
    assert judge("walk", block, p, accept=0.49)[:2] == ([0, 3, -1, -1], 1)
    # Were token 1 counted twice, this would accept token 2.
    assert judge("walk", block, p, accept=0.51)[1] == 0
    rest = [judge("walk", block, p, accept=0.9, last=u)[2] for u in (0.79, 0.81)]
    assert rest == [0, 3]


def test_traversal_is_block_verification_on_chains():
    """Draw by draw, not only in law."""
    random = np.random.default_rng(0)
    accepted = set()
    for seed in range(200):
        p, q = random.dirichlet(np.full(5, 0.5), (2, 4)).astype(np.float32)
        live = np.cumprod([1, *(random.uniform(size=3) < 0.9)]) > 0
        token = random.integers(0, 5, 4)
        block = tree_block(token, range(-1, 3), Law(q), live)
        found = judge("traversal", block, p, seed=seed)
        assert found == judge("block", block, p, seed=seed)
        accepted.add(found[1])
    assert accepted == {0, 1, 2, 3}


def test_coupled_is_plain_sampling_with_the_same_races():
    """Along its path every token is the race's winner under that node's law."""
    random = np.random.default_rng(1)
    for _ in range(50):
        token = random.integers(0, 5, 7)
        p = random.dirichlet(np.ones(5), 7).astype(np.float32)
        n = noise(7, 5, seed=int(random.integers(1 << 30)), rows=3)  # rows < nodes
        out = compiled("coupled")(n, tree_block(token, PARENT), law_of(p))
        path, a = out.path.tolist(), int(out.n_accept)
        race = np.asarray(n.race)
        won = [int(np.argmax(p[v] / race[d])) for d, v in enumerate(path[: a + 1])]
        assert won == [*token[path[1 : a + 1]], int(out.next_token)]
        left = [token[c] for c in range(7) if PARENT[c] == path[a]]
        assert won[-1] not in left


def test_coupled_draws_from_the_target():
    """Chi-square of 20000 root tokens, at 4 cells; 99.99 % lie below 21.1."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    race = jax.random.exponential(jax.random.key(0), (20000, 1, 4))
    u = np.zeros((20000, 1), np.float32)
    block = Block(*(np.broadcast_to(x, u.shape) for x in (0, -1, True, True)))
    target = law_of(np.broadcast_to(p, (20000, 1, 4)))
    rule = jax.jit(verify.batched(verify.coupled))
    out = rule(Noise(u, u[:, 0], race), block, target)
    count = np.bincount(out.next_token, minlength=4)
    expected = 20000 * p
    assert np.sum((count - expected) ** 2 / expected) < 21.1


# Rows that are no law


@pytest.mark.parametrize("name", ["token", "block", "recursive", "traversal"])
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_faulty_draft_row_leaves_the_target_alone(name, fault):
    q = np.full((3, 4), 0.25, np.float32)
    q[0, 1] = fault
    p = [[0.1, 0.2, 0.3, 0.4]] * 3
    block = chain_block(0, 0, 1, law=Law(q))
    drawn = [judge(name, block, p, accept=0, last=(i + 0.5) / 10) for i in range(10)]
    assert [n for _, n, _ in drawn] == [0] * 10
    assert [x for _, _, x in drawn] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("name", verify.LOSSLESS)
def test_extreme_noise_and_laws_give_ids_of_the_vocabulary(name):
    top = 1 - 2.0**-24
    p = np.full((3, 5), 0.2, np.float32)
    for law in (POINT_MASS, Law(p), Law(p, replace=False)):
        block = chain_block(0, 1, 2, law=law)
        for u, v in itertools.product((0, top), repeat=2):
            assert 0 <= judge(name, block, p, accept=u, last=v)[2] < 5
            assert 0 <= judge(name, block, p * np.nan, accept=u, last=v)[2] < 5
            # Nothing is accepted that the target cannot emit, even for u = 0.
            found = judge(name, block, one_hot(4, 4, 4), accept=u, last=v)
            assert found == ([0, -1, -1], 0, 4)


def test_law_that_agrees_up_to_rounding_emits_from_the_target():
    q = np.full((2, 3), 1 / 3, np.float32)
    p = np.nextafter(q, 0).astype(np.float32)  # p < q everywhere: no residual
    block = chain_block(0, 1, law=Law(q))
    for name in ("token", "block", "recursive", "traversal"):
        drawn = {
            judge(name, block, p, accept=1 - 2.0**-24, last=u)[2] for u in (0.1, 0.9)
        }
        assert drawn == {0, 2}


def test_without_replacement_survives_a_spent_draft_law():
    """Behind a sure token the tail keeps its relative precision."""
    q = np.zeros((4, 4), np.float32)
    q[0] = 1 - 1e-6, 6e-7, 4e-7, 0
    p = np.full((4, 4), 0.25, np.float32)
    block = tree_block([0, 0, 1, 2], [-1, 0, 0, 0], Law(q, replace=False))
    # Token 0 fails; what is left of p is a third each for 1, 2 and 3, against a draft
    # law of (.6, .4, 0): token 1 is accepted with (1/3) / .6 = .5556.
    for name in ("recursive", "traversal"):
        assert judge(name, block, p, accept=0.555)[0][1] == 2
        assert judge(name, block, p, accept=0.556)[0][1] != 2
    # The residual after both failures is all on token 3, and q has 2 left: rejected.
    assert judge("recursive", block, p, accept=0.99)[1:] == (0, 3)


@given(
    seed=st.integers(0, 2**32 - 1),
    concentration=st.sampled_from([0.02, 0.3, 3.0]),
    edge=st.sampled_from([None, 0.0, 1 - 2.0**-24]),
    name=st.sampled_from(sorted(verify.LOSSLESS)),
)
def test_verdicts_are_possible(seed, concentration, edge, name):
    """A path of live voting nodes whose tokens, like the next one, have p > 0."""
    random = np.random.default_rng(seed)
    n, v = NODES, VOCAB
    parent = np.arange(n) - 1
    if name not in CHAIN_RULES:
        parent[1:] = [random.integers(0, i) for i in range(1, n)]
    p, q = random.dirichlet(np.full(v, concentration), (2, n))
    p = np.where(p > 1e-3, p, 0) + 1e-9 * (p == p.max(-1, keepdims=True))
    token, live = random.integers(0, v, n), random.uniform(size=n) < 0.8
    live[0] = True
    for i in range(1, n):
        live[i] &= live[parent[i]]
    vote = random.uniform(size=n) < 0.8
    law = (POINT_MASS, Law(q.astype(np.float32)))[random.integers(2)]
    block = tree_block(token, parent, law, live=live, vote=vote)
    out = compiled(name)(noise(n, v, seed, edge, edge), block, law_of(p))
    path, a = np.asarray(out.path), int(out.n_accept)
    assert path[0] == 0 and (path[a + 1 :] == -1).all() and path.shape == (n,)
    for above, node in itertools.pairwise(path[: a + 1]):
        assert parent[node] == above and live[node] and vote[node]
        assert name == "greedy" or p[above, token[node]] > 0
    assert 0 <= int(out.next_token) < v and p[path[a], int(out.next_token)] > 0


# Shapes and programs


def test_draft_vocabulary_that_does_not_fit_is_refused():
    block, p = chain_block(0, 1), law_of(np.full((NODES, 4), 0.25))
    wide = block.replace(law=flat())
    with pytest.raises(ValueError, match="law.q has 5 ids and the target 4"):
        compiled("token")(noise(NODES, 4), wide, p)
    law = Law(flat(vocab=3).q, np.arange(4))
    with pytest.raises(ValueError, match=r"to_target has shape \(4,\), not \(3,\)"):
        compiled("recursive")(noise(NODES, 4), block.replace(law=law), p)


@pytest.mark.parametrize("name", verify.LOSSLESS)
def test_batches_equal_singles_and_trace_once(name):
    random = np.random.default_rng(0)
    traces = []

    def rule(*args):
        traces.append(None)
        return verify.LOSSLESS[name](*args)

    batch = jax.jit(verify.batched(rule))
    parent = np.arange(NODES) - 1 if name in CHAIN_RULES else np.array(PARENT)

    def stack(trees):
        return jax.tree.map(lambda *x: np.stack(x), *trees)

    for _ in range(2):
        p, q = random.dirichlet(np.ones(5), (2, 8, NODES)).astype(np.float32)
        token = random.integers(0, VOCAB, (8, NODES))
        noises = [noise(NODES, VOCAB, int(random.integers(1 << 30))) for _ in range(8)]
        blocks = [tree_block(token[i], parent, Law(q[i])) for i in range(8)]
        out = batch(stack(noises), stack(blocks), law_of(p))
        assert out.path.shape == (8, NODES) and out.n_accept.shape == (8,)
        for i in range(8):
            one = compiled(name)(noises[i], blocks[i], law_of(p[i]))
            row = jax.tree.map(lambda x, i=i: x[i], out)
            jax.tree.map(np.testing.assert_array_equal, row, one)
    assert len(traces) == 1


def sizes(jaxpr):
    """Number of elements of every value that a program computes."""
    for eqn in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in eqn.outvars)
        for sub in jax.tree.leaves(
            list(eqn.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


@pytest.mark.parametrize("name", ["greedy", "walk", "token", "recursive", "traversal"])
@pytest.mark.parametrize("law", ["point", "dense"])
def test_no_value_grows_with_nodes_and_vocabulary(name, law):
    n, v = 12, 4096
    zero = np.zeros((n, v), np.float32)
    parent = np.arange(-1, n - 1, dtype=np.int32)
    on = np.ones(n, bool)
    block = Block(
        0 * parent, parent, on, on, POINT_MASS if law == "point" else Law(zero)
    )
    target = TargetLaw(zero, 0 * parent)
    program = jax.make_jaxpr(verify.LOSSLESS[name])(noise(n, v), block, target)
    largest = max(sizes(program.jaxpr))
    assert largest <= n * n if name == "greedy" else v <= largest <= 2 * v


# Choosing


def test_default_rule():
    def choose(nodes, dense, cold=False):
        return verify.default_rule(DraftShape(nodes, 3, dense=dense), cold)

    assert choose(4, True, True) is choose(9, False, True) is verify.greedy
    assert choose(4, False) is choose(9, False) is verify.walk
    assert choose(4, True) is verify.block
    assert choose(9, True) is verify.traversal
    assert verify.default_rule(DraftShape(1, 0), False) is verify.coupled


def test_which_rules_are_lossless():
    assert all(verify.LOSSLESS[name].__name__ == name for name in verify.LOSSLESS)
    assert not verify.is_lossless(verify.greedy)
    assert all(map(verify.is_lossless, set(verify.LOSSLESS.values()) - {verify.greedy}))
    assert all(verify.is_lossless(rule, 0.0) for rule in verify.LOSSLESS.values())
    assert not verify.is_lossless(verify.lossy.typical())
    assert not verify.is_lossless(verify.lossy.lenient(0.9), 0.0)
