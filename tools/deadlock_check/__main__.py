"""``python -m tools.deadlock_check``; see docs/deadlock_check.md."""

import sys

from .command_line import main

if __name__ == "__main__":
    sys.exit(main())
