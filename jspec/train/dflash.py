"""Training of block-diffusion drafters: blocks at random anchors of a text.

A block begins at an anchor and sees the text strictly before it. Many blocks of one text
are computed at once: their rows read the text's keys and values, which are made once, and
the rows of their own block, and no other block's. Source: Chen et al. 2602.06036, section
3.2; DSpark (2607.05147), section 3.4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from jspec.cache import KV
from jspec.drafters import block_selector, dspark
from jspec.drafters.block_reach import block_mask
from jspec.drafters.block_selector import Selector
from jspec.drafters.diffusion import Design, Weights, body, context_kv, embedded, logits
from jspec.models.linear import linear
from jspec.sampling import argmax
from jspec.train.chunked import mapped
from jspec.train.draft_rows import draft_rows
from jspec.train.packing import Rows
from jspec.types import Array

_MASKED = -1e30


class Texts(NamedTuple):
    """Packed texts and what the target made of them.

    Attributes:
      features: ``[B, T, F]`` the tapped ones.
      token, document, position: ``[B, T]``; document -1 is padding.
      mask: ``[B, T]`` which tokens count as labels.
    """

    features: Array
    token: Array
    document: Array
    position: Array
    mask: Array


class Blocks(NamedTuple):
    """Blocks to train on: ``anchor [B, N]``, an index of the row, and ``keep [B, N]``;
    blocks that are not kept fill up the shape."""

    anchor: Array
    keep: Array


class Aim(NamedTuple):
    """What the R rows of every block should guess; all ``[B, N, R]``.

    Attributes:
      label: index in the text; clipped where there is none.
      token: its draft id.
      valid: whether the row guesses anything that counts by itself.
    """

    label: Array
    token: Array
    valid: Array


class Rated(NamedTuple):
    """How good the rows' guesses are; all ``[B, N, R]``.

    Attributes:
      surprise: ``-log q(label)``.
      hit: is the label the best guess?
      overlap: ``sum min(p, q)``, the chance of a sampled draft; None without a teacher.
      doubt: confidence logits, or None.
      choice, among: DFlash-2, ``-log`` of the selector's law at the label, and whether
        the label is one of its candidates.
    """

    surprise: Array
    hit: Array
    overlap: Array | None = None
    doubt: Array | None = None
    choice: Array | None = None
    among: Array | None = None


def texts(rows: Rows) -> Texts:
    """The texts of packed rows with ``features``."""
    return Texts(rows.features, rows.tokens, rows.document, rows.position, rows.mask)


def random_anchors(key: Array, given: Texts, count: int) -> Blocks:
    """``count`` anchors a row, uniformly without replacement, ascending.

    An anchor and the token after it are tokens of answers in one document. Drawn anew
    every step: fixed blocks cost a sixth of the accepted length (2602.06036, table 6).
    """
    mask, document = given.mask, given.document
    follows = jnp.pad(
        mask[:, 1:] & (document[:, 1:] == document[:, :-1]), ((0, 0), (0, 1))
    )
    able = mask & follows & (document >= 0)
    rank = jnp.where(able, jax.random.uniform(key, mask.shape), -1.0)
    value, anchor = jax.lax.top_k(rank, min(count, mask.shape[1]))
    order = jnp.argsort(jnp.where(value >= 0, anchor, mask.shape[1]), -1)
    return Blocks(*(jnp.take_along_axis(x, order, 1) for x in (anchor, value >= 0)))


def hidden_rows(
    design: Design, weights: Weights, given: Texts, blocks: Blocks
) -> Array:
    """Normed rows ``[B, N, R, M]`` of every block; gradients flow through the context."""
    rows, (batch, count) = design.block, blocks.anchor.shape
    first = jnp.take_along_axis(given.token, blocks.anchor, 1)[..., None]
    masks = jnp.full((batch, count, rows - 1), design.mask_id)
    token = jnp.concatenate([first, masks], -1).reshape(batch * count, rows)
    start = jnp.take_along_axis(given.position, blocks.anchor, 1)[..., None]
    position = (start + jnp.arange(rows)).reshape(batch * count, rows)
    kv = context_kv(design, weights, given.features, given.position)
    attend = _attending(design, given, blocks, kv)
    x = embedded(design, weights, token)
    return body(design, weights, x, position, attend).reshape(batch, count, rows, -1)


def _attending(design: Design, given: Texts, blocks: Blocks, kv: KV):
    """One softmax over the text before the anchor and the block's own rows."""
    config, rows = design.config, design.block
    anchor, slot = blocks.anchor, jnp.arange(given.token.shape[1])
    document = jnp.take_along_axis(given.document, anchor, 1)[..., None]
    before = (slot < anchor[..., None]) & (given.document[:, None] == document)
    before &= blocks.keep[..., None]

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        seen, own = before[:, :, None], block_mask(design, i, rows)
        if config.windows[i] is not None:
            reach, near = design.reach(config.windows[i], anchor, slot, rows)
            seen, own = seen & reach, own & near
        form = "(b n) r (k g) d -> b n k g r d"
        q = rearrange(q * config.query_scale, form, n=anchor.shape[1], k=k.shape[2])
        k, v = (
            rearrange(x, "(b n) r k d -> b n r k d", n=anchor.shape[1]) for x in (k, v)
        )
        context = jnp.einsum("bnkgrd,btkd->bnkgrt", q, kv.k[i]).astype(jnp.float32)
        block = jnp.einsum("bnkgrd,bnskd->bnkgrs", q, k).astype(jnp.float32)
        context = jnp.where(seen[:, :, None, None], context, _MASKED)
        block = jnp.where(own, block, _MASKED)
        weight = jax.nn.softmax(jnp.concatenate([context, block], -1), -1).astype(
            q.dtype
        )
        size = context.shape[-1]
        a = jnp.einsum("bnkgrt,btkd->bnkgrd", weight[..., :size], kv.v[i])
        a += jnp.einsum("bnkgrs,bnskd->bnkgrd", weight[..., size:], v)
        return rearrange(a, "b n k g r d -> (b n) r (k g) d")

    return attend


def aims(design: Design, weights: Weights, given: Texts, blocks: Blocks) -> Aim:
    """What every row should guess: its own token, or the next one's, of its document.

    A row is valid if that token is one of an answer and can be drafted.
    """
    step = jnp.arange(design.block) + int(design.next_token)
    label = blocks.anchor[..., None] + step
    inside = label < given.token.shape[1]
    label = jnp.minimum(label, given.token.shape[1] - 1)

    def at(x: Array) -> Array:
        return jax.vmap(lambda x, i: x[i])(x, label)

    document = jnp.take_along_axis(given.document, blocks.anchor, 1)[..., None]
    valid = inside & at(given.mask) & (at(given.document) == document) & (step > 0)
    valid &= blocks.keep[..., None]
    rows = weights.head.shape[0]
    token, known = draft_rows(at(given.token), weights.to_target, rows)
    return Aim(label, token, valid & known)


def rate(
    design: Design,
    weights: Weights,
    given: Texts,
    blocks: Blocks,
    aim: Aim,
    *,
    last: Array | None = None,
    teacher: Array | None = None,
) -> Rated:
    """Runs the drafter over all blocks and compares its guesses with their aims.

    A Markov head is given the text's own tokens as the path.

    Args:
      last: ``[B, T, M]`` the target's last hidden states, normed, and
      teacher: ``[V', M]`` its head over the draft vocabulary, for ``overlap``.
    """
    rows = hidden_rows(design, weights, given, blocks)
    batch, count, size, width = rows.shape

    def flat(x: Array) -> Array:
        return x.reshape(batch * count * size, *x.shape[3:])

    arrays, doubt = {"h": flat(rows), "token": flat(aim.token)}, None
    before = jnp.maximum(aim.label - 1, blocks.anchor[..., None])
    previous = jax.vmap(lambda x, i: x[i])(given.token, before)
    if design.link is not None:
        by_block = rows.reshape(batch * count, size, width)
        path = previous.reshape(batch * count, size)
        # A row that guesses nothing is no part of the path.
        first = 0 if design.next_token else 1
        z, e = dspark.codes(
            design.link, weights.joint, path[:, first:], by_block[:, first:]
        )
        z, e = (jnp.pad(x, ((0, 0), (first, 0), (0, 0))) for x in (z, e))
        arrays["z"] = z.reshape(-1, z.shape[-1])
        if weights.confidence is not None:
            doubt = dspark.doubt(weights, by_block, e).reshape(rows.shape[:3])
    selector = isinstance(weights.joint, Selector)
    if selector:
        arrays["previous"] = flat(previous)
    if last is not None:
        feature = jax.vmap(lambda x, i: x[i])(last, aim.label - 1)
        arrays["feature"] = flat(feature)

    names = tuple(arrays)

    def terms(*parts: Array) -> dict[str, Array]:
        part = dict(zip(names, parts, strict=True))
        student = logits(design, weights, part["h"])
        if "z" in part:
            student += linear(part["z"], weights.joint.after)
        log_q = jax.nn.log_softmax(student, -1)
        token = part["token"]
        found = {
            "surprise": -jnp.take_along_axis(log_q, token[:, None], -1)[:, 0],
            "hit": argmax(jax.lax.stop_gradient(student)) == token,
        }
        if selector:
            found |= _chosen(weights.joint, student, part)
        if teacher is not None:
            truth = linear(part["feature"], teacher).astype(jnp.float32)
            log_p = jax.nn.log_softmax(truth, -1)
            found["overlap"] = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), -1)
        return found

    found = mapped(terms, *arrays.values())
    found = {name: x.reshape(rows.shape[:3]) for name, x in found.items()}
    return Rated(**found, doubt=doubt)


def _chosen(
    selector: Selector, unary: Array, part: dict[str, Array]
) -> dict[str, Array]:
    """The selector's part of ``Rated``; ``hit`` is now that of its own choice."""
    score, ids = block_selector.scores(selector, unary, part["h"], part["previous"])
    right = ids == part["token"][:, None]
    log_q = jax.nn.log_softmax(score, -1)
    best = jnp.argmax(jax.lax.stop_gradient(score), -1)
    return {
        "choice": -jnp.sum(jnp.where(right, log_q, 0), -1),
        "among": jnp.any(right, -1),
        "hit": jnp.take_along_axis(right, best[:, None], 1)[:, 0],
    }
