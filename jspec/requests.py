"""A batch of requests: checked before anything is compiled, then prefilled and run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from jspec import decode, sampling, verify
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.prefill import chunk_for, whole_for
from jspec.state import Params, State
from jspec.text import Prompt, encode
from jspec.types import Drafter, Rule

# Slots come in multiples of this, so that prompts of similar length share a program.
SLOTS = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """A validated batch: everything ``prefill`` and ``run`` are called with."""

    model: Model
    draft: Draft
    rule: Rule
    prompts: list[list[int]]
    options: sampling.Sampling
    stop: tuple[str, ...]
    limit: np.ndarray
    slots: int
    log_prob: bool

    @property
    def params(self) -> Params:
        return Params(self.model.params, self.draft.params)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arrays that ``decode.prefill`` is given."""
        tokens = np.zeros((len(self.prompts), self.slots), np.int32)
        for row, ids in zip(tokens, self.prompts, strict=True):
            row[: len(ids)] = ids
        length = np.asarray([len(p) for p in self.prompts], np.int32)
        limit = np.asarray(self.limit, np.int32)
        return self.params, self.options, tokens, length, limit

    def prefill(self) -> State:
        longest = max(map(len, self.prompts))
        return decode.prefill(
            *self.arguments,
            target=self.model.target,
            drafter=self.draft.drafter,
            slots=self.slots,
            chunk=chunk_for(longest),
            whole=whole_for(longest, len(self.prompts)),
            log_prob=self.log_prob,
            dtype=self.model.cache_dtype,
        )

    def run(self, state: State, rounds: jax.Array) -> State:
        return decode.run(
            self.params,
            state,
            rounds,
            target=self.model.target,
            drafter=self.draft.drafter,
            rule=self.rule,
        )


def prepare(
    model: Model,
    drafter: Drafter | Draft | None = None,
    prompts: Prompt | Sequence[Prompt] = (),
    *,
    max_new_tokens: int = 128,
    rule: Rule | None = None,
    stop: str | Sequence[str] = (),
    chat: bool | None = None,
    eos_ids: Sequence[int] | None = None,
    log_prob: bool = False,
    slots: int | None = None,
    **options,
) -> Request:
    """Validates a batch of requests; nothing is compiled or run.

    Args:
      model, drafter, prompts: see ``generate``.
      max_new_tokens: most tokens a row emits.
      rule: a rule of ``jspec.verify``; by default the best exact one for the drafter's
        blocks and the temperature.
      stop: the text ends before the first of these strings.
      chat: True or False to force or forbid the chat template.
      eos_ids: token ids that end a row; by default the model's own.
      log_prob: return log-probabilities of the new tokens under the plain model.
      slots: context capacity in tokens, prompt and new ones together; by default what
        the prompts and ``max_new_tokens`` need.
      **options: sampling options, each a value or a list with one value a prompt; see
        ``jspec.sampling.options``.

    Raises:
      ValueError: bad input; the message names the value and the remedy.
      TypeError: a drafter that is none.
    """
    config = model.target.config
    draft = as_draft(drafter)
    if draft.vocab_size not in (None, config.vocab_size):
        raise ValueError(
            f"{draft.name} was made for a target with {draft.vocab_size} tokens, but "
            f"{model.name} has {config.vocab_size}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; need at least 1")
    ids = encode(model.tokenizer, _as_list(prompts), config.vocab_size, chat)
    eos = config.eos_ids if eos_ids is None else tuple(eos_ids)
    knobs = sampling.options(
        len(ids), vocab_size=config.vocab_size, eos_ids=eos, **options
    )
    depth = draft.drafter.shape.depth
    limit, slots = _budget([len(p) for p in ids], max_new_tokens, depth, slots, config)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none")
    if "" in stop:
        raise ValueError("a stop string is empty; it would stop every text at once")
    if rule is None:
        cold = not np.any(np.asarray(knobs.temperature))
        rule = verify.default_rule(draft.drafter.shape, cold)
    return Request(model, draft, rule, ids, knobs, stop, limit, slots, log_prob)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or several.

    Raises:
      ValueError: there is none.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not len(prompts):
        raise ValueError("no prompts; give at least one string or list of token ids")
    ids = [p for p in prompts if not isinstance(p, str) and np.ndim(p) == 0]
    if ids:  # one prompt of token ids
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def as_draft(drafter: Drafter | Draft | None) -> Draft:
    """A drafter with its weights, from whatever stands for one.

    Raises:
      TypeError: nothing of that kind.
    """
    if drafter is None:
        return Draft(decode.no_drafts(), name="none")
    if isinstance(drafter, Draft):
        return drafter
    if isinstance(drafter, Drafter):
        return Draft(drafter)
    raise TypeError(
        f"drafter is a {type(drafter).__name__}; give None, a Drafter, or what "
        "load_drafter returns"
    )


def _budget(lengths: list[int], new: int, depth: int, slots: int | None, config):
    """Committed tokens at which each row ends, and the slots to allocate."""
    capacity = config.max_position if slots is None else slots
    if capacity > config.max_position:
        raise ValueError(
            f"slots is {slots}, but the model's context ends at {config.max_position}"
        )
    longest = max(lengths)
    if longest >= capacity:
        raise ValueError(
            f"prompt {lengths.index(longest)} has {longest} tokens, but the context "
            f"holds {capacity} including at least one new token; shorten the prompt or "
            "raise slots"
        )
    if depth >= capacity:
        raise ValueError(
            f"gamma is {depth}, but the context holds only {capacity} tokens"
        )
    limit = np.minimum(np.asarray(lengths) + new, capacity)
    # Slack for one block: the cache is written a whole path at a time.
    # Slots asked for are allocated whole, so that all calls with them share a program.
    needed = (int(limit.max()) if slots is None else slots) + depth + 1
    return limit, -(-needed // SLOTS) * SLOTS
