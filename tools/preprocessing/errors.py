"""The two ways in which preprocessing fails that are not a defect of the tool."""


class InputError(Exception):
    """An argument or an input is wrong, and the message says which and what to do.

    The command line prints the message on one line and exits with status 2. It carries nothing but
    the message, so it survives the way from a worker process to the main one.
    """


class WorkerError(Exception):
    """A worker process died without an answer; the command line exits with status 1."""
