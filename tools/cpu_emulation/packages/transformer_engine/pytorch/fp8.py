"""The state of fp8, which is always off."""

import contextlib
from collections.abc import Iterator
from typing import Any

from ..refusal import NotOffered

_REMEDY = "leave out --fp8-format (ms-swift: --fp8_format)"


class FP8GlobalStateManager:
    """Answers that fp8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return whether the surrounding code computes in fp8."""
        return False

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Return whether the surrounding code collects statistics for fp8."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """Return the recipe in force."""
        return None

    @staticmethod
    def get_fp8_group() -> None:
        """Return the process group over which statistics are reduced."""
        return None

    @staticmethod
    def reset() -> None:
        """Forget all state."""


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **settings: Any) -> Iterator[None]:
    """Change nothing; refuse to switch fp8 on."""
    if enabled:
        raise NotOffered("enabled", enabled, _REMEDY)
    yield


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, **settings: Any) -> Iterator[None]:
    """Change nothing; refuse to switch fp8 on."""
    if enabled:
        raise NotOffered("enabled", enabled, _REMEDY)
    yield
