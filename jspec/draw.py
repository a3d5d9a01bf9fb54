"""Blocks drawn as trees: which nodes were proposed, and which accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.markup import escape
from rich.tree import Tree

from jspec import sampling as smp
from jspec.drafters.draft import Draft
from jspec.models import Model
from jspec.requests import prepare
from jspec.state import context
from jspec.text import Prompt
from jspec.types import Rule


class Drawn(NamedTuple):
    """The block of one round and what became of it.

    Attributes:
      token: ``[N]`` ids of its nodes.  parent: ``[N]``, -1 at the root.
      live: ``[N]``, which nodes were proposed.
      accepted: the nodes that were kept, besides the root.
      next_token: what the target added.
    """

    token: np.ndarray
    parent: np.ndarray
    live: np.ndarray
    accepted: frozenset[int]
    next_token: int

    def children(self, node: int) -> list[int]:
        """Live children of a node."""
        return np.flatnonzero((self.parent == node) & self.live).tolist()


def rounds(
    model: Model,
    draft: Draft,
    prompt: Prompt,
    count: int = 3,
    rule: Rule | None = None,
    **options,
) -> list[Drawn]:
    """The blocks of the first ``count`` rounds after a prompt, fewer if the text ends.

    Args:
      model, draft, rule: as for ``generate``.
      prompt: a text or token ids.
      **options: sampling options.
    """
    most = count * (draft.drafter.shape.depth + 1)
    request = prepare(model, draft, [prompt], max_new_tokens=most, rule=rule, **options)

    @jax.jit
    def propose(params, state):
        key, _ = smp.row_keys(state.sampling, state.round)
        return draft.drafter.propose(params, state.draft, key, context(state))[0]

    state, found = request.prefill(), []
    for _ in range(count):
        block, length = propose(draft.params, state), int(state.length[0])
        state = request.run(state, jnp.int32(1))
        new = np.asarray(state.tokens[0, length : int(state.length[0])]).tolist()
        if not new:
            break
        token, parent, live = (
            np.asarray(x[0]) for x in (block.token, block.parent, block.live)
        )
        drawn = Drawn(token, parent, live, frozenset(), new[-1])
        found.append(drawn._replace(accepted=_accepted(drawn, new[:-1])))
    return found


def _accepted(drawn: Drawn, tokens: Iterable[int]) -> frozenset[int]:
    """The nodes that drafted ``tokens``, one below the other."""
    node, kept = 0, []
    for token in tokens:
        node = next(n for n in drawn.children(node) if drawn.token[n] == token)
        kept.append(node)
    return frozenset(kept)


def terminal(drawn: Drawn, name: Callable[[int], str]) -> Tree:
    """A tree to print; accepted nodes are green, the others dim.

    Args:
      drawn: a round.
      name: from a token id to its text.
    """

    def label(node: int) -> str:
        text = escape(repr(name(int(drawn.token[node]))))
        if node == 0:
            return f"[bold]{text}[/]"
        return f"[green]{text} +[/]" if node in drawn.accepted else f"[dim]{text}[/]"

    def grow(branch: Tree, node: int) -> None:
        for child in drawn.children(node):
            grow(branch.add(label(child)), child)

    top = Tree(label(0))
    grow(top, 0)
    end = escape(repr(name(drawn.next_token)))
    count = int(drawn.live.sum()) - 1
    top.add(f"{len(drawn.accepted)} of {count} drafts kept, then {end}")
    return top


def image(every: Sequence[Drawn], name: Callable[[int], str], file: str | Path) -> None:
    """Draws rounds side by side into a PNG.

    Raises:
      OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(every), 4.5), layout="constrained")
    for axes, drawn in zip(
        figure.subplots(1, len(every), squeeze=False)[0], every, strict=True
    ):
        place = _places(drawn)
        for node, (x, y) in place.items():
            kept = node == 0 or node in drawn.accepted
            color = "tab:green" if kept else "0.6"
            if node:
                up = place[int(drawn.parent[node])]
                axes.plot((up[0], x), (up[1], y), color=color, linewidth=1, zorder=0)
            axes.annotate(
                repr(name(int(drawn.token[node])))[1:-1].replace("$", r"\$"),
                (x, y),
                ha="center",
                va="center",
                fontsize=8,
                color=color,
                bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": color},
            )
        axes.set_title(f"{len(drawn.accepted)} drafts kept", fontsize=9)
        axes.margins(0.15)
        axes.axis("off")
    figure.savefig(file)


def _places(drawn: Drawn) -> dict[int, tuple[float, float]]:
    """Leaves one beside the other, parents above the middle of their children."""
    place: dict[int, tuple[float, float]] = {}
    leaves = 0

    def put(node: int, depth: int) -> float:
        nonlocal leaves
        below = [put(child, depth + 1) for child in drawn.children(node)]
        if not below:
            leaves += 1
        x = sum(below) / len(below) if below else float(leaves)
        place[node] = x, -float(depth)
        return x

    put(0, 0)
    return place
