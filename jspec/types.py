"""The vocabulary of jspec: what passes between drafter, target, rule and cache.

Shape letters used in names and docstrings everywhere:

    B sequences        N nodes of a block, root included     V vocabulary
    G drafts on a path (gamma)      P = G + 1 rows of a path     M model width
    S cache slots      T tokens     F tapped features        L layers
    H / K query / kv heads          D head size

Committed tokens are ``x_0 .. x_{n-1}``. The last one is *pending*: decided, but not
yet in the cache, so ``cache.length == n - 1``. It is node 0, the root, of every block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

Array = jax.Array
Params = Any
DraftState = Any


@struct.dataclass
class Law:
    """The law a block's tokens were *really* drawn from.

    Attributes:
      q: ``[B, N, V']`` float32; row ``i`` is the law that the children of node ``i``
        were drawn from (zero where a node has no children). None means a point mass:
        tokens chosen by argmax, by a top-k list or by lookup.
      to_target: ``[V']`` int32, draft id -> target id, when the draft vocabulary is
        smaller. None means that the ids agree.
      replace: static; were siblings drawn with replacement?
    """

    q: Array | None = None
    to_target: Array | None = None
    replace: bool = struct.field(pytree_node=False, default=True)


POINT_MASS = Law()


@struct.dataclass
class Block:
    """Candidates of one round: a tree of nodes whose root is the pending token.

    A chain, a tree, a prefix of variable length and a lookahead window are all blocks.

    Attributes:
      token: ``[B, N]`` int32 token ids; a dead node holds any valid id.
      parent: ``[B, N]`` int32, -1 at the root, ``parent[i] < i``; siblings stand in
        the order in which they were drawn.
      live: ``[B, N]`` bool, closed under ``parent``; dead nodes are padding. Whether a
        node lives is decided before its token is drawn.
      vote: ``[B, N]`` bool; False marks a probe node, scored but never committed.
      law: the law the tokens were drawn from.
    """

    token: Array
    parent: Array
    live: Array
    vote: Array
    law: Law = POINT_MASS

    def first(self, nodes: int) -> Block:
        """The block of the first ``nodes``."""
        q = self.law.q if self.law.q is None else self.law.q[:, :nodes]
        return Block(
            token=self.token[:, :nodes],
            parent=self.parent[:, :nodes],
            live=self.live[:, :nodes],
            vote=self.vote[:, :nodes],
            law=dataclasses.replace(self.law, q=q),
        )


def chain(token: Array, live: Array | None = None, law: Law = POINT_MASS) -> Block:
    """A chain block ``root -> draft 1 -> ... -> draft G`` from tokens ``[B, N]``."""
    parent = jnp.arange(token.shape[-1], dtype=jnp.int32) - 1
    return Block(
        token=token.astype(jnp.int32),
        parent=jnp.broadcast_to(parent, token.shape),
        live=jnp.ones(token.shape, bool) if live is None else live,
        vote=jnp.ones(token.shape, bool),
        law=law,
    )


@struct.dataclass
class TargetLaw:
    """The target's law at every node, after penalties, temperature and truncation.

    A rule reads what it needs; under ``jit`` the unread field is never computed.

    Attributes:
      p: ``[B, N, V]`` float32 probabilities; one-hot in rows with temperature 0.
      best: ``[B, N]`` int32, the most probable token of each row.
    """

    p: Array
    best: Array


@struct.dataclass
class Noise:
    """All randomness a rule may use. Independent of the noise the draft was made with.

    Attributes:
      accept: ``[B, N]`` float32 in [0, 1), one uniform per node.
      next: ``[B]`` float32 in [0, 1), for the correction or the bonus.
      race: ``[B, P, V]`` float32 > 0, exponential variates. Row ``d`` belongs to the
        absolute position of the token after a node of depth ``d``, so that plain
        decoding and any drafter meet the same numbers (coupled rule only).
    """

    accept: Array
    next: Array
    race: Array


@struct.dataclass
class Verdict:
    """What a rule decided, with the same meaning for every rule and topology.

    Attributes:
      path: ``[B, P]`` int32 node ids, root first, -1 after the last accepted node.
      n_accept: ``[B]`` int32, accepted drafts, 0 .. G. In the feedback to a drafter -1
        marks a row that had ended: always ``n_accept + 1`` tokens are committed.
      next_token: ``[B]`` int32, the correction or the bonus, the last of the
        ``n_accept + 1`` emitted tokens; it becomes the pending token.
    """

    path: Array
    n_accept: Array
    next_token: Array


@struct.dataclass
class Context:
    """What a drafter sees of the text.

    Attributes:
      tokens: ``[B, T]`` int32 committed tokens; entries at ``>= length`` are undefined.
      length: ``[B]`` int32 number of committed tokens, the pending one included.
      sampling: the requests' sampling options, so that a drafter can draw from its law
        at the same temperature (see ``jspec.sampling.Sampling``).
      features: ``[B, T, F]`` tapped target features of positions ``< length - 1``; only
        after prefill and only for drafters that ask for taps.
      cache: the target's cache, to be read by a drafter that is a part of the target;
        in every round, but not after prefill.
    """

    tokens: Array
    length: Array
    sampling: Any
    features: Array | None = None
    cache: Any = None


@struct.dataclass
class Feedback:
    """What a drafter sees after a round.

    Attributes:
      block: the block it proposed.  verdict: the rule's decision.
      logits: ``[B, N, V]`` raw target logits.
      features: ``[B, N, F]`` tapped features of the nodes, or None.
      sampling: as in ``Context``.
    """

    block: Block
    verdict: Verdict
    logits: Array
    features: Array | None = None
    sampling: Any = None


class Scores(NamedTuple):
    """Result of one target forward over a block.

    ``logits [B, R, V]`` float32 (R = N, 1 or 0 rows, as asked), ``kv`` the block's own
    keys and values in the form ``cache.append`` takes, ``features [B, N, F]`` or None.
    """

    logits: Array
    kv: Any
    features: Array | None


class Target(NamedTuple):
    """A model that can score blocks.

    Attributes:
      config: static description; has ``vocab_size``, ``eos_ids`` and ``max_position``.
      init_cache: ``(batch, slots, dtype) -> cache`` with ``append`` and ``length``.
      score: ``(params, cache, block, *, taps=(), rows="all") -> Scores``. ``taps`` are
        static layer ids: ``i`` is the residual stream after ``i`` layers (0 = the
        embedding) and -1 the last hidden state after the final norm. ``rows`` is
        "all", "none" or an ``[B]`` int array that picks one row a sequence. Jspec's own
        models also take ``packed``, a static number R of rows that the live nodes share,
        R at least as many as they; scores of dead nodes mean nothing then.
    """

    config: Any
    init_cache: Callable
    score: Callable


class DraftShape(NamedTuple):
    """Static description of a drafter's blocks.

    Attributes:
      nodes: N, root included.
      depth: G, the longest path that may be kept, so probe nodes do not count; a chain
        has ``nodes == depth + 1``.
      taps: target layers whose features it wants (see ``Target.score``).
      dense: does the block carry ``q``, or are its tokens point masses?
      widths: ascending sizes below ``nodes``. A round whose live nodes all lie among
        the first ``w`` scores only those: a drafter that often finds nothing to propose
        names 1, and such a round costs a plain step.
      packs: ascending rows a sequence, below ``nodes``. A round whose batch of B has at
        most ``p B`` live nodes scores only those, packed; of the sizes that fit the
        smallest is taken. It pays where the blocks of a batch are cut to different sizes.
    """

    nodes: int
    depth: int
    taps: tuple[int, ...] = ()
    dense: bool = False
    widths: tuple[int, ...] = ()
    packs: tuple[float, ...] = ()


class Drafter(NamedTuple):
    """Who drafts: four fields, three of them pure functions.

    Attributes:
      shape: static sizes of the blocks it proposes.
      init: ``(params, Context) -> state``, once after prefill.
      propose: ``(params, state, key, Context) -> (Block, state)``. ``key`` is ``[B]``,
        one per sequence, and is consumed.
      update: ``(params, state, Feedback) -> state``, after the verdict.
    """

    shape: DraftShape
    init: Callable
    propose: Callable
    update: Callable


# (noise, block, law) -> Verdict for ONE sequence; see jspec.verify.
Rule = Callable[[Noise, Block, TargetLaw], Verdict]
