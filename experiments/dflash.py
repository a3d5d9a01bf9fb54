"""DFlash: a few layers guess a whole block in one pass over mask tokens.

Runs the drafter at --drafter, one method for every number of drafts in --gamma. --rows
computes that many rows of the block however few are drafted; --point drafts the best
guesses instead of sampling from the drafter's law at --temperature above 0.

    python experiments/dflash.py --gamma 3 7 --limit 12
"""

import sys

from jspec.block_options import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "dflash-smollm2-135m", limit=12))
