"""The hooks that pip and other frontends call (PEP 517 and PEP 660)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from build_backend import base_wheel, editable
from build_backend.contents import assemble
from build_backend.errors import BuildError
from build_backend.interpreter import running_interpreter
from build_backend.wheel_file import write_wheel


class Backend:
    """Builds the fork over one base release.

    There is deliberately no `prepare_metadata_for_build_wheel`: the metadata comes out of the base
    wheel, and without that hook frontends take it from the one wheel they build.

    Args:
        base: The release of megatron-core to build over.
    """

    def __init__(self, base: str) -> None:
        self._base = base

    def get_requires_for_build_wheel(
        self, config_settings: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Returns what the build environment needs: pip, if there is something to download.

        Raises:
            BuildError: This interpreter or base is not supported, or the local wheel is missing;
                told here because it is the first hook called.
        """
        running_interpreter()
        base_wheel.locked_hashes(self._base)
        return [] if base_wheel.local_wheel() else ["pip"]

    get_requires_for_build_editable = get_requires_for_build_wheel

    def build_wheel(
        self,
        wheel_directory: str,
        config_settings: Mapping[str, Any] | None = None,
        metadata_directory: str | None = None,
    ) -> str:
        """Builds the wheel that users install, and returns its file name.

        Args:
            wheel_directory: Existing folder to write the wheel to.
            config_settings: Not used.
            metadata_directory: Not used.

        Raises:
            BuildError: See `contents.assemble`. Nothing is written then.
        """
        fork = assemble(self._base)
        write_wheel(Path(wheel_directory, fork.wheel), fork.members, f"{fork.dist_info}RECORD")
        return fork.wheel

    def build_editable(
        self,
        wheel_directory: str,
        config_settings: Mapping[str, Any] | None = None,
        metadata_directory: str | None = None,
    ) -> str:
        """Builds a wheel that makes edits of the fork's files live, and returns its file name.

        The arguments are those of `build_wheel`.

        Raises:
            BuildError: See `contents.assemble`. Nothing is written then.
        """
        fork = assemble(self._base)
        members = editable.link_members(fork, editable.lay_out(self._base, fork))
        write_wheel(Path(wheel_directory, fork.wheel), members, f"{fork.dist_info}RECORD")
        return fork.wheel

    def build_sdist(
        self, sdist_directory: str, config_settings: Mapping[str, Any] | None = None
    ) -> str:
        """Refuses: the fork's source is its git commit.

        Raises:
            BuildError: Always.
        """
        raise BuildError(
            "there are no source archives: install from a git commit, or build a wheel with "
            "'pip wheel --no-deps .'"
        )
