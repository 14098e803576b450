"""The commands of ``python -m tools.deadlock_check``, run in this process."""

import json

import pytest

from tools.deadlock_check import arguments
from tools.deadlock_check.command_line import BAD_USAGE, SAFE, UNSAFE, main

PIPELINE = ["--pipeline-model-parallel-size", "4"]
STEP = [*PIPELINE, "--num-microbatches", "4"]
REPORTED = ["run", *STEP, "--variable-seq-lengths", "--torch-version", "2.10", "--debug-detail"]

CROSSWISE = "0: s1; r1; w\n1: s0; r0; w\n"
IN_TURN = "0: s1; r1; w\n1: r0; s0; w\n"


def schedule_of(*flags):
    return arguments.schedule(arguments.parse(["run", *flags]))


def machines_of(*flags):
    return arguments.machines(arguments.parse(["pattern", "FILE", *flags]))


@pytest.fixture
def pattern(tmp_path):
    def write(text):
        path = tmp_path / "case.pattern"
        path.write_text(text)
        return str(path)

    return write


def test_the_reported_configuration_is_unsafe_on_the_base(capsys):
    assert main([*REPORTED, "--implementation", "base:0.19.2"]) == UNSAFE
    output = capsys.readouterr().out
    assert "The wait-for cycle" in output
    assert "isend of the shape of microbatch" in output
    assert "p2p_communication.py:257 _communicate_shapes" in output
    assert "unset TORCH_DISTRIBUTED_DEBUG: safe on 8 of 8 machines" in output
    assert "install this fork: safe on 2 of 2 machines" in output


def test_the_reported_configuration_is_safe_with_the_fork(capsys, tmp_path):
    saved, picture = tmp_path / "trace.jsonl", tmp_path / "timeline.png"
    outputs = ["--save-trace", str(saved), "--plot", str(picture)]
    assert main([*REPORTED, "--json", *outputs]) == SAFE
    recorded = json.loads(capsys.readouterr().out)
    assert recorded["is_safe"]
    assert len(recorded["machines"]) == 2
    assert picture.stat().st_size > 10_000

    read = ["trace", str(saved), "--json", "--torch-version", "2.10", "--debug-detail"]
    assert main(read) == SAFE
    assert json.loads(capsys.readouterr().out) == recorded


@pytest.mark.parametrize(("text", "status"), [(CROSSWISE, UNSAFE), (IN_TURN, SAFE)])
def test_the_exit_status_of_a_pattern_is_its_verdict(pattern, capsys, text, status):
    assert main(["pattern", pattern(text)]) == status
    first_line = capsys.readouterr().out.splitlines()[0]
    assert first_line.startswith("PASS" if status == SAFE else "DEADLOCK")


def test_one_unsafe_machine_makes_a_pattern_unsafe(pattern, capsys):
    path = pattern("0: s1(8); r1(8); w\n1: s0(8); r0(8); w\n")
    assert main(["pattern", path, "--small-sends", "buffered", "--world", "premade"]) == SAFE
    assert main(["pattern", path, "--world", "premade"]) == UNSAFE
    capsys.readouterr()


def test_flags_of_a_megatron_command_line_mean_what_they_mean_there():
    pasted = [*PIPELINE, "--tensor-model-parallel-size", "4", "--expert-model-parallel-size", "8"]
    pasted += ["--num-layers", "16", "--num-layers-per-virtual-pipeline-stage", "2"]
    pasted += ["--micro-batch-size", "1", "--global-batch-size", "48", "--world-size", "192"]
    overlapped = schedule_of(*pasted)
    assert (overlapped.pipeline_size, overlapped.virtual_size) == (4, 2)
    assert overlapped.num_microbatches == 4
    assert (overlapped.overlap_p2p_comm, overlapped.batch_p2p_comm) == (True, False)
    batched = schedule_of(*pasted, "--no-overlap-p2p-communication")
    assert (batched.overlap_p2p_comm, batched.batch_p2p_comm) == (False, True)


def test_without_virtual_stages_nothing_overlaps_and_batches_can_be_switched_off():
    assert schedule_of(*STEP).virtual_size is None
    assert schedule_of(*STEP).batch_p2p_comm
    assert not schedule_of(*STEP, "--no-batch-p2p-communication").batch_p2p_comm
    assert not schedule_of(*STEP, "--no-batch-p2p-communication").overlap_p2p_comm


def test_flags_may_have_underscores_as_in_ms_swift():
    step = schedule_of("--pipeline_model_parallel_size=8", "--num_microbatches", "16")
    assert (step.pipeline_size, step.num_microbatches) == (8, 16)


def test_batches_are_recorded_as_the_torch_version_has_them():
    assert not schedule_of(*STEP, "--torch-version", "2.10", "--debug-detail").coalesces
    assert schedule_of(*STEP, "--torch-version", "2.10").coalesces
    assert schedule_of(*STEP, "--torch-version", "2.11", "--debug-detail").coalesces
    assert not schedule_of(*STEP, "--backend", "gloo").coalesces


def test_every_machine_is_checked_that_the_flags_leave_possible():
    every = machines_of("--torch-version", "2.10")
    assert len(every) == 8
    one = machines_of("--torch-version", "2.10", "--world", "lazy", "--hardware-queues", "one")
    assert {(machine.communicators, machine.hardware_queues) for machine in one} == {
        ("lazy", "one")
    }
    assert {machine.buffered_send_bytes for machine in every} == {0}
    assert [machine.name for machine in machines_of("--backend", "gloo")] == ["gloo"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["run", *STEP, "--lr", "1e-4", "--bf16"], "--lr --bf16"),
        (["run", *PIPELINE], "--num-microbatches"),
        (["run", "--num-microbatches", "4"], "--pipeline-model-parallel-size"),
        (["run", *PIPELINE, "--global-batch-size", "8"], "--data-parallel-size"),
        (
            ["run", *PIPELINE, "--global-batch-size", "9", "--data-parallel-size", "2"],
            "--global-batch-size 9",
        ),
        (
            ["run", *PIPELINE, "--global-batch-size", "8", "--world-size", "10"],
            "--world-size 10",
        ),
        (["run", *STEP, "--num-layers-per-virtual-pipeline-stage", "1"], "--num-layers"),
        (["run", *STEP, "--torch-version", "2.4"], "2.4"),
        (["run", *STEP, "--torch-version", "new"], "'new'"),
        (["run", *STEP, "--implementation", "base:9.9"], "base:0.19.2"),
        (["run", *STEP, "--overlap-p2p-communication"], "overlap_p2p_comm"),
        (["run", "--pipeline-model-parallel-size", "0"], "'0'"),
        (["pattern", "no/such/file"], "no/such/file"),
        (["trace", "no/such/file"], "no/such/file"),
        (["pattern", "FILE", "--plot", "timeline.txt"], "timeline.txt"),
        (["explain"], "explain"),
        ([], "COMMAND"),
    ],
)
def test_bad_usage_is_one_line_that_names_it(capsys, command, told):
    assert main(command) == BAD_USAGE
    output = capsys.readouterr()
    assert not output.out
    assert output.err.count("\n") == 1
    assert told in output.err


@pytest.mark.parametrize("flag", ["--plot", "--save-trace"])
def test_a_file_that_cannot_be_written_is_named(pattern, capsys, flag):
    assert main(["pattern", pattern(IN_TURN), flag, "no/such/folder/file.png"]) == BAD_USAGE
    assert "no/such/folder/file.png" in capsys.readouterr().err
