"""How the stand-in says that it does not do something."""

from typing import Any


class NotOffered(NotImplementedError):
    """Only the real Transformer Engine does this.

    Args:
        argument: The argument's name.
        value: What was given.
        remedy: What to do instead.
    """

    def __init__(self, argument: str, value: Any, remedy: str) -> None:
        super().__init__(
            f"the CPU emulation's stand-in for Transformer Engine does not offer "
            f"{argument}={value!r}: {remedy}."
        )


def refuse(given: dict[str, Any], remedies: dict[str, str]) -> None:
    """Raise NotOffered for the first argument in ``given`` that is set and has a remedy."""
    for name, remedy in remedies.items():
        if given.get(name):
            raise NotOffered(name, given[name], remedy)
