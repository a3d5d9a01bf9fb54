"""Block attention: one function, one specification, one kernel per platform."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jspec.pallas import live, reference, tiles, tpu
from jspec.types import Array

IMPLEMENTATIONS = {
    "xla": reference.block_attention,
    "tpu": tpu.block_attention,
}
_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])
if _VERSION >= (0, 11, 2):  # older releases lack what the GPU kernel is written in
    from jspec.pallas import gpu

    IMPLEMENTATIONS["gpu"] = gpu.block_attention
_HEAD_DIMS = (64, 96, 128, 256)
_DTYPES = {"tpu": ("bfloat16", "float32"), "gpu": ("bfloat16",)}
_MAX_NODES = 128


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
    ordered: bool = False,
    impl: str | None = None,
) -> Array:
    """Attention of a block over the cached prefix and over itself, one softmax.

    Row ``i`` sees the cache slots ``< length`` and the nodes ``j`` with ``mask[i, j]``:
    ``tril`` is a chain, an ancestor mask a tree, all ones a diffusion block. There may be
    more keys than rows (R >= N): a tree that grows level by level asks for its new nodes
    alone.

    Args:
      q: ``[B, N, H, D]``, rotated.
      k_cache: ``[B, K, D, S]``.  v_cache: ``[B, K, S, D]``. S may be 0.
      length: ``[B]`` int32, live cache slots.
      k_block: ``[B, R, K, D]``, rotated.  v_block: ``[B, R, K, D]``.
      mask: ``[B, N, R]`` bool.
      scale: factor on ``q . k``.
      window: a row sees only keys less than this many positions before it (the node's
        position is ``length + depth``, its depth the number of its other visible
        nodes); None for no window. Needs R = N.
      softcap: ``c * tanh(s / c)`` on the scores, or None.
      ordered: no row sees a node after it, so half of a wide block can be left out.
      impl: a name of ``IMPLEMENTATIONS``, which runs or raises; None for ``choose``'s.

    Returns:
      ``[B, N, H, D]`` in the values' dtype.

    Raises:
      ValueError: unknown ``impl``, a mask that is not ``[B, N, R]``, a window where R is
        not N, or lengths that are known and beyond the cache.
      NotImplementedError: ``impl`` cannot run here or not on these arrays.
    """
    _check(q, k_cache, length, k_block, mask, window)
    name = impl or choose(q, k_cache, k_block, window)
    if name not in ("xla", *_DTYPES):
        raise ValueError(f"impl {impl!r} is not one of {('xla', *_DTYPES)}")
    reason = obstacle(name, q, k_cache, k_block, window)
    if reason is not None:
        raise NotImplementedError(f"impl {name!r}: {reason}")
    attend = IMPLEMENTATIONS[name]
    if name == "xla" and platform() == "cpu":
        attend = functools.partial(live.block_attention, ordered=ordered)
    return attend(
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


def platform() -> str:
    """What is compiled for: the platform of the mesh in use, or the default backend.

    A mesh of a topology (``jax.sharding.use_abstract_mesh``) stands for chips that need
    not be there.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    named = getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if named in ("cuda", "rocm") else named


def choose(q: Array, k_cache: Array, k_block: Array, window: int | None = None) -> str:
    """The implementation that ``impl=None`` takes: the TPU kernel where it can run on these
    arrays, XLA elsewhere. The GPU kernel has to be asked for, until it has been measured.
    """
    if platform() != "tpu" or obstacle("tpu", q, k_cache, k_block, window):
        return "xla"
    return "tpu"


def obstacle(
    name: str, q: Array, k_cache: Array, k_block: Array, window: int | None = None
) -> str | None:
    """Why an implementation cannot run here on these arrays, or None if it can."""
    if name == "xla":
        return None
    if platform() != name:
        return f"needs a {name.upper()}, and this program is for {platform()}"
    if name not in IMPLEMENTATIONS:
        return f"needs jax >= 0.11.2, and this is {jax.__version__}"
    (_, nodes, _, dim), dtype = q.shape, k_cache.dtype
    if dim not in _HEAD_DIMS:
        return f"head size {dim} is not one of {_HEAD_DIMS}"
    if not k_cache.shape[-1]:
        return "there is no cache to read"
    if dtype.name not in _DTYPES[name]:
        return f"a cache of {dtype.name} is not one of {_DTYPES[name]}"
    if max(nodes, k_block.shape[1]) > _MAX_NODES:
        return (
            f"{nodes} rows and {k_block.shape[1]} block keys, but at most "
            f"{_MAX_NODES} of each"
        )
    if name == "gpu" and window is not None:
        return f"window {window}: the GPU kernel has none"
    if name == "gpu" and k_cache.shape[-1] % tiles.gpu_multiple(dim):
        whole = tiles.gpu_multiple(dim)
        return f"{k_cache.shape[-1]} slots are no multiple of {whole}, as copies need"
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1 and not mesh.manual_axes:
        return "a kernel is not split over devices by itself; call it in shard_map"
    return None


def _check(q: Array, k_cache: Array, length: Array, k_block: Array, mask, window):
    (batch, nodes), keys = q.shape[:2], k_block.shape[1]
    if mask.shape != (batch, nodes, keys):
        raise ValueError(
            f"mask has shape {mask.shape}; {nodes} block nodes, {keys} block keys and "
            f"batch {batch} need {(batch, nodes, keys)}"
        )
    if window is not None and nodes != keys:
        raise ValueError(f"a window needs as many rows ({nodes}) as keys ({keys})")
    slots, longest = k_cache.shape[-1], _known(length)
    if longest > slots:
        raise ValueError(f"length {longest} is beyond the cache of {slots} slots")


def _known(length: Array) -> int:
    """The largest length, or 0 while a program is traced."""
    try:
        return int(np.max(np.asarray(length)))
    except jax.errors.TracerArrayConversionError:
        return 0
