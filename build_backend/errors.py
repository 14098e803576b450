"""The one way in which a build fails."""


class BuildError(SystemExit):
    """Ends a build with one line on stderr and exit status 1.

    It derives from `SystemExit` because build frontends run the hooks in a child process and show
    what that prints: an ordinary exception would bury the line under a traceback.

    Args:
        problem: What is wrong, naming the file or value, and what to do about it. One line.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"megatron-core fork: {problem}")
