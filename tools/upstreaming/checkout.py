"""A Megatron-LM checkout, read and written through git without touching its files on the way."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.upstreaming.errors import Refusal


class Checkout:
    """A git repository without uncommitted changes.

    Args:
        folder: Top folder of the repository.

    Raises:
        Refusal: It is not one, git cannot be run, or there are uncommitted or untracked files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not folder.is_dir():
            raise Refusal(f"--megatron-lm {folder} is not a folder; name a Megatron-LM checkout")
        top = self._run("rev-parse", "--show-toplevel", may_fail=True)
        if top is None or Path(top).resolve() != folder.resolve():
            raise Refusal(
                f"--megatron-lm {folder} is not the top folder of a git repository; "
                "name a Megatron-LM checkout"
            )
        if changes := self._run("status", "--porcelain"):
            raise Refusal(
                f"{folder} has {len(changes.splitlines())} uncommitted or untracked file(s), the "
                f"first of them {changes.splitlines()[0].split()[-1]}; commit or stash them"
            )

    def revision(self, name: str) -> str | None:
        """Return the hash of the commit ``name``, or ``None`` where there is none."""
        return self._run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", may_fail=True)

    def read(self, revision: str, path: str) -> str | None:
        """Return the text of a file at a commit, or ``None`` where it does not exist."""
        return self._run("show", f"{revision}:{path}", may_fail=True, strip=False)

    def changed_files(self, base: str, revision: str) -> list[str]:
        """Return the paths that differ between two commits."""
        return self._run_or_refuse("diff", "--name-only", base, revision).splitlines()

    def line_counts(self, base: str, revision: str) -> list[tuple[str, int, int]]:
        """Return path, lines added and lines removed of every file that differs."""
        rows = self._run_or_refuse("diff", "--numstat", base, revision).splitlines()
        return [
            (path, int(added), int(removed))
            for added, removed, path in (row.split("\t") for row in rows)
        ]

    def commit_to_new_branch(
        self, branch: str, base: str, files: Mapping[str, str], message: str
    ) -> str:
        """Commit ``files`` on top of ``base`` as ``branch`` and switch to it.

        Nothing is visible in the checkout before the commit is complete.

        Args:
            branch: Name of a branch that does not exist.
            base: Hash of the parent commit.
            files: New text of each file by path.
            message: Commit message.

        Returns:
            The hash of the commit.

        Raises:
            Refusal: git has no identity for the commit, or cannot switch. No branch is left.
        """
        with tempfile.TemporaryDirectory() as scratch:
            index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            self._run_or_refuse("read-tree", base, environment=index)
            for path, text in files.items():
                blob = self._run_or_refuse("hash-object", "-w", "--stdin", stdin=text)
                mode = self._run_or_refuse("ls-tree", base, path).partition(" ")[0] or "100644"
                entry = f"{mode},{blob},{path}"
                self._run_or_refuse(
                    "update-index", "--add", "--cacheinfo", entry, environment=index
                )
            tree = self._run_or_refuse("write-tree", environment=index)
        commit = self._run_or_refuse("commit-tree", tree, "-p", base, "-m", message)
        self._run_or_refuse("branch", branch, commit)
        try:
            self._run_or_refuse("switch", "--quiet", branch)
        except Refusal:
            self._run_or_refuse("branch", "--quiet", "-D", branch)
            raise
        return commit

    def _run_or_refuse(
        self, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> str:
        output = self._run(*arguments, stdin=stdin, environment=environment)
        assert output is not None, "without may_fail a failure raises"
        return output

    def _run(
        self,
        *arguments: str,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        may_fail: bool = False,
        strip: bool = True,
    ) -> str | None:
        try:
            finished = subprocess.run(
                ["git", "-C", str(self._folder), *arguments],
                input=stdin.encode(),
                capture_output=True,
                env={**os.environ, **(environment or {})},
                check=False,
            )
        except FileNotFoundError:
            raise Refusal("git is not on PATH; install it") from None
        if finished.returncode != 0:
            if may_fail:
                return None
            lines = finished.stderr.decode(errors="replace").strip().splitlines()
            raise Refusal(f"git {arguments[0]} failed in {self._folder}: {' '.join(lines)}")
        output = finished.stdout.decode()
        return output.strip() if strip else output
