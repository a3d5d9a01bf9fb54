"""Recorded cases of other implementations: where they lie and how they are read."""

from pathlib import Path

import jax.numpy as jnp
from safetensors.numpy import load_file

DATA = Path(__file__).parent.parent / "data" / "parity"
# Of float32 forwards, the same sums in another order.
CLOSE = dict(rtol=1e-5, atol=2e-5)


def recorded(name: str, file: str = "io") -> dict:
    return load_file(DATA / name / f"{file}.safetensors")


def ids(array) -> jnp.ndarray:
    return jnp.asarray(array, jnp.int32)


def paths(tokens, parent, live=None) -> set[tuple[int, ...]]:
    """The token paths to all nodes but the root."""
    found: list[tuple[int, ...]] = [()]
    for token, up in zip(tokens[1:], parent[1:], strict=True):
        found.append((*found[up], int(token)))
    return {p for i, p in enumerate(found) if p and (live is None or live[i])}


def retrieved_paths(tokens, retrieve) -> set[tuple[int, ...]]:
    """The same from rows of node ids, root to leaf, padded with -1."""
    rows = [[int(tokens[i]) for i in row if i >= 0] for row in retrieve]
    return {tuple(row[1:n]) for row in rows for n in range(2, len(row) + 1)}
