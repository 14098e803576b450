"""Put the fork's change into a Megatron-LM checkout as a branch; see docs/upstream_pr.md."""

import sys
from pathlib import Path


def main() -> int:
    """Run the tool with the process's arguments and return its exit status."""
    # Found from any folder, whether this file is run by its path or as a module.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.upstreaming import command_line

    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
