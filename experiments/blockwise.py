"""Blockwise parallel decoding: heads under the target's own vocabulary product.

A hidden layer on the target's last feature gives one output a head (Stern et al.). As
published it drafts a chain of the heads' best guesses; --tree dynamic verifies the --nodes
most probable combinations.

    python experiments/blockwise.py --tree dynamic --nodes 8 --limit 12
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "blockwise-smollm2-135m", kind="chain", depth=4))
