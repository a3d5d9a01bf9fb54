"""Medusa: heads that guess the next tokens independently, from one feature of the target.

In every round the --nodes most probable combinations of the heads' guesses are verified.
--tree static is the published tree of 63 drafts, --tree chain drafts --depth tokens in a
row.

    python experiments/medusa.py --nodes 4 8 16 --limit 12
"""

import sys

from jspec.tree import MEDUSA_63
from jspec.tree_options import main

if __name__ == "__main__":
    head = "medusa-smollm2-135m"
    sys.exit(main(__doc__, head, limit=12, depth=4, static=MEDUSA_63))
