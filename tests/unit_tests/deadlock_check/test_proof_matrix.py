"""The fork passes everywhere; the base fails exactly where it is said to; so do simpler protocols.

Configurations are recorded and decided in worker processes. Large pipelines are thinned out, as
``make test`` has to end in minutes; ``make proof`` leaves nothing out.
"""

import dataclasses
import multiprocessing.pool
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.deadlock_check import protocol_variants as variants
from tests.unit_tests.deadlock_check.protocol_variants import Protocol
from tools.base_release import unpacked_base
from tools.deadlock_check.errors import UsageError
from tools.deadlock_check.machine import Machine, nccl_machines
from tools.deadlock_check.model import run
from tools.deadlock_check.outcome import Outcome, Verdict
from tools.deadlock_check.record_schedule import INSTALLED, ScheduleOptions, record

TORCH_RELEASES = ((2, 6), (2, 8), (2, 10), (2, 11), (2, 14))

TRANSPORTS = {
    "batched": ScheduleOptions(2, 2, batch_p2p_comm=True),
    "unbatched": ScheduleOptions(2, 2, batch_p2p_comm=False),
    "overlapped": ScheduleOptions(2, 2, batch_p2p_comm=False, overlap_p2p_comm=True),
    "overlapped with warmup flush": ScheduleOptions(
        2, 2, batch_p2p_comm=False, overlap_p2p_comm=True, overlap_p2p_comm_warmup_flush=True
    ),
}


IS_FULL = os.environ.get("PROOF_MATRIX") == "full"


def configurations(
    size: int, chunks: tuple[int, ...] = (1, 2, 3, 4), multiples: tuple[int, ...] = (1, 2, 3)
) -> Iterator[tuple[str, ScheduleOptions]]:
    """Yields every legal combination for one pipeline size, with the name of its transport."""
    for virtual in chunks:
        counts = [multiple * size for multiple in multiples]
        if virtual == 1:
            counts.append(size + 1)
        for num_microbatches in counts:
            for transport, flags in TRANSPORTS.items():
                if flags.overlap_p2p_comm and virtual == 1:
                    continue
                for is_variable in (False, True):
                    options = dataclasses.replace(
                        flags,
                        pipeline_size=size,
                        virtual_size=virtual if virtual > 1 else None,
                        num_microbatches=num_microbatches,
                        variable_seq_lengths=is_variable,
                    )
                    yield transport, options


def proof_configurations(size: int) -> list[tuple[str, ScheduleOptions]]:
    if IS_FULL or size <= 4:
        return list(configurations(size))
    if size == 16:
        return list(configurations(size, (1, 2, 4), (1,)))
    return [*configurations(size, multiples=(1,)), *configurations(size, (2,), (3,))]


def all_machines(**axes) -> list[Machine]:
    """All that torch releases, debug level, bound devices and hardware queues can make."""
    distinct = {
        dataclasses.replace(machine, name=""): machine
        for release in TORCH_RELEASES
        for debug_detail in (False, True)
        for machine in nccl_machines(release, debug_detail, **axes)
    }
    return list(distinct.values())


def hardest_machines() -> list[Machine]:
    """One queue and all-or-nothing batches only ever add waits, so what passes here passes there.

    ``test_an_easier_machine_never_fails_where_a_harder_one_passes`` tests that.
    """
    return [
        machine
        for machine in all_machines(hardware_queues=("one",))
        if machine.batch_progress == "all-or-nothing" or not machine.coalesces
    ]


def outcomes(
    options: ScheduleOptions, machines: list[Machine], implementation: str = INSTALLED
) -> Iterator[tuple[Machine, Outcome]]:
    for coalesces in {machine.coalesces for machine in machines}:
        trace = record(dataclasses.replace(options, coalesces=coalesces), implementation)
        for machine in machines:
            if machine.coalesces == coalesces:
                yield machine, run(trace, machine)


@pytest.fixture(scope="module")
def workers() -> Iterator[multiprocessing.pool.Pool]:
    with multiprocessing.get_context("forkserver").Pool(os.cpu_count()) as pool:
        yield pool


class TestFork:
    @pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 16])
    def test_every_configuration_passes(self, workers, size):
        problems = workers.map(_problems_of_fork, proof_configurations(size), chunksize=2)
        assert [problem for found in problems for problem in found] == []

    def test_every_machine_passes(self, workers):
        configured = list(configurations(4, (1, 2), (1, 2)))
        problems = workers.map(_problems_of_fork_on_all_machines, configured, chunksize=2)
        assert [problem for found in problems for problem in found] == []

    @pytest.mark.parametrize("is_forward_only", [False, True])
    @pytest.mark.parametrize("use_gloo", [False, True])
    def test_evaluation_and_device_shapes_and_the_wrapper_of_ms_swift_pass(
        self, use_gloo, is_forward_only
    ):
        for batched in (False, True):
            options = ScheduleOptions(
                4,
                4,
                virtual_size=2,
                variable_seq_lengths=not batched,
                batch_p2p_comm=batched,
                use_gloo=use_gloo,
                forward_only=is_forward_only,
                ms_swift_world_group=True,
            )
            assert list(_problems(outcomes(options, hardest_machines()))) == []

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(data=st.data())
    def test_any_legal_configuration_passes(self, data):
        size = data.draw(st.integers(2, 9))
        virtual = data.draw(st.sampled_from([None, 2, 3, 5]))
        group = data.draw(st.none() | st.integers(size, size + 3)) if virtual else None
        overlap = virtual is not None and data.draw(st.booleans())
        options = ScheduleOptions(
            pipeline_size=size,
            virtual_size=virtual,
            num_microbatches=data.draw(st.integers(1, 3 * size)),
            variable_seq_lengths=data.draw(st.booleans()),
            batch_p2p_comm=not overlap and data.draw(st.booleans()),
            overlap_p2p_comm=overlap,
            overlap_p2p_comm_warmup_flush=overlap and data.draw(st.booleans()),
            microbatch_group_size_per_vp_stage=group,
            forward_only=data.draw(st.booleans()),
            use_gloo=data.draw(st.booleans()),
            ms_swift_world_group=data.draw(st.booleans()),
        )
        try:
            options.check()
        except UsageError:
            return
        assert list(_problems(outcomes(options, hardest_machines()))) == []


def _problems_of_fork(configured: tuple[str, ScheduleOptions]) -> list[str]:
    _, options = configured
    machines = hardest_machines()
    if not (IS_FULL or options.batch_p2p_comm):
        # Nothing asks whether the backend coalesces, save the batch at start-up.
        machines = [machine for machine in machines if not machine.coalesces]
    return list(_problems(outcomes(options, machines)))


def _problems_of_fork_on_all_machines(configured: tuple[str, ScheduleOptions]) -> list[str]:
    machines = all_machines(buffered_send_bytes=(0, 128))
    return list(_problems(outcomes(configured[1], machines)))


def _problems(outcomes: Iterator[tuple[Machine, Outcome]]) -> Iterator[str]:
    for machine, outcome in outcomes:
        if outcome.verdict is not Verdict.PASS:
            yield f"{outcome.verdict} on {machine.name}"
        if outcome.statistics.communicators_in_schedule:
            yield f"communicators are made in the schedule on {machine.name}"


def machines_for_the_base() -> list[Machine]:
    lazy_and_premade = [
        Machine("lazy", communicators="lazy", pair_communicators=True),
        Machine("premade"),
        Machine("premade pairs", pair_communicators=True),
    ]
    return [
        dataclasses.replace(machine, coalesces=coalesces, batch_progress=progress)
        for machine in lazy_and_premade
        for coalesces, progress in (
            (True, "per-peer"),
            (True, "all-or-nothing"),
            (False, "per-peer"),
        )
    ]


def verdict_of_base(transport: str, options: ScheduleOptions, machine: Machine) -> Verdict:
    """What DESIGN says of the base, and what the model added: see docs/root_cause.md."""
    size = options.pipeline_size
    is_interleaved = options.virtual_size is not None
    has_wrap_exchange = is_interleaved and not options.overlap_p2p_comm and size % 2 == 0
    one_group_per_stage = options.num_microbatches == size
    is_variable = options.variable_seq_lengths
    exchanges_batches = transport == "batched" or is_variable
    if exchanges_batches and not machine.coalesces:
        return _verdict_one_by_one(transport, size, machine)
    if transport.startswith("overlapped"):
        return _verdict_overlapped(transport, size, is_variable, machine)
    if not exchanges_batches or not has_wrap_exchange:
        return Verdict.PASS
    if size == 2 and not one_group_per_stage:
        return Verdict.CROSSED
    if not one_group_per_stage:
        return Verdict.PASS
    if is_variable or machine.batch_progress == "all-or-nothing":
        return Verdict.DEADLOCK
    # At first contact a batch starts when all of its peers are connected.
    return Verdict.DEADLOCK if machine.communicators == "lazy" and size > 2 else Verdict.PASS


def _verdict_one_by_one(transport: str, size: int, machine: Machine) -> Verdict:
    if not transport.startswith("overlapped"):
        return Verdict.DEADLOCK
    has_stream_per_pair = machine.pair_communicators
    is_flush = transport.endswith("flush")
    if size > 2 and has_stream_per_pair and not (is_flush and machine.communicators == "lazy"):
        return Verdict.PASS
    return Verdict.DEADLOCK


def _verdict_overlapped(transport: str, size: int, is_variable: bool, machine: Machine) -> Verdict:
    if not transport.endswith("flush"):
        return Verdict.PASS
    shares_one_stream = not machine.pair_communicators
    if is_variable:
        # The shape exchange synchronises with the device, where data is still awaited.
        progresses = machine.batch_progress == "per-peer" and machine.communicators == "premade"
        return Verdict.PASS if progresses and not shares_one_stream else Verdict.DEADLOCK
    return Verdict.DEADLOCK if shares_one_stream and size % 2 == 0 and size > 2 else Verdict.PASS


class TestBase:
    @pytest.mark.parametrize("size", [2, 3, 4, 5, *([6, 7, 8] if IS_FULL else [])])
    def test_verdicts_are_the_documented_ones(self, workers, size):
        configured = list(configurations(size, (1, 2, 3, 4) if IS_FULL else (1, 2), (1, 2)))
        differences = workers.map(_differences_of_base, configured, chunksize=2)
        assert [difference for found in differences for difference in found] == []

    @pytest.mark.parametrize(
        ("flags", "is_hidden_by_buffers"),
        [
            # Shapes only are issued one by one in list order.
            ({"batch_p2p_comm": False, "coalesces": False}, True),
            # Shapes and data, each awaited in both directions.
            ({"virtual_size": 2, "num_microbatches": 4}, True),
            # Data too in list order.
            ({"coalesces": False}, False),
        ],
    )
    def test_what_hangs_only_while_small_sends_are_not_buffered(self, flags, is_hidden_by_buffers):
        options = ScheduleOptions(4, 8, variable_seq_lengths=True)
        trace = record(dataclasses.replace(options, **flags), str(unpacked_base("0.19.2")))
        machine = Machine(coalesces=flags.get("coalesces", True), pair_communicators=True)
        assert run(trace, machine).verdict is Verdict.DEADLOCK
        buffered = run(trace, dataclasses.replace(machine, buffered_send_bytes=128))
        assert buffered.verdict is (Verdict.PASS if is_hidden_by_buffers else Verdict.DEADLOCK)

    @pytest.mark.parametrize(
        ("is_variable", "messages", "synchronisations"), [(False, 48, 60), (True, 96, 120)]
    )
    def test_messages_and_synchronisations_of_a_step(self, is_variable, messages, synchronisations):
        options = ScheduleOptions(4, 8, variable_seq_lengths=is_variable)
        base = run(record(options, str(unpacked_base("0.19.2"))), Machine()).statistics
        assert (base.messages, base.device_synchronisations) == (messages, synchronisations)


def _differences_of_base(configured: tuple[str, ScheduleOptions]) -> list[str]:
    transport, options = configured
    return [
        f"{outcome.verdict}, not {expected}, for {transport}, {options} on {machine}"
        for machine, outcome in outcomes(
            options, machines_for_the_base(), str(unpacked_base("0.19.2"))
        )
        if outcome.verdict is not (expected := verdict_of_base(transport, options, machine))
    ]


@dataclasses.dataclass(frozen=True)
class Control:
    """A protocol that was not built, the machine that shows why, and where it fails there."""

    protocol: Protocol
    machine: Machine
    fails: Callable[[ScheduleOptions], bool]


def is_defect_of_awaiting_both(options: ScheduleOptions) -> bool:
    return (
        options.pipeline_size % 2 == 0
        and options.virtual_size is not None
        and options.num_microbatches == options.pipeline_size
        and not options.overlap_p2p_comm
    )


def is_interleaved(options: ScheduleOptions) -> bool:
    return options.virtual_size is not None


def is_interleaved_on_an_odd_ring(options: ScheduleOptions) -> bool:
    return is_interleaved(options) and options.pipeline_size % 2 == 1


def awaited(group_of: Callable[[str, int, int], str], **changes) -> Protocol:
    """Two awaited steps in parity order, shapes and data on the same device groups."""
    return Protocol(
        group_of,
        shape_order=variants.by_parity,
        data_order=variants.by_parity,
        awaits_shape_sends=True,
        shapes_on_host=False,
        shares_groups=True,
        **changes,
    )


STRICT = Machine(blocking_wait=True)
ONE_QUEUE = Machine(hardware_queues="one")
LAZY = Machine(communicators="lazy", pair_communicators=True)

CONTROLS = {
    "only the shapes re-routed, data batched, lazy NCCL": Control(
        awaited(variants.one_group, batches_data=True),
        LAZY,
        lambda options: options.pipeline_size > 2 or is_defect_of_awaiting_both(options),
    ),
    "parity order, two awaited steps": Control(
        awaited(variants.one_group), Machine(), is_defect_of_awaiting_both
    ),
    "even/odd groups, two awaited steps": Control(
        Protocol(awaits_shape_sends=True, shapes_on_host=False),
        Machine(),
        is_defect_of_awaiting_both,
    ),
    "even/odd groups, shapes on the host, all sends awaited": Control(
        Protocol(awaits_shape_sends=True), STRICT, is_defect_of_awaiting_both
    ),
    "groups by one's own parity": Control(
        Protocol(
            variants.group_by_own_parity,
            shape_order=variants.by_parity,
            data_order=variants.by_parity,
        ),
        Machine(),
        is_interleaved_on_an_odd_ring,
    ),
    "groups by the sender's parity": Control(
        Protocol(variants.group_by_senders_parity, shape_order=variants.sends_first),
        STRICT,
        lambda options: (
            is_interleaved_on_an_odd_ring(options)
            and options.num_microbatches > options.pipeline_size
            and not options.overlap_p2p_comm
        ),
    ),
    "one group per direction": Control(
        Protocol(variants.group_per_direction, shape_order=variants.sends_first),
        Machine(),
        is_interleaved,
    ),
    "one group, sends first": Control(Protocol(variants.one_group), Machine(), lambda _: True),
    "shapes on the groups of the data, one hardware queue": Control(
        Protocol(shapes_on_host=False, shares_groups=True), ONE_QUEUE, is_defect_of_awaiting_both
    ),
}


@pytest.fixture(scope="module")
def traces(workers):
    """Of the fork, by options: what the controls are rewritten from."""
    options = [
        dataclasses.replace(each, coalesces=False)
        for size in (2, 3, 4, 5)
        for transport, each in configurations(size, (1, 2, 3), (1, 2))
        if transport in ("unbatched", "overlapped") and each.variable_seq_lengths
    ]
    return dict(zip(options, workers.map(record, options, chunksize=4), strict=True))


class TestNegativeControls:
    @pytest.mark.parametrize("name", CONTROLS)
    def test_control_fails_where_it_is_said_to(self, traces, name):
        control = CONTROLS[name]
        verdicts = {
            options: run(variants.rewritten(trace, control.protocol), control.machine).verdict
            for options, trace in traces.items()
        }
        failing = {options for options, verdict in verdicts.items() if not verdict.is_safe}
        assert failing == {options for options in traces if control.fails(options)}
        assert {verdicts[options] for options in failing} == {Verdict.DEADLOCK}

    @pytest.mark.parametrize("machine", [STRICT, ONE_QUEUE, LAZY, Machine()])
    def test_the_rewritten_protocol_of_the_fork_passes(self, traces, machine):
        for trace in traces.values():
            assert run(variants.rewritten(trace, Protocol()), machine).verdict is Verdict.PASS
