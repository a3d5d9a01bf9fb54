"""``python -m jspec`` is the command line."""

import sys

from jspec.cli import main

if __name__ == "__main__":
    sys.exit(main())
