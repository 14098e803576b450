"""What does not depend on a framework."""

from . import recipe

__all__ = ["recipe"]
