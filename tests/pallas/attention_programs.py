"""The supported table of the attention kernels, as programs compiled ahead of time."""

import functools
import itertools

import jax
import jax.numpy as jnp
from attention_cases import BF16, F32, Case
from jax.sharding import NamedSharding, PartitionSpec

from jspec import topology
from jspec.pallas import block_attention

DIMS = (64, 96, 128, 256)
# Query heads a kv head, and nodes: least and most of both, and some between.
CORNERS = ((1, 1), (1, 128), (16, 1), (4, 17), (3, 6))
LARGEST = (16, 128)
EXTRAS = tuple(
    dict(window=window, softcap=softcap)
    for window, softcap in itertools.product((None, 512), (None, 50.0))
)


MODELS = (
    Case(8, 32, 32, 8, 128, 8192, BF16),  # Llama 3.1 8B
    Case(8, 32, 32, 8, 128, 8192, F32),
    Case(1, 1, 32, 8, 128, 131072, BF16),
    Case(1, 8, 64, 8, 128, 1024, BF16, window=512),  # Llama 3.1 70B
    Case(2, 5, 9, 3, 64, 320, BF16),  # SmolLM2
    Case(1, 33, 4, 1, 256, 1024, F32, window=512, softcap=50.0),  # Gemma
)
ODD = (Case(1, 8, 8, 8, 128, 1000, BF16), Case(2, 7, 12, 12, 96, 300, F32))


def tpu_programs() -> dict[str, tuple[Case, ...]]:
    """Every head size with every dtype at every corner, in few programs.

    From corner to corner each of them goes through windows and soft-caps in turn.
    """
    made = {"models": MODELS, "odd capacities": ODD}
    for turn, (group, nodes) in enumerate(CORNERS):
        made[f"{group} x {nodes}"] = tuple(
            Case(1, nodes, 2 * group, 2, dim, 1024, dtype, **EXTRAS[(i + turn) % 4])
            for i, (dim, dtype) in enumerate(itertools.product(DIMS, (BF16, F32)))
        )
    group, nodes = LARGEST
    made["largest"] = (
        Case(1, nodes, group, 1, 128, 2048, BF16),
        Case(1, nodes, 2 * group, 2, 256, 1024, F32, window=512, softcap=50.0),
    )
    return made


def gpu_programs() -> dict[str, tuple[Case, ...]]:
    """The same for the GPU kernel, which has bfloat16 and no windows."""
    plain = [s for s in MODELS if s.dtype == BF16 and s.window is None]
    made = {"models": tuple(plain)}
    for turn, (group, nodes) in enumerate((*CORNERS, LARGEST)):
        made[f"{group} x {nodes}"] = tuple(
            Case(1, nodes, 2 * group, 2, dim, 1024, BF16, **EXTRAS[(i + turn) % 2])
            for i, dim in enumerate(DIMS)
        )
    return made


def compiled(mesh, shapes, impl: str):
    """One program that attends in every one of ``shapes``."""
    here = NamedSharding(mesh, PartitionSpec())

    def arguments(s: Case):
        def array(*shape, of=s.dtype):
            return jax.ShapeDtypeStruct(shape, of, sharding=here)

        own = array(s.batch, s.nodes, s.kv_heads, s.dim)
        return (
            array(s.batch, s.nodes, s.heads, s.dim),
            array(s.batch, s.kv_heads, s.dim, s.slots),
            array(s.batch, s.kv_heads, s.slots, s.dim),
            array(s.batch, of=jnp.int32),
            own,
            own,
            array(s.batch, s.nodes, s.nodes, of=jnp.bool_),
        )

    def program(*given):
        attend = functools.partial(block_attention, scale=0.1, impl=impl)
        return [
            attend(*arrays, window=s.window, softcap=s.softcap)
            for s, arrays in zip(shapes, given, strict=True)
        ]

    with topology.compiling_for(mesh):
        return jax.jit(program).lower(*map(arguments, shapes)).compile()
