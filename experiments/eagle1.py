"""EAGLE-1: drafts features instead of tokens, in a tree that is fixed beforehand.

The same head as EAGLE-2's. --tree static is the published tree of 25 drafts, --tree chain
drafts --depth tokens in a row.

    python experiments/eagle1.py --tree chain --depth 3 --limit 12
"""

import sys
from collections.abc import Sequence

from jspec import bench
from jspec.heads import add_tree_arguments, tree_methods

HEAD = "checkpoints/eagle-smollm2-135m"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench.argument_parser(__doc__, {"drafter": HEAD})
    add_tree_arguments(parser, kind="static")
    return bench.main(parser, tree_methods, argv)


if __name__ == "__main__":
    sys.exit(main())
