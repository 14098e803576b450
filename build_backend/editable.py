"""Developer mode: a complete package in which the fork's files are links to the checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from build_backend.contents import Fork
from build_backend.interpreter import running_interpreter
from build_backend.release import ROOT
from build_backend.wheel_file import Member


def lay_out(base: str, fork: Fork) -> Path:
    """Unpacks the fork into `build/editable-<tag>/`, replacing what an earlier call left there.

    Args:
        base: The release that the fork is built over.
        fork: What to unpack. Metadata is left out: the installed wheel has it.

    Returns:
        The folder to put on `sys.path`.
    """
    tree = ROOT / "build" / "editable-{}-{}-{}".format(base, *running_interpreter())
    partial = tree.with_name(f"{tree.name}.{os.getpid()}")
    try:
        for name, member in fork.members.items():
            if name.startswith(fork.dist_info) or name.endswith("/"):
                continue
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in fork.fork_files:
                target.symlink_to(fork.fork_files[name])
            else:
                target.write_bytes(member.content)
                target.chmod(member.permissions)
        shutil.rmtree(tree, ignore_errors=True)
        partial.rename(tree)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tree


def link_members(fork: Fork, tree: Path) -> dict[str, Member]:
    """Returns the entries of a wheel that puts an unpacked fork on `sys.path`."""
    members = {
        name: member for name, member in fork.members.items() if name.startswith(fork.dist_info)
    }
    return {"megatron_core.pth": Member(f"{tree}\n".encode()), **members}
