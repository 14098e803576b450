"""The commands of setup.py that have a meaning for the fork."""

from __future__ import annotations

import argparse
import os

from build_backend import DEFAULT_BASE, backend
from build_backend.release import fork_version


def main() -> None:
    """Runs the command given on the command line, over the default base release.

    Raises:
        BuildError: The wheel cannot be built.
    """
    parser = argparse.ArgumentParser(
        prog="setup.py", description="Build the fork. To install it, use 'pip install .'."
    )
    parser.add_argument("--version", action="version", version=fork_version(DEFAULT_BASE))
    commands = parser.add_subparsers(dest="command", required=True)
    bdist_wheel = commands.add_parser("bdist_wheel", help="build a wheel")
    bdist_wheel.add_argument("-d", "--dist-dir", default="dist", help="where to (default: dist)")
    arguments = parser.parse_args()
    os.makedirs(arguments.dist_dir, exist_ok=True)
    print(os.path.join(arguments.dist_dir, backend.build_wheel(arguments.dist_dir)))
