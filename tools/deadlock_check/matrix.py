"""docs/support_matrix.md: which configurations are safe with which torch."""

import dataclasses
import functools
import itertools
import json
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tools.base_release import unpacked_base

from .check import Checked, check
from .machine import SMALL_SEND_BYTES, Machine, nccl_coalesces, nccl_machines
from .outcome import Verdict
from .record_schedule import INSTALLED, ScheduleOptions, record

TABLE_BASE = "0.19.2"

_AXES: dict[str, dict[Any, str]] = {
    "communicators": {"lazy": "lazy default group", "eager": "device-bound default group"},
    "hardware_queues": {"one": "one hardware queue", "many": "many hardware queues"},
    "buffered_send_bytes": {0: "strict rendezvous", SMALL_SEND_BYTES: "small sends buffered"},
    "batch_progress": {"per-peer": "batches per peer", "all-or-nothing": "batches all or nothing"},
}
"""What may make the difference, and the words for it in a cell."""


DOCUMENT = """\
# Which configurations are safe

Written by `python -m tools.deadlock_check matrix > docs/support_matrix.md`. **No GPU was used, and
no one has run these configurations on GPUs with the fork**: the real schedules are recorded and
run under the rules of PyTorch and NCCL ([deadlock_check.md](deadlock_check.md)). A cell is PASS if
*every* machine that the column leaves possible passes: lazy or device-bound default group,
`CUDA_DEVICE_MAX_CONNECTIONS=1` or not, small sends buffered or not, batches that progress per peer
or all together. Where only some of them are unsafe, parentheses say what these have in common:

- *strict rendezvous*: it works as long as NCCL buffers small sends, which it does not promise;
- *lazy*, *device-bound default group*: `init_process_group` without or with `device_id`;
- *one hardware queue*: `CUDA_DEVICE_MAX_CONNECTIONS=1`;
- *batches all or nothing*: it works if each peer's part of a batch progresses by itself, as NCCL's
  documentation has it for groups that are not large.

Columns are torch releases, `DETAIL` is `TORCH_DISTRIBUTED_DEBUG=DETAIL`. `base` is megatron-core
{base} as published, `fork` this repository. Variable lengths are what packing needs; ms-swift uses
them always. PP=1 has no pipeline communication.

{table}

## The configurations of the reports

Training step of one pipeline with ms-swift's wrapper and variable lengths, on the last patch of
the version that the report names (0.18.0, 0.17.0). TP, EP and DP add no pipeline communication:
they decide the number of microbatches (global batches of 48 and 32 sequences, microbatches of one).
Their own collectives, the model, and 128 or 192 GPUs are not part of the check.

{reports}
"""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A column: what PyTorch is, and whether ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set.

    Attributes:
        name: Shown to the user.
        torch_versions: Releases that stand for all of the column.
        debug_detail: See ``nccl_machines``.
    """

    name: str
    torch_versions: tuple[tuple[int, int], ...]
    debug_detail: bool

    @property
    def coalesces(self) -> bool:
        """Whether batches are batches."""
        return nccl_coalesces(self.torch_versions[0], self.debug_detail)

    def machines(self) -> list[Machine]:
        """Return the machines that are possible, each once."""
        found = itertools.chain.from_iterable(
            nccl_machines(version, self.debug_detail, buffered_send_bytes=(0, SMALL_SEND_BYTES))
            for version in self.torch_versions
        )
        return list(dict.fromkeys(found))


SETTINGS = tuple(
    Setting(f"{name}{' DETAIL' if debug_detail else ''}", versions, debug_detail)
    for name, versions in (
        ("2.6", ((2, 6),)),
        # Unbatched transfers follow other rules from 2.9 on.
        ("2.7 to 2.10", ((2, 7), (2, 10))),
        ("2.11 and later", ((2, 11),)),
    )
    for debug_detail in (False, True)
)
"""Of torch 2.11 to 2.14 the rules that matter here are the same."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: a pipeline, and the release to compare the fork with.

    Attributes:
        name: Shown to the user; empty for the rows of the table.
    """

    pipeline_size: int
    virtual_size: int
    num_microbatches: int
    variable_lengths: bool
    overlap: bool
    base: str = TABLE_BASE
    ms_swift: bool = False
    name: str = ""

    def options(self, coalesces: bool) -> ScheduleOptions:
        """Return what to record where batches are batches, or are none."""
        return ScheduleOptions(
            pipeline_size=self.pipeline_size,
            virtual_size=self.virtual_size if self.virtual_size > 1 else None,
            num_microbatches=self.num_microbatches,
            variable_seq_lengths=self.variable_lengths,
            overlap_p2p_comm=self.overlap,
            batch_p2p_comm=not self.overlap,
            ms_swift_world_group=self.ms_swift,
            coalesces=coalesces,
        )


REPORTS = (
    Case(4, 1, 4, True, False, "0.18.2", True, "Megatron-LM 5100: 192 GPUs, TP=4 EP=8 PP=4 DP=12"),
    Case(4, 1, 4, True, False, "0.17.1", True, "ms-swift 9451: 128 GPUs, TP=4 EP=8 PP=4 DP=8"),
    Case(8, 1, 8, True, False, "0.17.1", True, "ms-swift 9451: 128 GPUs, TP=4 EP=8 PP=8 DP=4"),
)
"""The reports' own configurations; their global batches of 48 and 32 make these microbatches."""


def table_cases(pipeline_sizes: Sequence[int] = (1, 2, 4, 8)) -> list[Case]:
    """Return the rows of the table.

    Args:
        pipeline_sizes: Which of them to have.
    """
    return [
        Case(pipeline_size, virtual_size, factor * pipeline_size, variable_lengths, overlap)
        for pipeline_size in pipeline_sizes
        for virtual_size, overlap in ((1, False), (2, False), (2, True))
        for variable_lengths in (False, True)
        for factor in (1, 2)
        if pipeline_size > 1 or virtual_size == 1
    ]


@dataclasses.dataclass(frozen=True)
class Row:
    """The verdicts of a case.

    Attributes:
        cells: By implementation (``base``, ``fork``) and name of the setting.
    """

    case: Case
    cells: dict[tuple[str, str], str]


def check_cases(
    cases: Sequence[Case],
    settings: Sequence[Setting] = SETTINGS,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda count: None,
) -> list[Row]:
    """Check every case with its base release and with the installed fork.

    Args:
        cases: The rows.
        settings: The columns.
        jobs: Number of processes.
        progress: Called with the number of cases checked since the last call.
    """
    rows = []
    for row in _map(functools.partial(_check_case, settings=settings), cases, jobs):
        rows.append(row)
        progress(1)
    return rows


def _map(function: Callable[[Case], Row], cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from map(function, cases)
        return
    # A fork would inherit the threads of progress bars.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, cases)


def _check_case(case: Case, settings: Sequence[Setting]) -> Row:
    # Without a pipeline there is no communication of a pipeline.
    columns = itertools.product(("base", "fork"), (setting.name for setting in settings))
    cells = dict.fromkeys(columns, Verdict.PASS.value)
    if case.pipeline_size == 1:
        return Row(case, cells)
    for implementation, folder in (("base", str(unpacked_base(case.base))), ("fork", INSTALLED)):
        for coalesces, alike in _by_coalescing(settings):
            trace = record(case.options(coalesces), folder)
            machines = dict.fromkeys(m for setting in alike for m in setting.machines())
            results = {result.machine: result for result in check(trace, list(machines))}
            for setting in alike:
                told = verdict_in_words([results[machine] for machine in setting.machines()])
                cells[implementation, setting.name] = told
    return Row(case, cells)


def _by_coalescing(settings: Sequence[Setting]) -> Iterator[tuple[bool, list[Setting]]]:
    for coalesces in (True, False):
        alike = [setting for setting in settings if setting.coalesces == coalesces]
        if alike:
            yield coalesces, alike


def verdict_in_words(results: Sequence[Checked]) -> str:
    """Return the unsafe verdicts, and what all unsafe machines have in common if not all are."""
    unsafe = [result for result in results if not result.outcome.verdict.is_safe]
    if not unsafe:
        return Verdict.PASS.value
    kinds = [v for v in Verdict if any(result.outcome.verdict is v for result in unsafe)]
    conditions = _conditions(
        [result.machine for result in unsafe], [result.machine for result in results]
    )
    told = ", ".join(kind.value for kind in kinds)
    return f"{told} ({', '.join(conditions)})" if conditions else told


def _conditions(unsafe: Sequence[Machine], checked: Sequence[Machine]) -> list[str]:
    """Return what all unsafe machines have in common and safe ones may lack."""
    found = []
    for axis, names in _AXES.items():
        values = {getattr(machine, axis) for machine in unsafe}
        if len(values) == 1 and len({getattr(machine, axis) for machine in checked}) > 1:
            found.append(names[values.pop()])
    return found


def as_json(rows: Sequence[Row]) -> str:
    """Return the verdicts as JSON, one object per case."""
    return json.dumps(
        [
            {
                **dataclasses.asdict(row.case),
                "verdicts": [
                    {"implementation": implementation, "torch": setting, "verdict": told}
                    for (implementation, setting), told in row.cells.items()
                ],
            }
            for row in rows
        ],
        indent=1,
    )


def as_markdown(rows: Sequence[Row]) -> str:
    """Return docs/support_matrix.md; rows and columns with equal verdicts are one."""
    table = [row for row in rows if not row.case.name]
    reports = [row for row in rows if row.case.name]
    return DOCUMENT.format(base=TABLE_BASE, table=_table(table), reports=_table(reports))


def _table(rows: Sequence[Row]) -> str:
    merged = _merged([(_dimensions(row.case), tuple(row.cells.values())) for row in rows])
    columns: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for position, key in enumerate(rows[0].cells):
        columns.setdefault(tuple(cells[position] for _, cells in merged), []).append(key)
    lines = [
        [*_dimensions(rows[0].case), *(_heading(keys, rows[0].cells) for keys in columns.values())],
        ["---"] * (len(_dimensions(rows[0].case)) + len(columns)),
    ]
    for number, (dimensions, _) in enumerate(merged):
        values = [", ".join(values) for values in dimensions.values()]
        lines.append([*values, *(cells[number] for cells in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


Dimensions = dict[str, tuple[str, ...]]
"""What a row is about: a title, and the values for which the row holds."""


def _dimensions(case: Case) -> Dimensions:
    stages = case.pipeline_size
    factor = case.num_microbatches // stages
    dimensions = {
        "PP": str(stages),
        "VPP": str(case.virtual_size),
        "lengths": "variable" if case.variable_lengths else "fixed",
        "overlap": "on" if case.overlap else "off",
        "microbatches": "PP" if factor == 1 else f"{factor} PP",
    }
    if case.name:
        dimensions = {"report": case.name, "base": case.base, **dimensions}
    return {title: (value,) for title, value in dimensions.items()}


def _merged(
    rows: Sequence[tuple[Dimensions, tuple[str, ...]]],
) -> list[tuple[Dimensions, tuple[str, ...]]]:
    """Make one row of those that differ in one dimension only, dimension by dimension."""
    result = list(rows)
    for title in reversed(rows[0][0]):
        groups: dict[Any, list[Dimensions]] = {}
        for dimensions, cells in result:
            others = tuple(values for name, values in dimensions.items() if name != title)
            groups.setdefault((others, cells), []).append(dimensions)
        result = [
            ({**alike[0], title: tuple(v for row in alike for v in row[title])}, cells)
            for (_, cells), alike in groups.items()
        ]
    return result


def _heading(keys: Sequence[tuple[str, str]], all_keys: Collection[tuple[str, str]]) -> str:
    parts = []
    for implementation in ("base", "fork"):
        settings = [setting for name, setting in keys if name == implementation]
        if len(settings) == sum(name == implementation for name, _ in all_keys):
            parts.append(implementation)
        elif settings:
            parts.append(f"{implementation}: {', '.join(settings)}")
    return "; ".join(parts)
