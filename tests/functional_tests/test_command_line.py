"""``pretrain_gpt.py`` as a user starts it: torchrun under the emulation."""

import subprocess
import sys
from pathlib import Path

from tests.functional_tests.case_file import load_case

REPOSITORY = Path(__file__).parents[2]
LAUNCH = ["-m", "tools.cpu_emulation", "torchrun", "--standalone", "--nproc-per-node", "2"]


def start(documents, tmp_path, **changes):
    paths = {"DATA_PATH": documents, "INITIAL_CHECKPOINT": tmp_path}
    flags = load_case("gpt/pp1_packed").flags(
        paths, load=None, finetune=None, pipeline_model_parallel_size=2, **changes
    )
    return subprocess.run(
        [sys.executable, *LAUNCH, "pretrain_gpt.py", *flags],
        cwd=REPOSITORY,
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
