"""Accept rules: exact laws, identities of expected tokens, edges, shapes."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec import verify
from jspec.testing import (
    CHAINS,
    TREES,
    Scheme,
    assert_lossless,
    battery,
    branching,
    emitted_law,
    emitted_laws,
    one_hot_law,
    raced_laws,
    random_law,
    ranking,
)
from jspec.testing.enumeration import drafts
from jspec.types import POINT_MASS, Block, Law, Noise, TargetLaw

CHAIN_RULES = ("token", "block")
TREE_RULES = ("walk", "recursive", "traversal")
DENSE = ("replace", "without")
# How siblings were drawn is the same to rules for chains, and to one that reads no q.
EXACT = [(r, k) for r in (*CHAIN_RULES, "walk") for k in ("replace", "point")] + [
    (r, k) for r in ("recursive", "traversal") for k in (*DENSE, "point")
]


@functools.cache
def emissions(name, kind):
    """Exact emission of every case of the battery."""
    shapes = CHAINS if name in CHAIN_RULES else CHAINS | TREES
    cases = battery(shapes, kind)
    laws = emitted_laws(verify.LOSSLESS[name], list(cases.values()))
    return dict(zip(cases, laws, strict=True))


@pytest.mark.parametrize(("name", "kind"), EXACT)
def test_emitted_law_is_the_targets(name, kind):
    distance = {case: out.distance for case, out in emissions(name, kind).items()}
    assert max(distance.values()) < 2e-7, distance


def test_coupled_emits_the_winners_of_the_races():
    assert_lossless(verify.coupled, kinds=["without", "point"], laws=raced_laws)


def test_greedy_is_exact_at_temperature_zero():
    assert_lossless(verify.greedy, kinds=["without", "point"], target=one_hot_law)


def test_greedy_is_not_exact_above_temperature_zero():
    with pytest.raises(AssertionError, match="greedy is not lossless on the empty"):
        assert_lossless(verify.greedy, shapes=CHAINS, kinds=["point"])


@pytest.mark.parametrize(
    ("name", "mapped"),
    [("token", False), ("block", True), ("traversal", True)],
)
def test_smaller_draft_vocabulary(name, mapped):
    """Rows of 3 ids over a target of 4, by a map out of order or as its first ids."""
    to_target = [2, 0, 3] if mapped else [0, 1, 2]
    inner = random_law(7, vocab=3)

    def draw(prefix):
        row = np.zeros(4, np.float32)
        row[to_target] = inner(prefix)
        return row

    shape = branching(1, 1) if name in CHAIN_RULES else branching(2, 1)
    scheme = Scheme(shape, "without", draw, claim=inner)
    out = emitted_law(
        verify.LOSSLESS[name],
        random_law(1),
        scheme._replace(to_target=to_target if mapped else None),
    )
    assert out.distance < 2e-7
    assert out.tokens > 1.2


def test_draft_vocabulary_that_does_not_fit_is_refused():
    block, p = chain_block(0, 1), law_of(np.full((NODES, 4), 0.25))
    wide = block.replace(law=flat())
    with pytest.raises(ValueError, match="law.q has 5 ids and the target 4"):
        compiled("token")(noise(NODES, 4), wide, p)
    law = Law(flat(vocab=3).q, np.arange(4))
    with pytest.raises(ValueError, match=r"to_target has shape \(4,\), not \(3,\)"):
        compiled("recursive")(noise(NODES, 4), block.replace(law=law), p)


# Expected tokens


def tokens(name, kind, shape, seed=0):
    case = f"{shape}, kind {kind!r}, plain, seed {seed}"
    return emissions(name, kind)[case].tokens


def chain_tokens(gamma, seed, step):
    """``1 + sum E_q[budget]`` with ``budget = step(budget, p / q)`` along a chain."""
    p = random_law(seed, zeros=seed % 2)
    q = random_law(seed + 1000, zeros=1)
    total = 1.0
    for chance, token, _ in drafts(Scheme(branching(*[1] * gamma), "replace", q)):
        budget = 1.0
        for i in range(1, gamma + 1):
            x, prefix = token[i], token[1:i]
            budget = step(budget, float(p(prefix)[x]) / float(q(prefix)[x]))
            total += chance * budget
    return total


@pytest.mark.parametrize(("gamma", "seed"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)])
def test_tokens_of_chains(gamma, seed):
    shape = f"a chain of {gamma}"
    token = chain_tokens(gamma, seed, lambda budget, ratio: budget * min(1, ratio))
    block = chain_tokens(gamma, seed, lambda budget, ratio: min(1, budget * ratio))
    found = {
        name: tokens(name, "replace", shape, seed)
        for name in ("token", "block", "recursive", "traversal")
    }
    assert found["token"] == pytest.approx(token, abs=1e-6)
    assert found["recursive"] == pytest.approx(token, abs=1e-6)
    assert found["block"] == pytest.approx(block, abs=1e-6)
    assert found["traversal"] == pytest.approx(block, abs=1e-6)
    if gamma > 1 and seed == 0:
        assert block > token + 1e-3


@pytest.mark.parametrize("kind", DENSE)
def test_traversal_accepts_more_than_recursive(kind):
    recursive = emissions("recursive", kind)
    gains = [
        out.tokens - recursive[case].tokens
        for case, out in emissions("traversal", kind).items()
    ]
    assert min(gains) > -1e-6
    assert max(gains) > 0.01


def test_recursive_accepts_more_than_walk():
    for case, out in emissions("walk", "replace").items():
        if "degenerate" not in case:  # where walk may still use the tokens
            assert emissions("recursive", "replace")[case].tokens > out.tokens - 1e-6


@pytest.mark.parametrize("shape", [*CHAINS, *TREES])
def test_tokens_of_chosen_trees_are_the_probability_of_their_paths(shape):
    p, q = random_law(0), random_law(1000, zeros=1)
    parent = {**CHAINS, **TREES}[shape]
    ((_, token, _),) = drafts(Scheme(parent, "point", ranking(q)))
    reach, prefix = [1.0], [()]
    for x, v in zip(token[1:], parent[1:], strict=True):
        reach.append(reach[v] * float(p(prefix[v])[x]))
        prefix.append((*prefix[v], x))
    for name in TREE_RULES:
        assert tokens(name, "point", shape) == pytest.approx(sum(reach), abs=1e-6)


def best_acceptance(p, joint):
    """``1 + min_H P(H) - Q(H)`` over sets H of tokens (Hu et al. 2502.18779)."""
    vocab = len(p)
    gap = []
    for size in range(vocab + 1):
        for h in itertools.combinations(range(vocab), size):
            inside = sum(c for c, drawn in joint if set(drawn) <= set(h))
            gap.append(sum(float(p[x]) for x in h) - inside)
    return 1 + min(gap)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_level_stays_below_the_bound_of_all_rules(kind, seed):
    p = random_law(seed, zeros=seed % 2)
    q = random_law(seed + 1000, zeros=1)
    joint = [(c, t[1:]) for c, t, _ in drafts(Scheme(branching(3), kind, q))]
    bound = best_acceptance(p(()), joint)
    for name in ("recursive", "traversal"):
        found = tokens(name, kind, "the tree (3,)", seed) - 1
        overlap = float(np.minimum(p(()), q(())).sum())
        assert overlap - 1e-6 < found < bound + 1e-6
    one = tokens("recursive", kind, "a chain of 1", seed) - 1
    assert one == pytest.approx(overlap, abs=1e-6)


@pytest.mark.parametrize("name", ["token", "block", "traversal", "recursive"])
def test_perfect_and_disjoint_drafts(name):
    p = random_law(3)
    scheme = Scheme(branching(1, 1, 1), "replace", p)
    if name not in CHAIN_RULES:  # the same with three dead nodes, as compiled before
        scheme = scheme._replace(parent=[-1, 0, 1, 2, 0, 0, 0], live=lambda _, i: i < 4)
    out = emitted_law(verify.LOSSLESS[name], p, scheme)
    assert out.tokens == pytest.approx(4, abs=1e-5)

    def half(prefix, wanted):
        row = np.where(np.arange(4) % 2 == wanted, p(prefix), 0)
        return np.round(row / row.sum() * 4096) / 4096

    target, draft = (functools.partial(half, wanted=w) for w in (0, 1))
    out = emitted_law(verify.LOSSLESS[name], target, scheme._replace(draw=draft))
    assert out.tokens == pytest.approx(1, abs=1e-6)
    assert out.distance < 2e-7


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
    choose = verify.default_rule
    assert choose(True, False, True) is choose(False, True, True) is verify.greedy
    assert choose(True, True, False) is choose(False, True, False) is verify.walk
    assert choose(True, False, False) is verify.block
    assert choose(False, False, False) is verify.traversal


def test_which_rules_are_lossless():
    assert all(verify.LOSSLESS[name].__name__ == name for name in verify.LOSSLESS)
    assert not verify.is_lossless(verify.greedy)
    assert all(map(verify.is_lossless, set(verify.LOSSLESS.values()) - {verify.greedy}))
    assert all(verify.is_lossless(rule, 0.0) for rule in verify.LOSSLESS.values())
    assert not verify.is_lossless(verify.lossy.typical())
    assert not verify.is_lossless(verify.lossy.lenient(0.9), 0.0)
