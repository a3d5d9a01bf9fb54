"""EAGLE-2: EAGLE's network with a tree that follows the head's own confidence.

In every round the head looks at the most probable continuations, level by level, and the
--nodes best of all it saw are verified. On a CPU every node costs, so small trees are best;
--nodes 60 --depth 8 --width 10 is the published setting for a GPU.

    python experiments/eagle2.py --nodes 4 8 16 --limit 12
"""

import sys
from collections.abc import Sequence

from jspec import bench
from jspec.heads import add_tree_arguments, tree_methods

HEAD = "checkpoints/eagle-smollm2-135m"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__, {"drafter": HEAD})
    add_tree_arguments(parser)
    return bench.main(parser, tree_methods, argv)


if __name__ == "__main__":
    sys.exit(main())
