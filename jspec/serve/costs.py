"""What a round costs over its number of target rows: measured, predicted, stored.

The scheduler asks one question of a device: how long does a step over B rows take, all
requests together? (DSpark calls its inverse SPS(B), steps a second.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec import checks, measure, record, roofline
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.types import Array


@struct.dataclass
class CostTable:
    """Seconds of a step at some numbers of rows: a forward, or a whole round.

    Attributes:
      rows: ``[n]`` float32, ascending.
      seconds: ``[n]`` float32, never falling.
    """

    rows: Array
    seconds: Array

    def at(self, rows: Array) -> Array:
        """Seconds at any ``rows``: linear between points, constant below the first.

        Above the last point the last slope goes on. Were it constant there, rows that
        nobody measured would look free.
        """
        inside = jnp.interp(rows, self.rows, self.seconds)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return inside + slope * jnp.maximum(rows - self.rows[-1], 0)


def table(seconds: Mapping[int, float]) -> CostTable:
    """A table from ``rows -> seconds``.

    A forward over more rows cannot really be faster, so a point below an earlier one is
    noise, and is lifted to it.

    Raises:
      ValueError: fewer than two points, rows below 1, times that are not positive.
    """
    if len(seconds) < 2:
        raise ValueError(
            f"a cost table with {len(seconds)} points says nothing about the price of a "
            "row; measure at least two numbers of rows (jspec bench --cost-table)"
        )
    points = sorted((checks.count("rows", r, 1), s) for r, s in seconds.items())
    times = [checks.positive(f"seconds at {r} rows", s) for r, s in points]
    return CostTable(
        rows=jnp.asarray([r for r, _ in points], jnp.float32),
        seconds=jnp.asarray(np.maximum.accumulate(times), jnp.float32),
    )


# --- where the points come from -------------------------------------------------------


def measured(
    model: Model,
    *,
    batch: int = 1,
    widths: Sequence[int] = (1, 2, 4, 8),
    context: int = 256,
    runs: int = 5,
) -> dict[int, float]:
    """Seconds of one target forward on this device, over ``batch * width`` rows.

    Args:
      model: the target.
      batch: sequences a forward holds.  widths: rows of each, two or more.
      context: tokens in every sequence's cache.
      runs: timed loops, of which the median counts.
    """
    if len(set(widths)) < 2:
        raise ValueError(f"widths are {list(widths)}; a cost table needs two or more")
    for name, value in {"batch": batch, "context": context}.items():
        checks.count(name, value, 1)
    if context + max(widths) > model.config.max_position:
        raise ValueError(
            f"context is {context}, but {model.name} holds {model.config.max_position} "
            f"tokens, {max(widths)} of them for the block"
        )
    found = measure.verify_curve(
        model, sorted(set(widths)), context=context, batch=batch, runs=runs
    )
    return {batch * width: 1e-3 * ms for width, ms in found.items()}


def of_rounds(
    model: Model,
    draft: Draft,
    *,
    batch: int = 1,
    widths: Sequence[int] = (1, 2, 4, 8),
    context: int = 64,
    runs: int = 5,
    **options: Any,
) -> dict[int, float]:
    """Seconds of a whole round on this device that scores ``batch * width`` rows.

    Unlike ``measured`` this counts what a round has besides the forward: its drafts, which
    cost the same however few of them are verified, and the law and the rule of every row.

    Args:
      model: the target.  draft: proposes chains.
      batch, runs: as for ``measured``.  context: tokens of every prompt.
      widths: rows of each sequence; the block's own is measured too.
      options: sampling options.
    """
    shape = draft.drafter.shape
    inside = tuple(w for w in sorted(set(widths)) if w < shape.nodes)
    drafter = draft.drafter._replace(shape=shape._replace(widths=inside))
    prompts = [[1] * context] * batch
    found = measure.terms(
        model, draft._replace(drafter=drafter), prompts, runs=runs, **options
    )
    return {batch * width.nodes: 1e-3 * width.round for width in found.widths}


def predicted(
    model: roofline.ModelCost,
    chip: roofline.Chip,
    *,
    batch: int = 1,
    widths: Sequence[int] = (1, 2, 4, 8),
    context: int = 256,
) -> dict[int, float]:
    """The same on the roofline of a chip that need not be there: lower bounds."""

    def seconds(width: int) -> float:
        cost = roofline.step_cost(model, rows=width, length=context, batch=batch)
        return roofline.roofline_seconds(*cost, chip)

    return {batch * width: seconds(width) for width in sorted(set(widths))}


# --- JSON -----------------------------------------------------------------------------


def save(path: str | Path, seconds: Mapping[int, float], **about: Any) -> None:
    """Writes a table; ``about`` says what was measured (target, batch, context).

    Raises:
      ValueError: as ``table``.  OSError: the file cannot be written.
    """
    table(seconds)
    points = sorted(seconds.items())
    fields = {
        **about,
        "device": record.device(),
        "rows": [r for r, _ in points],
        "seconds": [s for _, s in points],
    }
    text = json.dumps(fields, indent=1) + "\n"
    Path(path).expanduser().write_text(text, encoding="utf-8")


def load(path: str | Path) -> CostTable:
    """Reads a table.

    Raises:
      ValueError: not the JSON that ``save`` writes, or as ``table``.
      OSError: the file cannot be read.
    """
    text = Path(path).expanduser().read_text(encoding="utf-8")
    try:
        fields = json.loads(text)
        rows, seconds = fields["rows"], fields["seconds"]
        points = dict(zip(rows, map(float, seconds), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no cost table ({error}); write one with "
            "jspec bench --cost-table FILE"
        ) from error
    if len(points) != len(rows):
        raise ValueError(f"{path} names a number of rows twice: {rows}")
    return table(points)
