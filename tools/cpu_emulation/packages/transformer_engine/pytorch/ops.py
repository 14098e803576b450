"""Types of fused operations, which the base names in annotations and is not offered."""

from typing import Any, NoReturn

from ..refusal import NotOffered


class FusibleOperation:
    """An operation that cannot be made."""

    def __init__(self, *operands: Any, **settings: Any) -> NoReturn:
        raise NotOffered("ops", type(self).__name__, "leave out --use-transformer-engine-op-fuser")


class Sequential(FusibleOperation):
    """A sequence of operations that cannot be made."""
