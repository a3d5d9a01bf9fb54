"""Block attention: one function, one specification, one kernel per platform."""

from __future__ import annotations

from jspec.pallas import reference
from jspec.types import Array

IMPLEMENTATIONS = {"xla": reference.block_attention}


def block_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    length: Array,
    k_block: Array,
    v_block: Array,
    mask: Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    impl: str | None = None,
) -> Array:
    """Attention of a block over the cached prefix and over itself, one softmax.

    Row ``i`` sees the cache slots ``< length`` and the nodes ``j`` with ``mask[i, j]``:
    ``tril`` is a chain, an ancestor mask a tree, all ones a diffusion block. There may be
    more keys than rows (R >= N): a tree that grows level by level asks for its new nodes
    alone.

    Args:
      q: ``[B, N, H, D]``, rotated.
      k_cache: ``[B, K, D, S]``.  v_cache: ``[B, K, S, D]``.
      length: ``[B]`` int32, live cache slots.
      k_block: ``[B, R, K, D]``, rotated.  v_block: ``[B, R, K, D]``.
      mask: ``[B, N, R]`` bool.
      scale: factor on ``q . k``.
      window: a row sees only keys less than this many positions before it (the node's
        position is ``length + depth``, its depth the number of its other visible
        nodes); None for no window. Needs R = N.
      softcap: ``c * tanh(s / c)`` on the scores, or None.
      impl: a name of ``IMPLEMENTATIONS``; None chooses by platform.

    Returns:
      ``[B, N, H, D]`` in the values' dtype.

    Raises:
      ValueError: unknown ``impl``, a mask that is not ``[B, N, R]``, or a window where
        R is not N.
    """
    (batch, nodes), keys = q.shape[:2], k_block.shape[1]
    if mask.shape != (batch, nodes, keys):
        raise ValueError(
            f"mask has shape {mask.shape}; {nodes} block nodes, {keys} block keys and "
            f"batch {batch} need {(batch, nodes, keys)}"
        )
    if window is not None and nodes != keys:
        raise ValueError(f"a window needs as many rows ({nodes}) as keys ({keys})")
    name = impl or "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r} is not one of {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](
        q,
        k_cache,
        v_cache,
        length,
        k_block,
        v_block,
        mask,
        scale=scale,
        window=window,
        softcap=softcap,
    )
