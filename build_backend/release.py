"""The fork's version, and where its source tree lies."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_BASE = "0.19.2"

# Goes up with every release of the fork, whatever the base: pip takes an equal version for an
# equal package and would keep an older build.
FORK_RELEASE = 2


def fork_version(base: str) -> str:
    """Returns the version of the fork built over a release of megatron-core.

    Args:
        base: A release of megatron-core, such as `0.19.2`.

    Returns:
        The base's version with the fork's release as its local label, such as `0.19.2+p2p.2`. It
        satisfies every requirement that the base satisfies, and sorts after the base.
    """
    return f"{base}+p2p.{FORK_RELEASE}"
