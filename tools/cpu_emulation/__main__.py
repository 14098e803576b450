"""``python -m tools.cpu_emulation COMMAND ...``: run a command under the CPU emulation."""

import os
import sys

from . import environment

USAGE = """\
usage: python -m tools.cpu_emulation [--transformer-engine] COMMAND [ARGUMENT ...]
       python -m tools.cpu_emulation --list

Runs COMMAND, and every Python process that it starts, as if this machine had GPUs: on the CPU, over
gloo. --transformer-engine puts a stand-in for Transformer Engine, in plain PyTorch, on the search
path. With --list, prints what the emulation replaces."""


def main(arguments: list[str]) -> str | None:
    """Run the command line.

    Args:
        arguments: What follows the module's name.

    Returns:
        An error message, or None. A command that could be started does not return.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return None
    from .replacements import markdown_table, refuse_gpu

    if arguments == ["--list"]:
        print(markdown_table())
        return None
    stand_in = arguments[0] == "--transformer-engine"
    command = arguments[stand_in:]
    if not command:
        return f"error: --transformer-engine without a command to run.\n\n{USAGE}"
    try:
        refuse_gpu()
        os.execvpe(command[0], command, environment(transformer_engine=stand_in))
    except RuntimeError as error:
        return f"error: {error}"
    except OSError as error:
        return f"error: cannot run {command[0]!r}: {error.strerror}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
