"""``python -m jspec``."""

from jspec.cli import main

raise SystemExit(main())
