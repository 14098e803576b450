"""Runs functional cases on GPUs and checks them; ``run.sh`` is its command."""

import argparse
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.functional_tests.case_file import (
    SAVING_INITIAL_CHECKPOINT,
    FunctionalCase,
    case_names,
    cpu_case,
    load_case,
)
from tests.functional_tests.documents import write_documents
from tests.functional_tests.observed_rank import BIND_VARIABLE, FIRST_STEP_DONE, FOLDER_VARIABLE
from tests.functional_tests.training_run import read_log
from tests.functional_tests.watch_node import DEADLINE_STATUS
from tools.cpu_emulation import environment as emulated

VARIANTS: dict[str, dict[str, str]] = {
    "lazy": {},
    "bound": {BIND_VARIABLE: "1"},
    "lazy-detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    "bound-detail": {BIND_VARIABLE: "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
}
"""Environments in which every case can run."""

_REPOSITORY = Path(__file__).parents[2]
_UNBATCHED_WARNING = "An unbatched P2P op"
_CHANGED_BY_VARIANTS = (BIND_VARIABLE, "TORCH_DISTRIBUTED_DEBUG")
_DEADLINE_GRACE_S = 120.0


class CannotRun(Exception):
    """A case cannot run here; the message says what it needs."""


class Runner:
    """Runs cases, each reference and initial checkpoint once.

    Args:
        output: Folder for everything, on a file system that all nodes share.
        gpus_per_node: GPUs of a node.
        shrinks: Whether to run on the CPU, with small models.
        deadline_s: Instead of the cases' own.
    """

    def __init__(
        self, output: Path, gpus_per_node: int, *, shrinks: bool, deadline_s: float | None = None
    ) -> None:
        self._output = output.absolute()
        self._gpus_per_node = gpus_per_node
        self._shrinks = shrinks
        self._deadline_s = deadline_s

    def run(self, name: str, variant: str = "lazy") -> dict[str, Any]:
        """Run a case in a variant and check it.

        Returns:
            The result, which is in ``<output>/<case>/<variant>/result.json`` as well; ``problems``
            is empty for a case that passed.

        Raises:
            CannotRun: See there.
        """
        case = self._case(name)
        reference = None
        if case.same_loss_as and case.same_loss_as != name:
            reference = self._reference(case.same_loss_as)
        self._save_initial_checkpoint(case.initial_checkpoint_case)
        result = self._train(case, variant)
        if reference:
            result["problems"] += _loss_problems(
                f"those of {case.same_loss_as}",
                dict(enumerate(reference["losses"], 1)),
                result["losses"],
                case.loss_rtol,
            )
            if reference["problems"]:
                result["problems"].append(f"the reference {case.same_loss_as} failed")
        (self._folder(case, variant) / "result.json").write_text(
            json.dumps(result, indent=1) + "\n"
        )
        return result

    def _case(self, name: str) -> FunctionalCase:
        return cpu_case(name) if self._shrinks else load_case(name)

    def _folder(self, case: FunctionalCase, variant: str) -> Path:
        return self._output / case.name / variant

    @functools.cache  # noqa: B019 - a runner lives as long as the program
    def _reference(self, name: str) -> dict[str, Any]:
        return self.run(name)

    @functools.cache  # noqa: B019
    def _documents(self) -> Path:
        prefix = self._output / "data" / "documents"
        prefix.parent.mkdir(parents=True, exist_ok=True)
        write_documents(prefix, **({} if self._shrinks else {"longest": 3000}))
        return prefix

    @functools.cache  # noqa: B019
    def _save_initial_checkpoint(self, name: str) -> None:
        # The base's initial weights depend on how the model is split; a checkpoint does not.
        case = self._case(name)
        result = self._train(
            case,
            "initial",
            **SAVING_INITIAL_CHECKPOINT,
        )
        if result["ending"] != "completed":
            raise CannotRun(f"the initial checkpoint was not saved: {result['problems']}")

    def _train(self, case: FunctionalCase, variant: str, **changes: Any) -> dict[str, Any]:
        folder = self._folder(case, variant)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in [*folder.glob("*.log"), *folder.glob("*.jsonl"), *folder.glob("stacks/*")]:
            stale.unlink()
        paths = {
            "DATA_PATH": self._documents(),
            "INITIAL_CHECKPOINT": self._output / case.model / "checkpoint",
        }
        deadline_s = self._deadline_s or case.deadline_s
        command = self._command(case, case.flags(paths, **changes), folder, deadline_s)
        completed = subprocess.run(
            command,
            cwd=_REPOSITORY,
            env=self._environment(case, variant, folder),
            # srun itself may hang on a node that is gone.
            timeout=deadline_s + _DEADLINE_GRACE_S,
            check=False,
        )
        ending = {0: "completed", DEADLINE_STATUS: "deadline"}.get(completed.returncode, "failed")
        result = _observations(case, folder)
        iterations = changes.get("train_iters", case.model_args["--train-iters"])
        problems = _problems(result, ending, folder, iterations)
        golden = None if self._shrinks or changes else case.golden_values()
        if golden:
            problems += _loss_problems("golden values", golden, result["losses"], case.loss_rtol)
        return {
            "case": case.name,
            "variant": variant,
            "ending": ending,
            "problems": problems,
            "compared_with_golden_values": golden is not None,
            **result,
        }

    def _command(
        self, case: FunctionalCase, flags: list[str], folder: Path, deadline_s: float
    ) -> list[str]:
        ranks_per_node = min(case.ranks, self._gpus_per_node)
        nodes = -(-case.ranks // ranks_per_node)
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        launch.append(str(ranks_per_node))
        rank = ["-m", "tests.functional_tests.observed_rank", *flags]
        watch = [sys.executable, "-m", "tests.functional_tests.watch_node"]
        watch += [str(deadline_s), str(folder)]
        if nodes == 1:
            return [*watch, *launch, "--standalone", *rank]
        if "SLURM_JOB_ID" not in os.environ:
            raise CannotRun(
                f"{case.name} needs {case.ranks} GPUs, {nodes} nodes of {ranks_per_node}: start "
                "run.sh inside a Slurm allocation (sbatch or salloc) of as many"
            )
        if int(os.environ.get("SLURM_NNODES", "1")) < nodes:
            raise CannotRun(
                f"{case.name} needs {nodes} nodes and SLURM_NNODES is "
                f"{os.environ.get('SLURM_NNODES', '1')}: allocate more"
            )
        rendezvous = ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        rendezvous += ["--rdzv-id", os.environ["SLURM_JOB_ID"]]
        rendezvous += [
            "--rdzv-endpoint",
            f"{_first_node()}:{os.environ.get('MASTER_PORT', '29500')}",
        ]
        # One node that fails ends all.
        srun = ["srun", "--kill-on-bad-exit=1", "--nodes", str(nodes), "--ntasks-per-node=1"]
        return [*srun, *watch, *launch, *rendezvous, *rank]

    def _environment(self, case: FunctionalCase, variant: str, folder: Path) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in _CHANGED_BY_VARIANTS}
        variables = {
            **inherited,
            **case.environment,
            **VARIANTS.get(variant, {}),
            FOLDER_VARIABLE: str(folder),
            "NO_VCS_VERSION": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")])
            ),
        }
        return emulated(variables) if self._shrinks else variables


def _first_node() -> str:
    nodes = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        capture_output=True,
        text=True,
        check=True,
    )
    return nodes.stdout.split()[0]


def _observations(case: FunctionalCase, folder: Path) -> dict[str, Any]:
    ranks = range(case.ranks)
    logs = [_text(folder / f"rank{rank}.log") for rank in ranks]
    steps = [
        [json.loads(line) for line in _text(folder / f"steps.rank{rank}.jsonl").splitlines()]
        for rank in ranks
    ]
    later = [log.partition(FIRST_STEP_DONE)[2] for log in logs]
    seconds = [step["seconds"] for step in steps[-1][1:]]
    made = [s[-1]["communicators"] - s[0]["communicators"] for s in steps if s and _has_nccl(s)]
    in_first = [s[0]["communicators"] for s in steps if s and _has_nccl(s)]
    memory = [s[-1]["peak_memory"] for s in steps if s and _has_nccl(s)]
    return {
        "losses": list(read_log(logs[-1]).losses),
        "median_step_seconds": statistics.median(seconds) if seconds else None,
        "peak_memory_bytes": max(memory, default=None),
        "communicators_until_first_step": min(in_first, default=None),
        "communicators_after_first_step": max(made, default=None),
        "unbatched_warnings_after_first_step": sum(log.count(_UNBATCHED_WARNING) for log in later),
    }


def _has_nccl(steps: list[Mapping[str, Any]]) -> bool:
    return steps[0]["communicators"] is not None


def _problems(result: Mapping[str, Any], ending: str, folder: Path, iterations: int) -> list[str]:
    problems = []
    if ending == "deadline":
        problems.append(f"it did not finish in time: the stacks are in {folder / 'stacks'}")
    elif ending == "failed":
        problems.append(f"it failed: see the logs in {folder}")
    elif len(result["losses"]) != iterations:
        problems.append(f"{len(result['losses'])} losses were logged instead of {iterations}")
    if result["communicators_until_first_step"] == 0:
        problems.append("NCCL logged no communicator at all: its log is not understood")
    if result["communicators_after_first_step"]:
        problems.append("communicators were made after the first step")
    if result["unbatched_warnings_after_first_step"]:
        problems.append("PyTorch warned of an unbatched operation after the first step")
    return problems


def _loss_problems(
    name: str, expected: Mapping[int, float], losses: list[float], rtol: float
) -> list[str]:
    """Compare the losses of the iterations that ``expected`` has, counted from 1."""
    for iteration, value in sorted(expected.items()):
        if iteration > len(losses):
            return [f"iteration {iteration}: no loss to compare with {name}"]
        loss = losses[iteration - 1]
        # Written so that NaN is a difference.
        if not abs(loss - value) <= rtol * abs(value):
            return [f"iteration {iteration}: the loss {loss} differs from {name}, {value}"]
    return []


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def main(arguments: list[str]) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name.

    Returns:
        0, 1 when a case failed, 2 when one cannot run, 124 when one did not finish in time.
    """
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("case", nargs="?", help="<model>/<case>, or `all`")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument(
        "--variant",
        choices=[*VARIANTS, "all"],
        default="all",
        help="bound: the default process group has a device_id; detail: "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL (default: all)",
    )
    parser.add_argument("--output", type=Path, default=Path("build/functional_tests"))
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="instead of the case's")
    parser.add_argument("--cpu", action="store_true", help="shrunk, under the CPU emulation")
    options = parser.parse_args(arguments)
    names = case_names(for_gpus=True)
    variants = list(VARIANTS) if options.variant == "all" else [options.variant]
    if options.list:
        for name in names:
            print(f"{shlex.join(['run.sh', name])}  # {load_case(name).ranks} GPUs")
        return 0
    if options.case not in [*names, "all"]:
        parser.error(f"case {options.case}: `run.sh --list` names those that there are")
    runner = Runner(
        options.output, options.gpus_per_node, shrinks=options.cpu, deadline_s=options.deadline
    )
    statuses = {0}
    for name in names if options.case == "all" else [options.case]:
        for variant in variants:
            statuses.add(_run_and_print(runner, name, variant))
    return max(statuses)


def _run_and_print(runner: Runner, name: str, variant: str) -> int:
    try:
        result = runner.run(name, variant)
    except (CannotRun, subprocess.TimeoutExpired) as error:
        print(f"CANNOT RUN {name} {variant}: {error}", flush=True)
        return 2
    for problem in result["problems"]:
        print(f"  {problem}")
    print(f"{'FAIL' if result['problems'] else 'PASS'} {name} {variant}", flush=True)
    if result["ending"] == "deadline":
        return DEADLINE_STATUS
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
