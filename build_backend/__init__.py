"""In-tree build backend (PEP 517 and PEP 660) of the fork.

It lays the fork's files over a hash-locked release of megatron-core, inserts the grafts, and hands
pip the result as one wheel. Standard library only, so that a build needs nothing but pip.
"""

from build_backend.hooks import Backend
from build_backend.release import DEFAULT_BASE

backend = Backend(DEFAULT_BASE)
