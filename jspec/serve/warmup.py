"""An engine's compiled programs, all made and measured before the first request."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec import requests, verify
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.prefill import Filled, chunk_for
from jspec.serve import mesh as meshes
from jspec.serve import prefixes, slots, switch
from jspec.serve.adaptive import Cost
from jspec.serve.request import Prepared
from jspec.state import Params, State
from jspec.text import Prompt
from jspec.types import Drafter, Rule

_TIMED = 5  # rounds of each program, of which the median counts


class Shape(NamedTuple):
    """Static sizes of an engine; see ``Engine``. ``patience`` is in rounds."""

    sizes: tuple[int, ...]
    context: int
    log_prob: bool
    table: int
    patience: int = 16


class Programs:
    """The jitted functions of ``slots`` and ``switch`` for one model and one drafter."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter | Draft | None,
        rule: Rule,
        shape: Shape,
        mesh: jax.sharding.Mesh | None,
        eos_ids: Sequence[int] | None,
    ):
        self._eos_ids = eos_ids
        draft = requests.as_draft(drafter)
        self.drafts = draft.drafter.shape.depth > 0
        self.shape, self._rules = shape, {True: verify.greedy, False: rule}
        self.mesh = mesh
        if mesh is not None:
            meshes.check(mesh, shape.sizes)
            model, draft = meshes.shard(mesh, model), meshes.replicate(mesh, draft)
        self.model = model
        self.draft = draft._replace(drafter=switch.switched(draft.drafter))
        self.plain = switch.paused(self.draft.drafter)
        self.params = Params(model.params, draft.params)
        one, two = (self._request([[0]] * n, seed=[0] * n) for n in (1, 2))
        self.axes = slots.row_axes(one.prefill, two.prefill)
        self._layouts: dict[int, slots.Shardings] = {}
        self._like = jax.eval_shape(one.prefill)
        # With nothing in common any prompt's will do; see ``warm_up``.
        self.nothing = prefixes.nothing(
            self.params, model.target, self.draft.drafter, one.slots, model.cache_dtype
        )

    # --- requests -----------------------------------------------------------------

    def prepare(self, prompt: Prompt, *, seed: int | None = 0, **options) -> Prepared:
        """See ``Engine.prepare``."""
        if options.pop("log_prob", False) and not self.shape.log_prob:
            raise ValueError(
                "log_prob is asked for, but the engine records none; start it with "
                "log_prob=True"
            )
        prepared = Prepared(self._request([prompt], seed=[seed or 0], **options))
        if self._rules[False] is verify.greedy and not prepared.cold:
            raise ValueError(
                f"temperature is {options['temperature']}, but the engine's rule is "
                "greedy; start it with another rule, such as coupled"
            )
        return prepared

    def _request(self, prompts: list, **options) -> requests.Request:
        request = requests.prepare(
            self.model,
            self.draft,
            prompts,
            slots=self.shape.context,
            log_prob=self.shape.log_prob,
            eos_ids=self._eos_ids,
            **options,
        )
        fitted = slots.fit_tables(request.options, self.shape.table)
        if self.mesh is not None:
            fitted = meshes.copied(self.mesh, fitted)
        return dataclasses.replace(request, options=fitted)

    # --- on the device ------------------------------------------------------------

    def prefill(
        self, prepared: Prepared, begun: Filled | None = None, shared: int = 0
    ) -> tuple[State, Filled]:
        """A row, and what its prompt leaves; ``begun`` as for ``prefixes.prefill``."""
        row = prepared.row
        state, features = prefixes.prefill(
            *row.arguments,
            begun or self.nothing,
            np.int32(shared),
            target=row.model.target,
            drafter=row.draft.drafter,
            slots=row.slots,
            chunk=chunk_for(len(prepared.prompt) - shared),
            log_prob=row.log_prob,
            dtype=row.model.cache_dtype,
            shardings=self._layout_of(1, self._like),
        )
        return state, Filled(state.cache, features)

    def insert(self, state: State, one: State, slot: int) -> State:
        return slots.insert(
            state, one, np.int32(slot), axes=self.axes, shardings=self._layout(state)
        )

    def evict(self, state: State, ended: Any) -> State:
        return slots.evict(state, ended, shardings=self._layout(state))

    def resume(self, state: State) -> State:
        return switch.resume(self.params, state, drafter=self.draft.drafter)

    def resize(self, state: State, chosen: Sequence[int], size: int) -> State:
        index, keep = slots.rows(chosen, size)
        layout = self._layout_of(size, state)
        return slots.resize(state, index, keep, axes=self.axes, shardings=layout)

    def round(self, state: State, drafted: bool, cold: bool):
        return slots.one_round(
            self.params,
            state,
            target=self.model.target,
            drafter=self.draft.drafter if drafted else self.plain,
            rule=self._rules[cold],
            shardings=self._layout(state),
        )

    def spread(self, one: State, size: int) -> State:
        layout = self._layout_of(size, one)
        return slots.spread(one, axes=self.axes, size=size, shardings=layout)

    def _layout(self, state: State) -> slots.Shardings:
        return self._layout_of(state.length.shape[0], state)

    def _layout_of(self, size: int, like: State) -> slots.Shardings:
        if self.mesh is None:
            return None
        if size not in self._layouts:
            self._layouts[size] = meshes.layout(self.mesh, like, self.axes, size)
        return self._layouts[size]


def warm_up(programs: Programs) -> tuple[State, dict[int, Cost]]:
    """Compiles every program; the empty slots of the smallest size, and all costs.

    The rounds are timed on copies of one running request, whose prompt repeats itself so
    that a lookup finds something to propose.
    """
    sizes, costs = programs.shape.sizes, {}
    room = programs.shape.context - 1
    chunks = {chunk_for(n): n for n in range(min(room, 129), 0, -1)}
    prepared = programs.prepare([0] * min(room, 16), max_new_tokens=1 << 20)
    one, programs.nothing = programs.prefill(prepared)
    for length in chunks.values():
        programs.prefill(programs.prepare([0] * length, max_new_tokens=1))
    empty = {}
    for size in sizes:
        costs[size] = _measured(programs, one, size)
        state = programs.insert(programs.spread(one, size), switch.turned(one, True), 0)
        empty[size] = programs.evict(state, np.ones(size, bool))
    for old, new in itertools.permutations(sizes, 2):
        programs.resize(empty[old], [0], new)
    return empty[sizes[0]], costs


def _measured(programs: Programs, one: State, size: int) -> Cost:
    """Compiles and times the rounds of one size."""

    def seconds(drafted: bool, cold: bool) -> float:
        state, times = programs.spread(one, size), []
        for _ in range(1 + _TIMED):
            start = time.perf_counter()
            state, look = programs.round(state, drafted, cold)
            jax.block_until_ready((state, look))
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    plain = seconds(False, True)
    seconds(False, False)
    if not programs.drafts:
        return Cost(plain, plain, plain)
    drafted = seconds(True, True)
    seconds(True, False)
    state = jax.block_until_ready(programs.resume(programs.spread(one, size)))
    start = time.perf_counter()
    jax.block_until_ready(programs.resume(state))
    resume = time.perf_counter() - start
    lookup = bool(programs.draft.drafter.shape.widths)
    return Cost(plain, drafted, plain if lookup else drafted, resume)
