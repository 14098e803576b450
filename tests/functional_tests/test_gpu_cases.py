"""The cases of ``run.sh``: flags, checks, a few of them shrunk, and what a hang leaves."""

import functools
import importlib.metadata
import json
import os
import sys

import pytest

from tests.functional_tests import run, watch_node
from tests.functional_tests.case_file import case_names, cpu_case, load_case
from tools.base_release import unpacked_base
from tools.deadlock_check import arguments, record_schedule
from tools.deadlock_check.check import check, is_safe

CHECKED_FLAGS = (
    "--num-layers",
    "--global-batch-size",
    "--micro-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--no-overlap-p2p-communication",
    "--variable-seq-lengths",
)
"""What decides about the pipeline, under the names that the deadlock checker shares."""

HANGING_SCRIPT = """
import os, signal

def hang_on_purpose():
    signal.pause()

def wait_for_the_other_rank():
    from torch.distributed import TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.wait(["never set"])

hang_on_purpose() if os.environ["RANK"] == "1" else wait_for_the_other_rank()
"""


def _parse(commands):
    """Returns the complaint about each pair of a number of ranks and flags; runs on one rank."""
    from megatron.training import global_vars
    from megatron.training.arguments import parse_and_validate_args

    from gpt_arguments import add_arguments

    complaints = {}
    for name, (ranks, flags) in commands.items():
        os.environ["WORLD_SIZE"] = str(ranks)
        sys.argv = ["pretrain_gpt.py", *flags]
        global_vars.unset_global_variables()
        try:
            parse_and_validate_args(
                extra_args_provider=add_arguments,
                args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
            )
        except (Exception, SystemExit) as error:
            complaints[name] = repr(error)
    return complaints


def test_flags_of_every_case_are_valid(pool, tmp_path):
    paths = {"DATA_PATH": tmp_path, "INITIAL_CHECKPOINT": tmp_path}
    commands = {}
    for name in case_names(for_gpus=True):
        for size, case in {"on GPUs": load_case(name), "shrunk": cpu_case(name)}.items():
            commands[f"{name} {size}"] = (case.ranks, case.flags(paths))
    assert len(commands) == 2 * 18
    outcome = pool.run(
        _parse,
        world_size=1,
        arguments={"commands": commands},
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    assert outcome.values() == [{}]


def _checked(case, implementation, *options):
    """Returns the deadlock checker's results for the schedule that a case runs."""
    flags = ["--world-size", str(case.ranks), "--implementation", implementation, *options]
    for flag in CHECKED_FLAGS:
        value = case.model_args.get(flag)
        flags += [] if value is None else [flag] if value is True else [flag, str(value)]
    parsed = arguments.parse(["run", *flags])
    return _checked_schedule(
        arguments.schedule(parsed), implementation, tuple(arguments.machines(parsed))
    )


@functools.cache
def _checked_schedule(schedule, implementation, machines):
    # The cases of both models have the same schedules.
    return check(record_schedule.record(schedule, implementation), machines)


@pytest.mark.parametrize("debug", [[], ["--debug-detail"]], ids=["unset", "DETAIL"])
@pytest.mark.parametrize(
    "name", [name for name in case_names(for_gpus=True) if load_case(name).same_loss_as]
)
def test_no_case_can_deadlock(name, debug):
    assert is_safe(_checked(load_case(name), record_schedule.INSTALLED, *debug))


def test_the_base_can_deadlock_in_a_case():
    """The negative control: the flags reach the checker."""
    base = str(unpacked_base(importlib.metadata.version("megatron-core").partition("+")[0]))
    assert not is_safe(_checked(load_case("gpt/gpu_pp2_packed"), base, "--debug-detail"))


def test_the_runner_trains_and_keeps_the_result(tmp_path):
    name = "gpt/gpu_pp1_packed"
    result = run.Runner(tmp_path, gpus_per_node=8, shrinks=True).run(name, "bound-detail")

    assert result["problems"] == []
    assert len(result["losses"]) == cpu_case(name).model_args["--train-iters"]
    assert json.loads((tmp_path / name / "bound-detail" / "result.json").read_text()) == result
    # What the emulation cannot measure is not claimed.
    assert result["peak_memory_bytes"] is result["communicators_after_first_step"] is None


@pytest.mark.parametrize("name", ["gpt/gpu_pp2_vpp2_packed", "moe/gpu_pp2_packed"])
def test_shrunk_cases_have_the_losses_of_one_stage(name, run_case):
    case = cpu_case(name)
    losses = run_case(name).losses
    assert len(losses) == case.model_args["--train-iters"]
    assert losses == pytest.approx(run_case(case.same_loss_as).losses, rel=case.loss_rtol)


def test_a_hang_ends_at_the_deadline_and_leaves_all_stacks(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(HANGING_SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    status = watch_node.watch(15.0, tmp_path, [*torchrun, "--nproc-per-node", "2", str(script)])

    assert status == 124
    stacks = {path.name.split(".")[0]: path.read_text() for path in tmp_path.glob("stacks/*")}
    assert "hang_on_purpose" in stacks["rank1"]
    assert "wait_for_the_other_rank" in stacks["rank0"]


def test_several_nodes_need_slurm(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    runner = run.Runner(tmp_path, gpus_per_node=8, shrinks=True)
    with pytest.raises(run.CannotRun, match=r"needs 16 GPUs, 2 nodes of 8: .* Slurm"):
        runner._command(load_case("moe/gpu_pp8_packed"), [], tmp_path, 1.0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"communicators_after_first_step": 1}, "communicators were made after"),
        ({"communicators_until_first_step": 0}, "its log is not understood"),
        ({"unbatched_warnings_after_first_step": 1}, "unbatched operation after"),
        ({"losses": [5.0]}, "1 losses were logged instead of 2"),
    ],
)
def test_what_makes_a_case_fail(tmp_path, changes, complaint):
    result = {
        "losses": [5.0, 4.0],
        "communicators_until_first_step": 5,
        "communicators_after_first_step": 0,
        "unbatched_warnings_after_first_step": 0,
    }
    problems = run._problems(result | changes, "completed", tmp_path, iterations=2)
    assert len(problems) == (complaint is not None)
    assert all(complaint in problem for problem in problems)


@pytest.mark.parametrize("losses", [[5.0, 4.5], [5.0, float("nan")], [5.0]])
def test_losses_that_differ_are_a_problem(losses):
    expected = {1: 5.0, 2: 4.0}
    assert run._loss_problems("golden values", expected, [5.0, 4.01], rtol=0.01) == []
    (problem,) = run._loss_problems("golden values", expected, losses, rtol=0.01)
    assert problem.startswith("iteration 2: ")
