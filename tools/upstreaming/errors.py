"""The one way in which the preparation of a branch fails."""


class Refusal(Exception):
    """The checkout is not one that the change can be put into.

    Args:
        problem: What is wrong, naming the file or value, and what to do about it. One line.
    """
