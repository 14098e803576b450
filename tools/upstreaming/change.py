"""What the change consists of in a given checkout."""

from collections.abc import Callable

from build_backend.errors import BuildError
from build_backend.graft_table import GRAFTS
from build_backend.grafts import apply_grafts
from build_backend.release import ROOT
from tools.upstreaming.errors import Refusal
from tools.upstreaming.formatting import Formatter
from tools.upstreaming.transplant import PATH, transplant

GROUPS = "megatron/core/pipeline_parallel/even_odd_groups.py"
UNIT_TEST = "tests/unit_tests/pipeline_parallel/test_even_odd_groups.py"

# Named so that pytest does not collect it here: it needs torchrun and the checkout's modules.
_UNIT_TEST_SOURCE = ROOT / "tests" / "unit_tests" / "upstream_pr" / "even_odd_groups_cases.py"


def files_of_change(read: Callable[[str], str | None], formatter: Formatter) -> dict[str, str]:
    """Return the text of every file that the change adds or edits.

    Args:
        read: Returns the text of a file of the checkout, or ``None`` where it does not exist.
        formatter: The checkout's.

    Raises:
        Refusal: A file is missing, exists already, or has a layout that is not known.
    """
    new = {
        path: source.read_text(encoding="utf-8")
        for path, source in ((GROUPS, ROOT / GROUPS), (UNIT_TEST, _UNIT_TEST_SOURCE))
    }
    for path in new:
        if read(path) is not None:
            raise Refusal(f"{path} exists already; check out a commit without the change")
    grafted_files = list(dict.fromkeys(graft.file for graft in GRAFTS))
    originals = {path: _existing(read, path) for path in (PATH, *grafted_files)}
    edited = {PATH: transplant((ROOT / PATH).read_text(encoding="utf-8"), originals[PATH])}
    for path in grafted_files:
        grafts = [graft for graft in GRAFTS if graft.file == path]
        try:
            edited[path] = apply_grafts(edited.get(path, originals[path]), grafts)
        except BuildError as error:
            raise Refusal(str(error)) from None
    return {path: formatter.new_file(path, text) for path, text in new.items()} | {
        path: formatter.edited_file(path, originals[path], text) for path, text in edited.items()
    }


def _existing(read: Callable[[str], str | None], path: str) -> str:
    text = read(path)
    if text is None:
        raise Refusal(f"{path} does not exist; name a Megatron-LM checkout that has this layout")
    return text
