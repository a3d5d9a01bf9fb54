"""EAGLE-3: one decoder layer that reads the target's features and drafts a tree.

Runs the head at --drafter with the tree that --tree names: "dynamic" lets the head's own
confidence decide which --nodes are verified (EAGLE-2's and -3's way), "chain" drafts
--depth tokens in a row, sampled from the head's law where --temperature is above 0.

    python experiments/eagle3.py --nodes 8 16 --limit 12
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    head = "eagle3-smollm2-135m"
    sys.exit(main(__doc__, head, limit=12, depth=2, width=3))
