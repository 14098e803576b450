"""The scripts under ``examples/`` say what they lack, and hand the right command line on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
GLM5_1 = REPOSITORY / "examples/glm5_1"
GPT3 = REPOSITORY / "examples/gpt3"
ON_NODE_1 = {
    "MODEL": "/models/GLM-5.1",
    "DATASET": "/data/sft.jsonl",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SHOW_CALL = 'printf "%s\\n" "$@"\nenv | grep -E "^(NCCL|TORCH|MEGATRON|NPROC)"'
LIST_8_GPUS = "for gpu in 0 1 2 3 4 5 6 7; do echo GPU $gpu: stub; done"


def start(*command, path=None, **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in ON_NODE_1}
    inherited["PATH"] = os.pathsep.join(
        [*([str(path)] if path else []), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    return subprocess.run(
        [str(part) for part in command],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def put_commands(folder, **bodies):
    for name, body in bodies.items():
        command = folder / name.replace("_", "-")
        command.write_text(f"#!/usr/bin/env bash\n{body}\n")
        command.chmod(0o755)
    return folder


@pytest.fixture(name="no_gpu")
def fixture_no_gpu(tmp_path):
    return put_commands(tmp_path, nvidia_smi="exit 9")


@pytest.fixture(name="node_of_8_gpus")
def fixture_node_of_8_gpus(tmp_path):
    return put_commands(tmp_path, nvidia_smi=LIST_8_GPUS, megatron=SHOW_CALL)


@pytest.mark.parametrize(("gpus", "batch"), [(128, 32), (192, 48)])
def test_preflight_needs_no_gpu_and_passes(gpus, batch):
    result = start(GLM5_1 / f"sft_{gpus}_gpus.sh", PREFLIGHT_ONLY="1")

    assert result.returncode == 0, result.stderr
    assert f"Pre-flight on {gpus} GPUs" in result.stdout
    assert f"--global-batch-size {batch}" in result.stdout
    assert "PASS: every rank finishes" in result.stdout


@pytest.mark.parametrize("gpus", [128, 192])
def test_sft_names_everything_that_is_missing(gpus, no_gpu):
    result = start(GLM5_1 / f"sft_{gpus}_gpus.sh", path=no_gpu, NNODES="3")

    assert result.returncode == 2
    assert result.stdout == ""
    for lacking in (
        "the variable MODEL",
        "the variable MASTER_PORT",
        f"NNODES={gpus // 8} (it is 3)",
        "8 GPUs on this node (there are 0)",
        "PREFLIGHT_ONLY=1",
    ):
        assert lacking in result.stderr


@pytest.mark.parametrize("gpus", [128, 192])
def test_sft_hands_the_command_line_on_without_what_hurts(gpus, node_of_8_gpus):
    result = start(
        GLM5_1 / f"sft_{gpus}_gpus.sh",
        "--max_length",
        "4096",
        path=node_of_8_gpus,
        NNODES=str(gpus // 8),
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
        NCCL_TIMEOUT="7200",
        **ON_NODE_1,
    )

    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    command_line = " ".join(lines)
    assert lines[:3] == ["sft", "--model", ON_NODE_1["MODEL"]]
    for flags in (
        "--ddp_timeout 1800",
        "--pipeline_model_parallel_size 4",
        "--decoder_last_pipeline_num_layers 18",
        "--packing true",
        "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1",
    ):
        assert flags in command_line
    # The last of two values counts, so the caller's own come last.
    assert command_line.index("--max_length 8192") < command_line.index("--max_length 4096")
    assert "NPROC_PER_NODE=8" in lines
    assert "MEGATRON_PIPELINE_STARTUP_TIMEOUT=600" in lines
    assert not [line for line in lines if line.startswith(("TORCH_DISTRIBUTED_DEBUG", "NCCL_TIME"))]


@pytest.mark.parametrize(
    ("script", "lacking"),
    [
        (("train.sh", "node"), "8 GPUs on this node (there are 0)"),
        (("train.sh", "nodes"), "NNODES"),
        (("train.sh", "laptop"), "laptop is not a scale"),
        (("train.sbatch",), "sbatch"),
    ],
)
def test_gpt3_says_what_it_lacks(script, lacking, no_gpu):
    name, *scale = script
    result = start("bash", GPT3 / name, *scale, no_gpu / "work", path=no_gpu)

    assert result.returncode != 0
    assert lacking in result.stderr


def test_install_refuses_changes_that_are_not_committed(tmp_path):
    copy = tmp_path / "examples/glm5_1/install.sh"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((GLM5_1 / "install.sh").read_bytes())
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)

    result = start("bash", copy)

    assert result.returncode == 2
    assert "not committed" in result.stderr
