"""Base against fork, in many configurations, on one GPU: ``verify.sh`` runs it.

The report is written anew after every configuration, so that it is there whatever happens.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.cpu_emulation import environment as emulated
from tools.watched_processes import Command, Ending, WatchedProcesses

from .configuration import Configuration, configurations, dry_configurations
from .prediction import predict
from .rank_environment import free_port, nccl_version, rank_environment, sharing_variables
from .step_rank import Payload

MIB = 2**20
PAYLOADS = (Payload(64, 5), Payload(32 * MIB, 3))
DRY_PAYLOADS = (Payload(64, 2), Payload(4096, 2))
_PACKAGES = ("base", "fork")
_LOG_TAIL_LINES = 8


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        budget_s: The whole.
        deadline_s: One configuration, its start-up included.
        stall_s: Without any rank finishing a phase, after the first; then it counts as hung.
    """

    budget_s: float
    deadline_s: float
    stall_s: float


class Verification:
    """One run of all configurations.

    Args:
        packages: The folder that holds the unpacked packages ``base`` and ``fork``.
        report: The JSON file to write.
        limits: Time limits.
        is_dry: Whether to run on the CPU, over gloo.
        resumes: Whether to go on with what the report says was not run.

    Raises:
        RuntimeError: The report to go on with is of other versions, or of another device.
    """

    def __init__(
        self,
        packages: Path,
        report: Path,
        limits: Limits,
        *,
        is_dry: bool,
        resumes: bool = False,
    ) -> None:
        self._started = time.monotonic()
        self._packages = packages
        self._report_path = report
        self._limits = limits
        self._is_dry = is_dry
        self._payloads = DRY_PAYLOADS if is_dry else PAYLOADS
        self._chosen = dry_configurations() if is_dry else list(configurations())
        self._nccl = () if is_dry else nccl_version()
        self._report: dict[str, Any] = {
            "format": "single-gpu-nccl-report",
            "version": 1,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "is_dry_run": is_dry,
            "device": "CPU, gloo" if is_dry else torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, self._nccl)) or None,
            "packages": {name: _version(packages / name) for name in _PACKAGES},
            "limits": dataclasses.asdict(limits),
            "payloads": [dataclasses.asdict(payload) for payload in self._payloads],
            "configurations": [],
            "not_run": [],
        }
        if resumes:
            self._resume()

    def _resume(self) -> None:
        if not self._report_path.exists():
            raise RuntimeError(f"there is no report {self._report_path}: leave out --resume")
        earlier = json.loads(self._report_path.read_text())
        for key in ("is_dry_run", "device", "torch", "nccl", "packages", "payloads"):
            if earlier[key] != self._report[key]:
                raise RuntimeError(
                    f"{self._report_path} was made with {key} {earlier[key]}, and here it is "
                    f"{self._report[key]}: leave out --resume"
                )
        self._chosen = [Configuration(**entry) for entry in earlier["not_run"]]
        self._report["configurations"] = earlier["configurations"]

    def run(self) -> dict[str, Any]:
        """Run configurations until they end or the time does; return the report."""
        first = len(self._report["configurations"])
        with tempfile.TemporaryDirectory(prefix="single-gpu-nccl-") as work:
            stacks = self._report_path.with_suffix(".stacks")
            launches = [
                _Launch(configuration, Path(work) / str(index), stacks / str(index))
                for index, configuration in enumerate(self._chosen, first)
            ]
            prepared = self._start(launches[0])
            for launch, following in zip(launches, [*launches[1:], None], strict=True):
                with prepared as processes:
                    if self._seconds_left() < self._limits.deadline_s:
                        self._report["not_run"].append(dataclasses.asdict(launch.configuration))
                        prepared = processes
                        continue
                    # The next ranks import while these run.
                    if following:
                        prepared = self._start(following)
                    self._run(launch, processes)
                self._write()
        self._predict()
        self._write()
        return self._report

    def _seconds_left(self) -> float:
        return self._limits.budget_s - (time.monotonic() - self._started)

    def _start(self, launch: "_Launch") -> WatchedProcesses:
        configuration, port = launch.configuration, free_port()
        commands = []
        for rank in range(configuration.pipeline_size):
            variables = rank_environment(rank, configuration.pipeline_size, port)
            variables["NO_VCS_VERSION"] = "1"
            package = str(self._packages / configuration.implementation)
            variables["PYTHONPATH"] = os.pathsep.join([package, *filter(None, sys.path)])
            if configuration.debug_detail:
                variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            else:
                variables.pop("TORCH_DISTRIBUTED_DEBUG", None)
            if self._is_dry:
                variables = emulated(variables)
            else:
                variables |= sharing_variables(rank, self._nccl)
            commands.append(
                Command(
                    [sys.executable, "-m", "tools.single_gpu_nccl.step_rank"],
                    variables,
                    launch.folder / f"rank{rank}.log",
                )
            )
        return WatchedProcesses(commands, launch.stack_folder)

    def _run(self, launch: "_Launch", processes: WatchedProcesses) -> None:
        started = time.monotonic()
        processes.send_line(
            json.dumps(
                {
                    "folder": str(launch.folder),
                    "configuration": dataclasses.asdict(launch.configuration),
                    "payloads": [dataclasses.asdict(payload) for payload in self._payloads],
                }
            )
        )
        ending = processes.wait(
            self._limits.deadline_s,
            stall_s=self._limits.stall_s,
            progress_files=launch.finding_files,
        )
        entry = dataclasses.asdict(launch.configuration)
        entry |= {"ending": ending, "seconds": round(time.monotonic() - started, 1)}
        entry |= launch.summary(ending)
        self._report["configurations"].append(entry)
        print(
            f"{self._seconds_left():5.0f} s left  {entry['outcome']:16} {launch.configuration}",
            flush=True,
        )

    def _predict(self) -> None:
        for entry in self._report["configurations"]:
            names = [field.name for field in dataclasses.fields(Configuration)]
            configuration = Configuration(**{name: entry[name] for name in names})
            entry["predicted"] = predict(
                configuration,
                self._packages / configuration.implementation,
                torch.__version__,
                on_gloo=self._is_dry,
            )
            observed = {"finished": "finishes", "hung": "hangs"}.get(entry["outcome"])
            entry["agrees"] = (
                None
                if observed is None
                else entry["predicted"] == "either" or entry["predicted"] == observed
            )

    def _write(self) -> None:
        self._report_path.parent.mkdir(parents=True, exist_ok=True)
        self._report_path.write_text(json.dumps(self._report, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class _Launch:
    configuration: Configuration
    folder: Path
    stack_folder: Path

    @property
    def finding_files(self) -> list[Path]:
        ranks = range(self.configuration.pipeline_size)
        return [self.folder / f"rank{rank}.jsonl" for rank in ranks]

    def summary(self, ending: Ending) -> dict[str, Any]:
        """Return the part of the report that the ranks have found."""
        findings = [_read_lines(file) for file in self.finding_files]
        by_phase: dict[str, list[Mapping[str, Any]]] = {}
        for rank_findings in findings:
            for line in rank_findings:
                by_phase.setdefault(line["phase"], []).append(line)
        complete = {
            phase: lines
            for phase, lines in by_phase.items()
            if len(lines) == self.configuration.pipeline_size
        }
        problems = sorted({line["problem"] for f in findings for line in f if line.get("problem")})
        outcome = {"completed": "finished", "failed": "failed"}.get(ending, "hung")
        if outcome == "hung" and "ready" not in complete:
            outcome = "did not start"
        return {
            "outcome": "wrong loss" if problems else outcome,
            "problems": problems,
            "last_phase_of_all_ranks": next(reversed(complete), None),
            "start_up_seconds": _slowest(complete.get("start-up", [])),
            "step_seconds": {
                phase: _slowest(lines) for phase, lines in complete.items() if "step" in phase
            },
            "communicators_by_number_of_ranks": {
                phase: _communicators(lines) for phase, lines in complete.items()
            },
            "communicators_after_first_step": _made_after_first_step(complete),
            "device_bytes_per_communicator_and_rank": _memory_per_communicator(complete),
            "end_of_logs": self._end_of_logs() if ending != "completed" else {},
        }

    def _end_of_logs(self) -> dict[str, list[str]]:
        return {
            log.name: log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            for log in sorted(self.folder.glob("rank*.log"))
        }


def _read_lines(file: Path) -> list[dict[str, Any]]:
    # A line that a rank was still writing when it was ended has no end.
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _slowest(lines: Sequence[Mapping[str, Any]]) -> float | None:
    return max((round(line["seconds"], 4) for line in lines), default=None)


def _communicators(lines: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Count the communicators of all ranks; None where NCCL is not used."""
    if any("communicators" not in line for line in lines):
        return None
    counts = Counter(size for line in lines for size in line["communicators"])
    return {str(size): count // size for size, count in sorted(counts.items())}


def _made_after_first_step(complete: Mapping[str, list[Mapping[str, Any]]]) -> int | None:
    steps = [lines for phase, lines in complete.items() if "step" in phase]
    # Without a single communicator the log was not understood, and zero would be a lie.
    if not steps or not all(line.get("communicators") for line in steps[-1]):
        return None
    first, last = (sum(len(line["communicators"]) for line in steps[i]) for i in (0, -1))
    return last - first


def _memory_per_communicator(complete: Mapping[str, list[Mapping[str, Any]]]) -> int | None:
    """Divide what start-up took of the device, beyond PyTorch's own memory, by what it made."""
    before, after = complete.get("ready", []), complete.get("start-up", [])
    if not before or not after or "communicators" not in before[0]:
        return None

    def used(lines: Sequence[Mapping[str, Any]]) -> int:
        # The ranks share the device, but each has PyTorch's memory to itself.
        of_device = max(line["device_memory_used"] for line in lines)
        return of_device - sum(line["torch_memory_reserved"] for line in lines)

    def made(lines: Sequence[Mapping[str, Any]]) -> int:
        return sum(len(line["communicators"]) for line in lines)

    new = made(after) - made(before)
    return (used(after) - used(before)) // new if new else None


def _version(package: Path) -> str:
    for distribution in importlib.metadata.distributions(path=[str(package)]):
        if distribution.metadata["Name"] == "megatron-core":
            return distribution.version
    raise RuntimeError(f"{package} holds no megatron-core: run verify.sh --prepare")


def main(arguments: list[str]) -> str | None:
    """Run the command line.

    Args:
        arguments: What follows the module's name.

    Returns:
        An error message, or None.
    """
    parser = argparse.ArgumentParser(prog="verify.sh", description=__doc__)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what the report says was not run"
    )
    parser.add_argument("--budget", type=float, default=420.0, metavar="SECONDS")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--stall", type=float, default=20.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    limits = Limits(options.budget, options.deadline, options.stall)
    try:
        if not options.dry_run and not torch.cuda.is_available():
            raise RuntimeError("there is no GPU here: --dry-run takes the same path on the CPU")
        verification = Verification(
            options.packages,
            options.report,
            limits,
            is_dry=options.dry_run,
            resumes=options.resume,
        )
        report = verification.run()
    except RuntimeError as error:
        return f"verify.sh: error: {error}"
    return _judgement(report)


def _judgement(report: Mapping[str, Any]) -> str | None:
    entries = report["configurations"]
    outcomes = Counter(f"{entry['implementation']} {entry['outcome']}" for entry in entries)
    for name, number in sorted(outcomes.items()):
        print(f"{number:4} {name}")
    print(f"{len(report['not_run']):4} not run for lack of time")
    wrong = [e for e in entries if e["implementation"] == "fork" and e["outcome"] != "finished"]
    surprises = [e for e in entries if e["agrees"] is False]
    if wrong or surprises:
        return (
            f"verify.sh: {len(wrong)} configurations of the fork did not finish, and the deadlock "
            f"checker was wrong about {len(surprises)}; see the report"
        )
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
