"""The command lines of the reports, through the real command, on the fork.

They are those of ``examples/glm5_1``. Changed are sizes (ranks, parallel sizes, layers, lengths,
number of steps) and what has no stand-in on a CPU; everything else is handed on as it is.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.client_tests.megatron_sft import sft_run
from tests.client_tests.megatron_sft.conftest import CPU_FLAGS, VARYING

EXAMPLES = Path(__file__).parents[3] / "examples/glm5_1"
RANKS = 8
LAYERS = 7
STEPS = 2
SMALLER = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "decoder_last_pipeline_num_layers": 1,
    # Four microbatches, as in both reports.
    "global_batch_size": 4,
    "max_length": 128,
    "train_iters": STEPS,
    "save_steps": STEPS,
    "dataloader_num_workers": 0,
    "dataset_num_proc": 1,
}
# The first report leaves it out, and then nothing is logged until the fifth step.
LOG_EVERY_STEP = {"logging_steps": 1}
# A checkpoint of the optimizer is not what is tested.
NO_CHECKPOINT_OF_THE_OPTIMIZER = {"no_save_optim": True, "no_save_rng": True}
ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
}
ONLY_WITH_A_PIPELINE = "decoder_last_pipeline_num_layers"
# Weights and activations are bfloat16, as in the reports, and TP=2 sums in another order.
TOLERANCE = 5e-3


def reported_flags(script: str) -> dict[str, str]:
    """The flags that a script of the examples hands to ``megatron sft``."""
    text = (EXAMPLES / script).read_text()
    words = shlex.split(re.split(r"^launch ", text, flags=re.MULTILINE)[1])
    flags = [word for word in words if word.strip() and word != "$@"]
    return {
        name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }


@pytest.mark.every_pair
@pytest.mark.parametrize("script", ["sft_192_gpus.sh", "sft_128_gpus.sh"])
def test_reported_command_line_trains(fork_pool, model, dataset, report, tmp_path, script):
    reported = reported_flags(script)
    inputs_of_run = {"model": model("glm_moe_dsa", LAYERS), "dataset": dataset(VARYING)}
    flags = {
        **CPU_FLAGS,
        **LOG_EVERY_STEP,
        **NO_CHECKPOINT_OF_THE_OPTIMIZER,
        **inputs_of_run,
        **reported,
        **SMALLER,
    }
    assert flags["pipeline_model_parallel_size"] == "4"
    assert flags["packing"] == "true"

    found = sft_run.train_from_shell(flags, ranks=RANKS, folder=tmp_path / "run", deadline_s=400.0)

    alone = {name: value for name, value in flags.items() if name != ONLY_WITH_A_PIPELINE}
    expected = sft_run.train(fork_pool, {**alone, **ONE_RANK}, ranks=1, folder=tmp_path / "alone")
    report(
        " ".join(f"{loss:.4f}" for loss in found.losses),
        " ".join(f"{loss:.4f}" for loss in expected.losses),
        found.seconds,
    )
    assert len(found.losses) == STEPS
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
