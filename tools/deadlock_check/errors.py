"""The error that ends the command line with one message."""


class UsageError(ValueError):
    """Bad input: names the argument or file and line, the value, and the remedy."""
