"""Functional test cases: ``test_cases/<model>/<case>/model_config.yaml``.

The layout is upstream's. ``ENV_VARS``, ``TEST_TYPE`` (``regular`` or ``ckpt-resume``) and
``MODEL_ARGS`` (flags; ``true`` for one without a value) mean what they mean there. These are added:

* ``RANKS``: number of ranks.
* ``EXTENDS``: another case, whose keys this one takes over unless it gives them itself;
  ``MODEL_ARGS`` and ``ENV_VARS`` flag by flag, ``null`` taking one away.
* ``SAME_LOSS_AS``: another case, whose losses this one must reproduce.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

_FOLDER = Path(__file__).parent / "test_cases"
_FILE_NAME = "model_config.yaml"


@dataclass(frozen=True)
class FunctionalCase:
    """One case, with everything that it extends filled in.

    Attributes:
        name: ``<model>/<case>``.
        test_type: ``regular``, or ``ckpt-resume``: half of the iterations, saved and resumed.
        ranks: Number of ranks.
        environment: Variables to set in the ranks.
        model_args: Values by flag.
        same_loss_as: Name of the case to compare with, or None.
    """

    name: str
    test_type: str
    ranks: int
    environment: dict[str, str]
    model_args: dict[str, Any]
    same_loss_as: str | None

    @property
    def model(self) -> str:
        """The kind of model, which all its cases share."""
        return self.name.partition("/")[0]

    def flags(self, paths: Mapping[str, Path], **changes: Any) -> list[str]:
        """Return the command line.

        Args:
            paths: What the ``${NAME}`` in the values stand for.
            changes: Flags to add, change, or with None take away; ``_`` stands for ``-``.
        """
        changed = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        flags = []
        for flag, value in {**self.model_args, **changed}.items():
            if value is not None:
                flags.append(flag)
            if value is not None and value is not True:
                flags.append(Template(str(value)).substitute(paths))
        return flags


def load_case(name: str) -> FunctionalCase:
    """Read the case ``<model>/<case>``."""
    keys = _merged_keys(name)
    return FunctionalCase(
        name=name,
        test_type=keys["TEST_TYPE"],
        ranks=keys["RANKS"],
        environment={key: str(value) for key, value in keys.get("ENV_VARS", {}).items()},
        model_args=keys["MODEL_ARGS"],
        same_loss_as=keys.get("SAME_LOSS_AS"),
    )


def case_names() -> list[str]:
    """Return the names of all cases."""
    paths = sorted(_FOLDER.glob(f"*/*/{_FILE_NAME}"))
    return [path.parent.relative_to(_FOLDER).as_posix() for path in paths]


def _merged_keys(name: str) -> dict[str, Any]:
    keys = yaml.safe_load((_FOLDER / name / _FILE_NAME).read_text())
    extended = keys.pop("EXTENDS", None)
    if extended is None:
        return keys
    inherited = _merged_keys(extended)
    # What a case compares with is its own business.
    inherited.pop("SAME_LOSS_AS", None)
    for mapping in ("MODEL_ARGS", "ENV_VARS"):
        keys[mapping] = {**inherited.get(mapping, {}), **keys.get(mapping, {})}
    return {**inherited, **keys}
