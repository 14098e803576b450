"""The command: arguments, order of the steps, what the user reads."""

import argparse
import sys
from pathlib import Path

from build_backend.release import ROOT
from tools.upstreaming.change import files_of_change
from tools.upstreaming.checkout import Checkout
from tools.upstreaming.errors import Refusal
from tools.upstreaming.formatting import formatter_of

DEFAULT_BRANCH = "even-odd-pipeline-groups"
COMMIT_MESSAGE = "Pipeline communication that cannot deadlock: even/odd process groups"

_PULL_REQUEST = ROOT / "docs" / "upstream_pr.md"
_PULL_REQUEST_HEADING = "## The pull request\n"


def main() -> int:
    """Run the tool with the process's arguments; return 1 if it refuses, after one line."""
    parser = argparse.ArgumentParser(
        prog="upstream_pr.py",
        description="Put the fork's change into a Megatron-LM checkout as one commit on a new "
        "branch, and print the text of the pull request.",
    )
    parser.add_argument(
        "--megatron-lm", type=Path, required=True, help="top folder of a clean checkout"
    )
    parser.add_argument("--branch", default=DEFAULT_BRANCH, help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        report = prepare(arguments.megatron_lm, arguments.branch)
    except Refusal as refusal:
        print(f"upstream_pr: {refusal}", file=sys.stderr)
        return 1
    print(report)
    print()
    print(pull_request_text(), end="")
    return 0


def prepare(folder: Path, branch: str) -> str:
    """Commit the change to a new branch of a checkout, or find that this is done.

    Args:
        folder: Top folder of the checkout.
        branch: Name of the branch.

    Returns:
        What was done, the formatter, and the lines added and removed.

    Raises:
        Refusal: The checkout is not clean or of an unknown layout, or the branch has other content.
    """
    checkout = Checkout(folder)
    existing = checkout.revision(f"refs/heads/{branch}")
    base = checkout.revision(f"{existing}^" if existing else "HEAD")
    if base is None:
        raise Refusal(
            f"branch {branch} has no parent commit; pass another name as --branch"
            if existing
            else f"{folder} has no commit; name a Megatron-LM checkout"
        )
    formatter = formatter_of(checkout.read(base, "pyproject.toml") or "")
    files = files_of_change(lambda path: checkout.read(base, path), formatter)
    if existing:
        is_same = set(checkout.changed_files(base, existing)) == set(files) and all(
            checkout.read(existing, path) == text for path, text in files.items()
        )
        if not is_same:
            raise Refusal(
                f"branch {branch} exists and differs from the change; pass another name as --branch"
            )
        commit, done = existing, f"Branch {branch} has the change already; nothing was changed."
    else:
        commit = checkout.commit_to_new_branch(branch, base, files, COMMIT_MESSAGE)
        done = f"Committed the change to the new branch {branch}."
    return "\n".join(
        [done, f"Formatted by {formatter.description}.", *_statistics(checkout, base, commit)]
    )


def pull_request_text() -> str:
    """Return the text of the pull request, which docs/upstream_pr.md holds."""
    _, _, text = _PULL_REQUEST.read_text(encoding="utf-8").partition(_PULL_REQUEST_HEADING)
    return text.lstrip()


def _statistics(checkout: Checkout, base: str, commit: str) -> list[str]:
    rows = checkout.line_counts(base, commit)
    total = ("total", sum(row[1] for row in rows), sum(row[2] for row in rows))
    lines = []
    for path, added, removed in [*rows, total]:
        before = checkout.read(base, path)
        kept = f"{len(before.splitlines()) - removed} untouched" if before else ""
        lines.append(f"  {path:<62} +{added:<5} -{removed:<5} {kept}".rstrip())
    return lines
