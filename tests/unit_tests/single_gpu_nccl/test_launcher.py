"""``python -m tools.single_gpu_nccl``, as far as a machine without a GPU shows it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools.nccl_log import communicator_sizes
from tools.single_gpu_nccl import rank_environment

REPOSITORY = Path(__file__).parents[3]
INITIALISED = "comm 0x55d0 rank 0 nranks {} cudaDev 0 nvmlDev 0 busId 1b000 commId 0x1 - Init {}\n"


def launch(tmp_path, script_text, *options):
    script = tmp_path / "script.py"
    script.write_text(script_text)
    command = [sys.executable, "-m", "tools.single_gpu_nccl", "--ranks", "2", *options]
    return subprocess.run(
        [*command, "--logs", tmp_path / "logs", script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_rank_is_a_host_of_its_own_on_device_0(tmp_path):
    variables = "RANK LOCAL_RANK WORLD_SIZE NCCL_HOSTID NCCL_MULTI_RANK_GPU_ENABLE NCCL_NET"
    result = launch(
        tmp_path, f"import os; print([os.environ.get(n) for n in '{variables}'.split()])"
    )

    assert result.returncode == 0, result.stdout + result.stderr
    is_official = torch.cuda.nccl.version() >= (2, 30)
    for rank in range(2):
        host, switch = (None, "1") if is_official else (f"single-gpu-rank-{rank}", None)
        expected = [str(rank), "0", "2", host, switch, "Socket"]
        assert (tmp_path / "logs" / f"rank{rank}.log").read_text() == f"{expected}\n"


@pytest.mark.parametrize(
    ("script", "options", "status"),
    [
        ("import os; os._exit(3 * int(os.environ['RANK']))", [], 1),
        ("import signal; signal.pause()", ["--deadline", "2"], 124),
    ],
)
def test_failure_and_deadline_are_told_apart(tmp_path, script, options, status):
    assert launch(tmp_path, script, *options).returncode == status
    has_stacks = len(list((tmp_path / "logs").glob("stacks/rank*.txt"))) == 2
    assert has_stacks == (status == 124)


def test_missing_script_is_refused(tmp_path):
    command = [sys.executable, "-m", "tools.single_gpu_nccl", "--ranks", "2", tmp_path / "no.py"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2
    assert "there is no such file" in result.stderr


@pytest.mark.parametrize(
    ("version", "present", "absent"),
    [
        ((2, 27, 5), "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"),
        ((2, 30, 7), "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"),
    ],
)
def test_the_official_switch_is_used_where_there_is_one(version, present, absent):
    variables = rank_environment.sharing_variables(1, version)
    assert present in variables
    assert absent not in variables


def test_an_nccl_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 4, 8))
    with pytest.raises(RuntimeError, match=r"NCCL 2\.4\.8 is older than 2\.5"):
        rank_environment.nccl_version()


def test_communicators_are_counted_when_they_are_complete(tmp_path):
    log = tmp_path / "nccl.log"
    assert communicator_sizes(log) == []
    log.write_text(
        "ncclCommInitRankConfig "
        + INITIALISED.format(4, "START")
        + "ncclCommInitRankConfig "
        + INITIALISED.format(4, "COMPLETE")
        + "ncclCommSplit "
        + INITIALISED.format(2, "COMPLETE")
    )
    assert communicator_sizes(log) == [4, 2]
