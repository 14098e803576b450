"""Names of the recipes for fp8, which is not offered: the base derives a class from one of them."""

import enum
from typing import Any, NoReturn

from ..refusal import NotOffered


class Format(enum.Enum):
    """Number formats of fp8."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"


class DelayedScaling:
    """A recipe that cannot be made."""

    def __init__(self, **settings: Any) -> NoReturn:
        raise NotOffered("fp8", "DelayedScaling", "leave out --fp8-format (ms-swift: --fp8_format)")
