"""DSpark: DFlash's block, its tokens chosen in turn, verified as far as they are trusted.

Runs the drafter at --drafter, one method for every pair of --gamma and --least: drafts are
verified up to the first whose confidence is below --least; 0 verifies all. With --schedule
the batch as a whole decides by what rows cost here, and what is cut is not computed.

    python experiments/dspark.py --gamma 7 --least 0 0.3 0.6 --limit 12
    python experiments/dspark.py --schedule --batch 16 --temperature 0.8
"""

import sys

from jspec.block_options import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "dspark-smollm2-135m", limit=12, least=(0.0, 0.4)))
