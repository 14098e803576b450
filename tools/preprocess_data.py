"""Turn text into the indexed datasets that Megatron trains on; see docs/preprocess_data.md."""

import sys
from pathlib import Path


def main() -> int:
    """Run the tool with the process's arguments and return its exit status."""
    # Found from any folder, whether this file is run by its path or as a module.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.preprocessing import command_line

    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
