"""The verification on one GPU, in a small dry run: both endings, and what the report says."""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest

import megatron.core
from tools.base_release import unpacked_base
from tools.single_gpu_nccl import verify
from tools.single_gpu_nccl.configuration import configurations, dry_configurations

LIMITS = verify.Limits(budget_s=300.0, deadline_s=90.0, stall_s=5.0)


@pytest.fixture
def packages(tmp_path):
    """The two packages as verify.sh unpacks them."""
    distribution = importlib.metadata.distribution("megatron-core")
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork" / "megatron").symlink_to(Path(megatron.core.__file__).parents[1])
    metadata = Path(distribution._path)
    (tmp_path / "fork" / metadata.name).symlink_to(metadata)
    (tmp_path / "base").symlink_to(unpacked_base(distribution.version.partition("+")[0]))
    return tmp_path


def test_a_dry_run_tells_hanging_from_finishing_as_predicted(packages, tmp_path, monkeypatch):
    hanging, *_, fork = dry_configurations()
    monkeypatch.setattr(verify, "dry_configurations", lambda: [fork, hanging])
    path = tmp_path / "report.json"
    report = verify.Verification(packages, path, LIMITS, is_dry=True).run()

    assert json.loads(path.read_text()) == report
    finished, hung = report["configurations"]
    assert (finished["outcome"], finished["predicted"]) == ("finished", "finishes")
    assert (hung["outcome"], hung["predicted"]) == ("hung", "hangs")
    assert finished["agrees"]
    assert hung["agrees"]
    assert finished["start_up_seconds"] > 0
    assert len(finished["step_seconds"]) == sum(p.steps for p in verify.DRY_PAYLOADS)
    assert finished["communicators_after_first_step"] is None
    stacks = sorted(tmp_path.glob("report.stacks/1/rank*.txt"))
    assert len(stacks) == hanging.pipeline_size
    assert any("_communicate_shapes" in stack.read_text() for stack in stacks)


def test_what_no_time_is_left_for_is_run_by_resuming(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "dry_configurations", lambda: dry_configurations()[-1:])
    path = tmp_path / "report.json"
    limits = dataclasses.replace(LIMITS, budget_s=1.0)
    report = verify.Verification(packages, path, limits, is_dry=True).run()
    assert report["configurations"] == []
    assert len(report["not_run"]) == 1

    report = verify.Verification(packages, path, LIMITS, is_dry=True, resumes=True).run()
    assert [entry["outcome"] for entry in report["configurations"]] == ["finished"]
    assert report["not_run"] == []


@pytest.mark.parametrize(
    ("report", "complaint"),
    [(None, "there is no report"), ({"torch": "1.0"}, "was made with torch 1.0, and here it is")],
)
def test_resuming_needs_a_report_of_the_same_versions(packages, tmp_path, report, complaint):
    path = tmp_path / "report.json"
    if report:
        fresh = verify.Verification(packages, path, LIMITS, is_dry=True)
        path.write_text(json.dumps(fresh._report | report))
    with pytest.raises(RuntimeError, match=complaint):
        verify.Verification(packages, path, LIMITS, is_dry=True, resumes=True)


@pytest.mark.parametrize(
    ("phases", "ending", "outcome"),
    [
        (["ready", "start-up"], "completed", "finished"),
        (["ready", "start-up"], "stall", "hung"),
        (["ready"], "failed", "failed"),
        ([], "deadline", "did not start"),
    ],
)
def test_an_ending_before_the_pipeline_starts_is_no_hang(tmp_path, phases, ending, outcome):
    launch = verify._Launch(dry_configurations()[-1], tmp_path, tmp_path / "stacks")
    for file in launch.finding_files:
        file.write_text("".join(f'{{"phase": "{phase}", "seconds": 1}}\n' for phase in phases))
    assert launch.summary(ending)["outcome"] == outcome


def test_every_asked_configuration_is_there_once():
    every = list(configurations())
    assert len(every) == len(set(every)) == 2 * 2 * 3 * 2 * 2 * 2
    assert all(c.is_variable for c in every[:48])


def finding(communicators, used=0, reserved=0):
    return {
        "communicators": communicators,
        "device_memory_used": used,
        "torch_memory_reserved": reserved,
    }


def test_communicators_and_their_memory_are_summed_over_ranks():
    before, after = [finding([], 1000)] * 2, [finding([2, 2], 1500, 50)] * 2
    phases = {"ready": before, "start-up": after, "step 0": after, "step 1": [finding([2] * 3)] * 2}

    assert verify._communicators(after) == {"2": 2}
    assert verify._made_after_first_step(phases) == 2
    assert verify._memory_per_communicator(phases) == (1500 - 1000 - 2 * 50) // 4


def test_a_log_without_communicators_counts_as_not_understood():
    assert verify._made_after_first_step({"step 0": [finding([])], "step 1": [finding([])]}) is None
