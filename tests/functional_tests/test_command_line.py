"""``pretrain_gpt.py`` as a user starts it: torchrun under the emulation."""

import os
import subprocess
import sys
from pathlib import Path

from tests.functional_tests.case_file import load_case
from tools.deadlock_check.command_line import main
from tools.deadlock_check.trace import Collective, Transfer
from tools.deadlock_check.trace_file import read_traces

REPOSITORY = Path(__file__).parents[2]


def start(documents, tmp_path, case="gpt/pp1_packed", ranks=2, recorder=(), **changes):
    """Runs a case at PP=2; ``recorder`` goes before the command."""
    paths = {"DATA_PATH": documents, "INITIAL_CHECKPOINT": tmp_path}
    loaded = load_case(case)
    flags = loaded.flags(paths, load=None, finetune=None, pipeline_model_parallel_size=2, **changes)
    emulation = [sys.executable, "-m", "tools.cpu_emulation"]
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*recorder, *emulation, *launch, "pretrain_gpt.py", *flags],
        cwd=REPOSITORY,
        env=os.environ | loaded.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_torchrun_under_the_emulation_trains(documents, tmp_path):
    result = start(documents, tmp_path, train_iters=2, lr_warmup_iters=0)

    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "iteration        2 tokens in documents: " in result.stdout
    assert "iteration        2/       2 |" in result.stdout


def test_flags_that_do_not_go_together_are_refused_once(documents, tmp_path):
    result = start(documents, tmp_path, micro_batch_size=2)

    assert result.returncode != 0
    assert "Traceback" not in result.stdout
    assert result.stderr.count("pretrain_gpt.py: error: --micro-batch-size 2: ") == 1


def test_a_recorded_training_is_checked_with_its_collectives(documents, tmp_path, capsys):
    traces = tmp_path / "traces"
    result = start(
        documents,
        tmp_path,
        case="moe/pp1_packed",
        ranks=4,
        recorder=[sys.executable, "-m", "tools.deadlock_check", "record", "--output", traces, "--"],
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        train_iters=2,
        lr_warmup_iters=0,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]

    files = sorted(traces.iterdir())
    trace = read_traces(files)
    names = {o.name for program in trace.programs for o in program if isinstance(o, Collective)}
    assert {"all_reduce", "all_to_all_single", "reduce_scatter_tensor"} <= names
    assert all(
        any(isinstance(o, Transfer) and o.role and o.content == "data" for o in program)
        for program in trace.programs
    )
    for backend in (["--backend", "gloo"], ["--torch-version", "2.10", "--debug-detail"]):
        assert main(["trace", *map(str, files), *backend]) == 0
        assert "PASS: every rank finishes" in capsys.readouterr().out
