"""``megatron sft`` on the fork logs the losses of one rank, whatever the pipeline looks like."""

import itertools
import math
from typing import Any

import pytest

from tests.client_tests.megatron_sft import sft_run
from tests.client_tests.megatron_sft.conftest import (
    CONSTANT,
    CPU_FLAGS,
    LORA_FLAGS,
    SMALL_FLAGS,
    VARYING,
)

# Every pipeline that ms-swift can be asked for: without VPP it switches overlap off itself, and
# with overlap it never batches.
_PIPELINES = {
    "pp2": {"pp": 2},
    "pp2_unbatched": {"pp": 2, "batch_p2p_comm": False},
    "pp4": {"pp": 4},
    "pp4_unbatched": {"pp": 4, "batch_p2p_comm": False},
    "pp2_vpp2_overlap": {"pp": 2, "vpp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2, "overlap_p2p_comm": False},
    "pp2_vpp2_unbatched": {
        "pp": 2,
        "vpp": 2,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": False,
    },
    "pp4_vpp2_overlap": {"pp": 4, "vpp": 2},
    "pp4_vpp2": {"pp": 4, "vpp": 2, "overlap_p2p_comm": False},
    "pp4_vpp2_unbatched": {
        "pp": 4,
        "vpp": 2,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": False,
    },
}
_EVERY_PAIR = {
    ("pp2", "packed", "lora"),
    ("pp4", "packed", "full"),
    ("pp2_vpp2", "not_packed", "full"),
    ("pp4_vpp2", "packed", "full"),
    ("pp4_vpp2_overlap", "not_packed", "full"),
}
_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_SHORT_NAMES = {"pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size"}


def _flags(short: dict[str, Any]) -> dict[str, Any]:
    return {_SHORT_NAMES.get(name, name): value for name, value in short.items()}


def _shown(losses: tuple[float, ...]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


@pytest.fixture
def compare(fork_pool, model, dataset, one_rank, report, tmp_path):
    """A function that trains on some ranks and on one, and asserts that they log the same."""

    def run(model_type: str, common: dict[str, Any], split: dict[str, Any], ranks: int) -> None:
        expected = one_rank(model_type, VARYING, tuple(common.items()))
        inputs_of_run = {"model": model(model_type), "dataset": dataset(VARYING)}
        flags = {**SMALL_FLAGS, **CPU_FLAGS, **inputs_of_run, **common, **split}
        found = sft_run.train(fork_pool, flags, ranks=ranks, folder=tmp_path / "run")
        report(_shown(found.losses), _shown(expected.losses), found.seconds)
        assert len(found.losses) == SMALL_FLAGS["train_iters"]
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-4)

    return run


def _matrix() -> list[Any]:
    """Every pipeline with full parameters, packed and not; LoRA with one of these in turn."""
    packings = ("packed", "not_packed")
    full = [(pipeline, packing, "full") for pipeline in _PIPELINES for packing in packings]
    alternating = zip(_PIPELINES, itertools.cycle(packings), strict=False)
    cases = [*full, *((pipeline, packing, "lora") for pipeline, packing in alternating)]
    return [
        pytest.param(
            pipeline,
            packing == "packed",
            tuner,
            id="-".join((pipeline, packing, tuner)),
            marks=[pytest.mark.every_pair] if (pipeline, packing, tuner) in _EVERY_PAIR else [],
        )
        for pipeline, packing, tuner in cases
    ]


@pytest.mark.parametrize(("pipeline", "packing", "tuner"), _matrix())
def test_pipeline_logs_the_losses_of_one_rank(compare, adapter, pipeline, packing, tuner):
    split = _flags(_PIPELINES[pipeline])
    lora = {**LORA_FLAGS, "adapters": adapter} if tuner == "lora" else {}
    common = {"packing": packing, **lora}
    compare("qwen3", common, split, ranks=split["pipeline_model_parallel_size"])


@pytest.mark.parametrize(
    ("model_type", "split", "ranks"),
    [
        ("qwen3", {"pp": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, 4),
        ("qwen3", {"pp": 4, "decoder_last_pipeline_num_layers": 5}, 4),
        ("qwen3_moe", {"pp": 2, "expert_model_parallel_size": 2}, 4),
        ("qwen3_moe", {"pp": 4, "vpp": 2, "overlap_p2p_comm": False}, 4),
        ("glm4_moe", {"pp": 4}, 4),
        ("glm4_moe", {"pp": 2, "vpp": 2, "overlap_p2p_comm": False}, 2),
    ],
    ids=["tp2", "short_last_stage", "ep2", "moe_pp4_vpp2", "glm4_moe_pp4", "glm4_moe_pp2_vpp2"],
)
def test_other_splits_log_the_losses_of_one_rank(compare, model_type, split, ranks):
    compare(model_type, {"packing": True, **_RECOMPUTE}, _flags(split), ranks=ranks)


_NO_OVERLAP = {"overlap_p2p_comm": False}


@pytest.mark.parametrize(
    ("ending", "lengths", "pipeline"),
    [
        ("wrong losses", CONSTANT, {"pp": 2, "vpp": 2}),
        ("raised", VARYING, {"pp": 2, "vpp": 2}),
        ("stuck", VARYING, {"pp": 4, "vpp": 2}),
    ],
    ids=["pp2_vpp2_constant_lengths", "pp2_vpp2_varying_lengths", "pp4_vpp2"],
)
def test_base_fails_where_the_fork_is_right(
    fork_pool, base_pool, model, dataset, one_rank, report, tmp_path, ending, lengths, pipeline
):
    common = {"packing": False}
    split = _flags({**pipeline, **_NO_OVERLAP})
    ranks = pipeline["pp"]
    inputs_of_run = {"model": model("qwen3"), "dataset": dataset(lengths)}
    flags = {**SMALL_FLAGS, **CPU_FLAGS, **inputs_of_run, **common, **split}
    expected = one_rank("qwen3", lengths, tuple(common.items()))

    fork = sft_run.train(fork_pool, flags, ranks=ranks, folder=tmp_path / "fork")
    folder = tmp_path / "base"
    base = sft_run.run_in_pool(base_pool, flags, ranks=ranks, folder=folder)
    losses = sft_run.logged_losses(sft_run.log_file(folder, ranks - 1).read_text())

    report(_shown(fork.losses), f"base: {ending} {_shown(losses)}", base.seconds)
    assert fork.losses == pytest.approx(expected.losses, rel=1e-5)
    if ending == "wrong losses":
        assert len(base.with_status("returned")) == ranks
        assert not math.isclose(losses[-1], expected.losses[-1], rel_tol=1e-3)
    else:
        assert base.with_status(ending), base.describe()
        assert not losses


def test_resumed_run_logs_what_the_uninterrupted_one_does(
    fork_pool, model, dataset, report, tmp_path
):
    inputs_of_run = {"model": model("qwen3"), "dataset": dataset(VARYING)}
    split = _flags({"pp": 2, "vpp": 2, "overlap_p2p_comm": False})
    schedule = {"train_iters": 4, "save_steps": 2, "no_save_optim": False, "no_save_rng": False}
    flags = {**SMALL_FLAGS, **CPU_FLAGS, **inputs_of_run, **split, **schedule, "packing": True}
    folder = tmp_path / "whole"
    whole = sft_run.train(fork_pool, flags, ranks=2, folder=folder)

    after_two_steps = folder / "output" / "checkpoint-2"
    again = {**flags, "mcore_model": after_two_steps, "finetune": False}
    resumed = sft_run.train(fork_pool, again, ranks=2, folder=tmp_path / "resumed")

    report(_shown(resumed.losses), _shown(whole.losses[2:]), resumed.seconds)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-5)
