"""Multi-token prediction: a module like DeepSeek-V3's, used again for every token drafted.

The module reads the target's last hidden state and the next token's embedding, and shares
embedding and head with the target. --tree dynamic verifies the --nodes most probable
continuations instead of a chain of --depth.

    python experiments/mtp.py --depth 2 --limit 12
"""

import sys

from jspec.tree_options import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "mtp-smollm2-135m", kind="chain", depth=2))
