"""A drafter against plain decoding on the same prompts, in turn, and text for text."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from jspec import stats
from jspec.drafters.draft import Draft
from jspec.generation import Output, generate
from jspec.models import Model
from jspec.requests import prepare
from jspec.stats import Stats
from jspec.types import Rule, chain

# Two logits closer than this are a tie: which of them wins is a matter of rounding.
TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts of one category that are decoded together.

    ``prompts`` are token ids. The last batch of a category is filled up with its first
    prompts, so that all batches share a program; ``repeats`` of them are such.
    """

    category: str
    prompts: list[list[int]]
    repeats: int = 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """What both sides made of one batch."""

    batch: Batch
    plain: Output
    ours: Output

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding."""
        return self.ours.stats.tokens_per_s / self.plain.stats.tokens_per_s


@dataclasses.dataclass(frozen=True)
class Summary:
    """Both sides over several batches.

    Attributes:
      prompts: prompts, repeats not counted.
      ours, plain: merged statistics.
      median: of the batches' speed-ups; ``speedup`` is the ratio of the totals.
    """

    prompts: int
    ours: Stats
    plain: Stats
    median: float

    @property
    def speedup(self) -> float:
        return self.ours.tokens_per_s / self.plain.tokens_per_s


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where texts part that should be the same: greedy ones, or coupled samples.

    Attributes:
      first: smallest number of a new token (from 0) in which any pair of texts differs;
        None if all are equal.
      gap: largest gap, over those texts, between the target's logits of the two tokens
        at the first difference; infinite where one text merely ends before the other.
    """

    first: int | None = None
    gap: float | None = None

    @property
    def is_tie(self) -> bool:
        """No difference, or none that is more than rounding (``TIE``)."""
        return self.gap is None or self.gap < TIE


def batches(
    prompts: Sequence[tuple[str, list[int]]], size: int, limit: int | None = None
) -> list[Batch]:
    """Batches of ``size`` prompts of one category each, categories in turn.

    Args:
      prompts: ``(category, token ids)``.  size: prompts a batch.
      limit: most batches.

    Raises:
      ValueError: if ``size < 1``.
    """
    if size < 1:
        raise ValueError(f"batch is {size}; it must be at least 1")
    groups: dict[str, list[list[int]]] = {}
    for category, ids in prompts:
        groups.setdefault(category, []).append(ids)
    made = []
    for category, group in groups.items():
        for turn, at in enumerate(range(0, len(group), size)):
            part = group[at : at + size]
            fill = [group[i % len(group)] for i in range(size - len(part))]
            made.append((turn, Batch(category, part + fill, len(fill))))
    made.sort(key=lambda item: item[0])
    return [batch for _, batch in made][:limit]


def duel(
    model: Model,
    draft: Draft | None,
    rule: Rule | None,
    given: Sequence[Batch],
    **arguments,
) -> Iterator[Pair]:
    """Decodes every batch plainly and with the drafter, one right after the other.

    Both programs are compiled, and run once, before the first pair. Without a drafter
    both sides are one and the same run.

    Args:
      model, draft, rule, **arguments: see ``jspec.prepare``; ``slots`` should hold
        every prompt, so that nothing is compiled between the batches.
      given: what to decode.
    """
    warm = {**arguments, "max_new_tokens": 2}
    generate(model, None, given[0].prompts, **warm)
    if draft is not None:
        generate(model, draft, given[0].prompts, rule=rule, **warm)
    for batch in given:
        plain = generate(model, None, batch.prompts, **arguments)
        ours = plain
        if draft is not None:
            ours = generate(model, draft, batch.prompts, rule=rule, **arguments)
        yield Pair(batch, plain, ours)


def summarise(pairs: Sequence[Pair]) -> Summary:
    """One summary of at least one pair."""
    return Summary(
        prompts=sum(len(p.batch.prompts) - p.batch.repeats for p in pairs),
        ours=stats.merge([p.ours.stats for p in pairs]),
        plain=stats.merge([p.plain.stats for p in pairs]),
        median=statistics.median(p.speedup for p in pairs),
    )


def compare(model: Model, pairs: Sequence[Pair], slots: int | None) -> Divergence:
    """Compares texts token for token.

    Args:
      model: the target, asked for its logits where two texts part.
      pairs: decoded at temperature 0, or with the coupled rule.
      slots: as they were decoded with.
    """
    found = [
        _part(model, prompt, plain, ours, slots)
        for pair in pairs
        for prompt, plain, ours in zip(
            pair.batch.prompts, pair.plain.tokens, pair.ours.tokens, strict=True
        )
        if plain != ours
    ]
    if not found:
        return Divergence()
    return Divergence(min(at for at, _ in found), max(gap for _, gap in found))


def _part(model: Model, prompt, plain, ours, slots) -> tuple[int, float]:
    """Number of the first token that differs, and the gap between the two logits."""
    both = list(zip(plain, ours, strict=False))
    at = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
    if at == len(both):
        return at, math.inf
    logits = _next_logits(model, prompt + plain[:at], slots)
    return at, float(abs(logits[plain[at]] - logits[ours[at]]))


def _next_logits(model: Model, tokens: list[int], slots: int | None) -> jax.Array:
    """The target's logits ``[V]`` after ``tokens``."""
    state = prepare(model, None, [tokens], max_new_tokens=1, slots=slots).prefill()
    block = chain(jnp.asarray([[tokens[-1]]], jnp.int32))
    return _score(model.params, state.cache, block, target=model.target).logits[0, 0]


_score = jax.jit(
    lambda params, cache, block, *, target: target.score(params, cache, block),
    static_argnames="target",
)
