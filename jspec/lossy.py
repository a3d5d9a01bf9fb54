"""Accept rules that CHANGE the law of the text, for comparisons with papers.

Each function here makes a rule with the signature of ``jspec.verify``. None is lossless:
they trade likeness to the target for longer accepted paths.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import judging, verify
from jspec.types import Block, Noise, Rule, TargetLaw, Verdict

__all__ = ["lenient", "typical"]


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """LOSSY: keeps the longest path of tokens that the target finds typical.

    A token x is kept if ``p(x) > min(epsilon, delta exp(-H(p)))``, with H the entropy of
    p; of the longest paths the most probable wins, and the target's best token follows.
    The rule uses no noise and never reads q. Source: Medusa (Cai et al. 2401.10774),
    typical acceptance; the defaults are those of its code.

    Raises:
      ValueError: if ``epsilon`` or ``delta`` is not positive.
    """
    if epsilon <= 0 or delta <= 0:
        raise ValueError(f"epsilon {epsilon} and delta {delta} must be positive")

    def rule(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
        del noise
        p = target.p
        entropy = -jnp.sum(p * jnp.log(p + 1e-5), -1)
        bar = jnp.minimum(epsilon, delta * jnp.exp(-entropy))
        up = judging.parent(block)
        px = p[up, block.token]
        chosen = judging.eligible(block) & (px > bar[up])
        score = judging.path_sum(block, jnp.log(jnp.where(chosen, px, 1)))
        node = judging.deepest(block, chosen, score)
        return judging.verdict(block, node, target.best[node])

    return rule


def lenient(factor: float) -> Rule:
    """LOSSY: speculative sampling of a chain with q multiplied by ``factor`` first.

    A draft is kept with ``min(1, p / (factor q))`` and the correction is drawn from
    ``normalise(relu(p - factor q))``, so that no token becomes more than ``1 / factor``
    times as probable; ``factor = 1`` is ``verify.token``. Source: Leviathan et al.
    2211.17192, appendix A.5 (lenience).

    Raises:
      ValueError: unless ``0 < factor <= 1``.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"factor {factor} must be in (0, 1]")

    def rule(noise: Noise, block: Block, target: TargetLaw) -> Verdict:
        q = block.law.q
        if q is None:
            q = jax.nn.one_hot(jnp.roll(block.token, -1), target.p.shape[-1])
        law = dataclasses.replace(block.law, q=factor * q)
        return verify.token(noise, dataclasses.replace(block, law=law), target)

    return rule
