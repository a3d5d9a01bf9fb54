"""Run by test_mesh.py in processes of their own: an engine over meshes, tokens as JSON.

mesh_run.py              every mesh of up to 8 local devices
mesh_run.py PORT RANK    one of two processes that share a mesh of two
"""

import json
import sys

import jax

import jspec
from jspec import drafters
from jspec.serve import mesh
from jspec.serve.engine import Engine
from jspec.testing import tiny

PROMPTS = [[7], [1, 2, 3] * 3, [5] * 12, [9, 8, 9, 8, 9]]
KNOBS = [(0.0, 0), (0.9, 5), (0.0, 1), (1.2, 3)]
MESHES = {"1 x 1": (1, 1), "1 x 2": (1, 2), "2 x 2": (2, 2), "2 x 4": (2, 4)}


def tokens(over):
    """What an engine on a mesh makes of the prompts."""
    # Everything divides by 4, so that everything is split.
    model = tiny.model(seed=3, layers=1, heads=8, kv_heads=4, vocab_size=64)
    draft = jspec.Draft(drafters.ngram(gamma=3, longest=2, shortest=1), name="ngram")
    engine = Engine(model, draft, sizes=4, context=32, adaptive=False, mesh=over)
    if over.shape["model"] > 1:
        leaf = engine.programs.params.target.layers[0].qkv
        assert not leaf.sharding.is_fully_replicated
    tickets = [
        engine.submit(p, max_new_tokens=16, temperature=t, seed=s)
        for p, (t, s) in zip(PROMPTS, KNOBS, strict=True)
    ]
    found = [r.tokens for r in engine.run(tickets)]
    k = engine._state.cache.k[0]
    part = k.sharding.shard_shape(k.shape)
    assert part[:2] == (4 // over.shape["data"], 4 // over.shape["model"])
    return found


def main(port=None, rank=None):
    if port is None:
        found = {name: tokens(mesh.make(*sizes)) for name, sizes in MESHES.items()}
    else:
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
        assert jax.process_count() == 2
        found = {f"process {rank}": tokens(mesh.make(1, 2))}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
