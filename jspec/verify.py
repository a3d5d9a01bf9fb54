"""Accept rules that keep the target's law exactly.

A rule is a pure function of ONE sequence, ``rule(noise, block, target) -> Verdict``,
whose arguments have the shapes of ``jspec.types`` without the leading ``B``; decoding
maps it over the batch (``batched``). ``Verdict.path`` has length N here. The emitted
tokens have exactly the law of plain sampling whatever the draft was, given the contract
of ``jspec.types``: ``law.q`` is what the tokens were really drawn from, siblings stand
in draw order, a node's life is decided before its token, noise is used once.

For every rule a dead or probe node is a missing child; for those that read ``q`` so are
the children of a row that holds a NaN or an infinity or has no mass. A node without
children behaves as if its ``q`` were zero, so correction, early stop and bonus are one
formula, ``normalise(relu(p - q))``. Where that has no mass (p equals q up to rounding) the next
token is drawn from p. Rows of p and q are taken as normalised.

Rules that change the law are in ``jspec.lossy``, reachable as ``verify.lossy``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jspec import judging, lossy
from jspec.types import Array, Block, DraftShape, Noise, Rule, TargetLaw, Verdict

__all__ = [
    "LOSSLESS",
    "batched",
    "block",
    "coupled",
    "default_rule",
    "greedy",
    "is_lossless",
    "lossy",
    "recursive",
    "token",
    "traversal",
    "walk",
]


# Any tree, without q


def greedy(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """Keeps the longest path of the target's own best tokens; for temperature 0.

    Reads ``target.best`` alone: no noise, no probabilities, nothing of size V.
    """
    del noise
    up = judging.parent(block)
    chosen = judging.eligible(block) & (block.token == target.best[up])
    node = judging.deepest(block, chosen)
    return judging.verdict(block, node, target.best[node])


def walk(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """One target sample a node; moves to the child that it hits, if there is one.

    Exact for any tree and any way of drafting, since it never reads q; for point masses
    it is also optimal. Source: "naive sampling" of SpecInfer (Miao et al. 2305.09781);
    in the form of SGLang's sampler, where a child is taken if the node's uniform is
    below the summed p of the children tried so far.
    """
    up, vocab = judging.parent(block), target.p.shape[-1]
    first = judging.distinct(block, judging.eligible(block))
    px = jnp.where(first, target.p[up, block.token], 0)
    before = judging.earlier_siblings(block)
    # A sum, not a product of matrices: these are rounded to 16 bits on accelerators.
    reached = px + jnp.sum(jnp.where(before, px, 0), -1)
    hit = first & (px > 0) & (noise.accept[up] < reached)
    node = judging.deepest(block, hit & ~jnp.any(before & hit, -1))
    tried = jnp.where(first & (block.parent == node), block.token, vocab)
    rest = target.p[node].at[tried].set(0, mode="drop")
    return judging.emit(noise, block, node, target.p[node], rest)


def coupled(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """Walks along ``y = argmax p / race[depth]``, the tokens plain sampling would draw.

    The output equals, token for token, that of the empty block with the same races,
    whatever the drafter and the temperature. Fewer drafts are accepted than by rejection
    unless they are drawn with the same races. Source: Daliri et al. 2408.07978.
    """
    eligible = judging.eligible(block)

    def step(state):
        node, depth, _, _ = state
        p = target.p[node]
        # A zero variate must not lift a token of probability 0 by 0 / 0.
        y = jnp.argmax(jnp.where(p > 0, p / noise.race[depth], 0)).astype(jnp.int32)
        match = eligible & (block.parent == node) & (block.token == y)
        found = jnp.any(match)
        child = jnp.argmax(match).astype(jnp.int32)
        return jnp.where(found, child, node), depth + found, y, found

    zero = jnp.int32(0)
    start = zero, zero, zero, jnp.bool_(True)
    node, _, y, _ = lax.while_loop(lambda state: state[3], step, start)
    return judging.verdict(block, node, y)


# Chains


def token(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """Speculative sampling of a chain: each draft is kept with ``min(1, p / q)``.

    Source: Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm
    2. The residual is computed for the row of the stop alone.
    """
    draft = judging.read(block, target.p)
    keep = draft.ok & (noise.accept * draft.qx < draft.px)
    n = jnp.sum(jnp.cumprod(keep[1:], dtype=jnp.int32), dtype=jnp.int32)
    p = target.p[n]
    left = jax.nn.relu(p - judging.chain_row(block, draft, n))
    return judging.emit_chain(noise, block, n, p, left)


def block(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """Block verification of a chain: the best of rules that see one block.

    ``P_i = min(1, P_{i-1} p_i / q_i)``, ``R_i = sum relu(P_i p_{i+1} - q_{i+1})``, and
    the LAST i with ``u_i < R_i / (R_i + 1 - P_i)`` is kept. The last node has no child,
    so its ``R`` is ``P``. Source: Sun et al. 2403.10444.
    """
    draft = judging.read(block, target.p)

    def step(budget, i):
        ratio = budget * draft.px[i] / draft.qx[i]
        budget = jnp.where(draft.ok[i], jnp.minimum(1, ratio), 0)
        return budget, budget

    nodes = jnp.arange(block.token.shape[0], dtype=jnp.int32)
    one = jnp.ones((), target.p.dtype)
    budget = jnp.append(one, lax.scan(step, one, nodes[1:])[1])
    rows = judging.chain_row(block, draft, slice(None))
    mass = jnp.sum(jax.nn.relu(budget[:, None] * target.p - rows), -1)
    kept = noise.accept * (mass + 1 - budget) < mass
    n = jnp.max(jnp.where(kept, nodes, 0))
    p = target.p[n]
    left = jax.nn.relu(budget[n] * p - judging.chain_row(block, draft, n))
    return judging.emit_chain(noise, block, n, p, left)


# Any tree, with q


def recursive(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """Recursive rejection: tries children in draw order against what is left of p.

    A child x is taken with ``min(1, p(x) / q(x))``; after a failure p becomes
    ``normalise(relu(p - q))``, and x leaves q if draws were made without replacement. A
    point mass only loses its token. Sources: multi-step speculative sampling of
    SpecInfer (Miao et al. 2305.09781, with replacement); Sequoia (Chen et al.
    2402.12374, without).
    """
    r = judging.residuals(block, target.p)

    def trial(state):
        s, node, c = state
        take = noise.accept[c] < r.chance(s, c)
        s = jax.tree.map(lambda a, b: jnp.where(take, a, b), s, r.fail(s, c))
        return s, jnp.where(take, c, node), jnp.where(take, r.child[c], r.sibling[c])

    start = r.start, jnp.int32(0), r.child[0]
    s, node, _ = lax.while_loop(lambda state: state[2] >= 0, trial, start)
    return judging.emit(noise, block, node, target.p[node], r.left(s, node))


def traversal(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
    """Traversal verification: leaves first, so that a late success saves a whole path.

    A child x of a node with budget a gets ``min(1, a p(x) / q(x))``; when its subtree has
    failed, ``p = normalise(relu(a p - q))`` with mass R and ``a = R / (R + 1 - a)``; a
    node whose children have all failed is kept with probability a. On a chain this is
    ``block`` draw by draw; it accepts at least as much as ``recursive``, and more where
    q is dense. Source: traversal verification (2505.12398).
    """
    r = judging.residuals(block, target.p)

    def down(s: judging.Left, node: Array, c: Array):
        """Enters child ``c`` of ``node`` and first children from there to a leaf."""

        def step(state):
            s, _, c = state
            s = s._replace(budget=s.budget.at[c].set(r.chance(s, c)))
            return s, c, r.child[c]

        return lax.while_loop(lambda state: state[2] >= 0, step, (s, node, c))[:2]

    def refused(state):
        s, node = state
        return (node > 0) & (noise.accept[node] >= s.budget[node])

    def back(state):
        s, node = state
        return down(r.fail(s, node), block.parent[node], r.sibling[node])

    start = down(r.start, jnp.int32(0), r.child[0])
    s, node = lax.while_loop(refused, back, start)
    return judging.emit(noise, block, node, target.p[node], r.left(s, node))


# Choosing a rule

LOSSLESS: dict[str, Rule] = {
    "greedy": greedy,
    "walk": walk,
    "coupled": coupled,
    "token": token,
    "block": block,
    "recursive": recursive,
    "traversal": traversal,
}


def is_lossless(rule: Rule, temperature: float = 1.0) -> bool:
    """Is ``rule`` one of this module's, and exact at ``temperature``?

    ``greedy`` is exact at temperature 0 only. Sampling rules are exact there too.
    """
    if rule is greedy:
        return temperature == 0
    return any(rule is exact for exact in LOSSLESS.values())


def default_rule(shape: DraftShape, temperature_is_zero: bool) -> Rule:
    """The exact rule that accepts most of a drafter's blocks; of equal ones the cheapest.

    Without drafts every rule is plain sampling. ``coupled`` is chosen there, so that it
    yields the same text with a drafter and without.
    """
    if temperature_is_zero:
        return greedy
    if shape.depth == 0:
        return coupled
    if not shape.dense:
        return walk
    return block if shape.nodes == shape.depth + 1 else traversal


def batched(rule: Rule) -> Rule:
    """``rule`` over a leading batch axis of everything but ``law.to_target [V']``."""

    def apply(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
        shared = block.law.to_target

        def one(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
            law = dataclasses.replace(block.law, to_target=shared)
            return rule(noise, dataclasses.replace(block, law=law), target)

        law = dataclasses.replace(block.law, to_target=None)
        return jax.vmap(one)(noise, dataclasses.replace(block, law=law), target)

    return apply
