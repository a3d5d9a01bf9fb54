"""EAGLE-2: EAGLE's network with a tree that follows the head's own confidence.

In every round the head looks at the most probable continuations, level by level, and the
--nodes best of all it saw are verified. On a CPU every node costs, so small trees are best;
--nodes 60 --depth 8 --width 10 is the published setting for a GPU.

    python experiments/eagle2.py --nodes 4 8 16 --limit 12
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "eagle-smollm2-135m"))
