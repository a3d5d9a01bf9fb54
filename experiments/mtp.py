"""Multi-token prediction: a module like DeepSeek-V3's, used again for every token drafted.

The module reads the target's last hidden state and the next token's embedding, and shares
embedding and head with the target. The --nodes most probable continuations are verified; --tree
chain drafts --depth tokens in a row instead, sampled where --temperature is above 0.

    python experiments/mtp.py --nodes 4 6 8 --limit 12
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    head = "mtp-smollm2-135m"
    sys.exit(main(__doc__, head, limit=12, nodes=(6,), depth=2, width=3))
