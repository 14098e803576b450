"""The repository's build backend, with the base release that this folder is named after."""

import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
# `backend-path` may not point out of this folder.
sys.path.append(str(_FOLDER.parents[1]))

from build_backend.hooks import Backend  # noqa: E402

backend = Backend(_FOLDER.name)
