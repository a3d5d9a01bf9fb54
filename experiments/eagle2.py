"""EAGLE-2: EAGLE's network with a tree that follows the head's own confidence.

In every round the head looks at the most probable continuations, level by level, and the
--nodes best of all it saw are verified. On a CPU every node costs, so small trees are best,
and weights in bfloat16 if it has AMX; --nodes 60 --depth 8 --width 10 is the published setting
for a GPU. Without --limit, two prompts of every category are decoded.

    python experiments/eagle2.py --nodes 4 8 16
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    head = "eagle-smollm2-135m"
    sys.exit(main(__doc__, head, limit=12, nodes=(6,), depth=2, width=3))
