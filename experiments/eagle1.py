"""EAGLE-1: drafts features instead of tokens, in a tree that is fixed beforehand.

The same head as EAGLE-2's. --tree static is the published tree of 25 drafts, --tree chain
drafts --depth tokens in a row.

    python experiments/eagle1.py --tree chain --depth 3 --limit 12
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "eagle-smollm2-135m", kind="static"))
