"""Functional test cases: ``test_cases/<model>/<case>/model_config.yaml``.

The layout is upstream's. ``ENV_VARS``, ``TEST_TYPE`` (``regular`` or ``ckpt-resume``) and
``MODEL_ARGS`` (flags; ``true`` for one without a value) mean what they mean there. These are added:

* ``RANKS``: number of ranks.
* ``EXTENDS``: another case, whose keys this one takes over unless it gives them itself;
  ``MODEL_ARGS`` and ``ENV_VARS`` flag by flag, ``null`` taking one away.
* ``SAME_LOSS_AS``: another case, whose losses this one must reproduce.
* ``GPU``: true for a case that ``run.sh`` runs on GPUs. Its ``LOSS_RTOL`` is how far losses may lie
  apart, relatively, its ``DEADLINE_S`` when the run counts as hung, and ``CPU_MODEL_ARGS`` the
  flags with which it shrinks to the CPU emulation.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

import yaml

_FOLDER = Path(__file__).parent / "test_cases"
_FILE_NAME = "model_config.yaml"
SAVING_INITIAL_CHECKPOINT: dict[str, Any] = {
    "load": None,
    "finetune": None,
    "save": "${INITIAL_CHECKPOINT}",
    "save_interval": 1,
    "train_iters": 1,
    "lr_warmup_iters": 0,
}
"""Changes to the flags of a case that make it save its weights after a step and end."""

GOLDEN_VALUES = "golden_values_h100.json"


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
        is_for_gpus: Whether it runs on GPUs, or shrunk.
        loss_rtol: How far losses may lie apart, relatively.
        deadline_s: Seconds after which a run counts as hung.
        cpu_model_args: Flags that shrink it to the CPU emulation, None taking one away.
    """

    name: str
    test_type: str
    ranks: int
    environment: dict[str, str]
    model_args: dict[str, Any]
    same_loss_as: str | None
    is_for_gpus: bool = False
    loss_rtol: float = 2e-5
    deadline_s: float = 180.0
    cpu_model_args: dict[str, Any] = field(default_factory=dict)

    def shrunk(self) -> "FunctionalCase":
        """Return the same case at the size of the CPU emulation."""
        changed = {**self.model_args, **self.cpu_model_args}
        return replace(
            self,
            model_args={flag: value for flag, value in changed.items() if value is not None},
            loss_rtol=FunctionalCase.loss_rtol,
        )

    @property
    def initial_checkpoint_case(self) -> str:
        """The case that saves the weights from which this one starts, without a pipeline."""
        return f"{self.model}/{'gpu_' if self.is_for_gpus else ''}pp1_packed"

    def golden_values(self) -> dict[int, float] | None:
        """Return the expected loss of iterations by number, or None where none were recorded."""
        path = _FOLDER / self.name / GOLDEN_VALUES
        if not path.exists():
            return None
        values = json.loads(path.read_text())["lm loss"]["values"]
        return {int(iteration): float(loss) for iteration, loss in values.items()}

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
        is_for_gpus=keys.get("GPU", False),
        loss_rtol=keys.get("LOSS_RTOL", FunctionalCase.loss_rtol),
        deadline_s=keys.get("DEADLINE_S", FunctionalCase.deadline_s),
        cpu_model_args=keys.get("CPU_MODEL_ARGS", {}),
    )


def cpu_case(name: str) -> FunctionalCase:
    """Read a case, shrunk if it is one for GPUs."""
    case = load_case(name)
    return case.shrunk() if case.is_for_gpus else case


def case_names(*, for_gpus: bool = False) -> list[str]:
    """Return the names of all cases of the CPU, or of all that run on GPUs."""
    paths = sorted(_FOLDER.glob(f"*/*/{_FILE_NAME}"))
    names = [path.parent.relative_to(_FOLDER).as_posix() for path in paths]
    return [name for name in names if load_case(name).is_for_gpus == for_gpus]


def _merged_keys(name: str) -> dict[str, Any]:
    keys = yaml.safe_load((_FOLDER / name / _FILE_NAME).read_text())
    extended = keys.pop("EXTENDS", None)
    if extended is None:
        return keys
    inherited = _merged_keys(extended)
    # What a case compares with is its own business.
    inherited.pop("SAME_LOSS_AS", None)
    for mapping in ("MODEL_ARGS", "ENV_VARS", "CPU_MODEL_ARGS"):
        keys[mapping] = {**inherited.get(mapping, {}), **keys.get(mapping, {})}
    return {**inherited, **keys}
