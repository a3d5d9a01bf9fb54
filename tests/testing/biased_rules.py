"""Two wrong rules that several tests need. Each looks like a right one."""

import jax.numpy as jnp

from jspec import judging, verify


def ignores_draft(noise, block, target):
    """Accepts what was drafted."""
    kept = jnp.cumprod(block.live & block.vote, dtype=jnp.int32)
    n = jnp.sum(kept, dtype=jnp.int32) - 1
    return judging.emit_chain(noise, block, n, target.p[n], target.p[n])


def reused_uniform(noise, block, target):
    """Corrects with the uniform that rejected."""
    return verify.token(noise.replace(next=noise.accept[1]), block, target)
