"""The stand-in for Transformer Engine: its numbers, its refusals, and where it can be imported."""

import os

import pytest

from tests.harness.worker_pool import WorkerPool
from tests.unit_tests.cpu_emulation import transformer_engine_cases as cases
from tools.cpu_emulation import PACKAGES_DIRECTORY, environment

LINEAR = {"in_features": 4, "out_features": 4}
ATTENTION = {"num_attention_heads": 2, "kv_channels": 4}


@pytest.fixture(scope="module")
def pool():
    with WorkerPool.for_fork(emulate_cuda=True, transformer_engine=True) as pool:
        yield pool


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("packed_attention", {}),
        ("packed_attention", {"groups": 4, "value_size": 6, "padding": 0}),
        ("layer_norm_linear", {"kind": "LayerNorm", "zero_centered": False}),
        ("layer_norm_linear", {"kind": "RMSNorm", "zero_centered": True}),
        ("grouped_linear", {}),
        ("norm_beside_the_product", {}),
        ("recomputed_dropout", {}),
        ("hadamard_transform", {}),
    ],
)
def test_numbers_are_those_of_plain_pytorch(pool, case, arguments):
    outcome = pool.run(
        cases.compared, world_size=1, arguments={"case": case, "arguments": arguments}
    )

    assert max(outcome.values()) < 1e-4


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_compute_what_one_does(pool, sequence_parallel):
    arguments = {"sequence_parallel": sequence_parallel}
    outcome = pool.run(
        cases.compared_over_ranks,
        world_size=2,
        arguments={"case": "split_over_two_ranks", "arguments": arguments},
    )

    # Gradients of squares are of the order of a thousand.
    assert max(outcome.values()) < 5e-3


@pytest.mark.parametrize(
    ("module", "settings", "named"),
    [
        ("Linear", {**LINEAR, "fuse_wgrad_accumulation": True}, "gradient_accumulation_fusion"),
        ("Linear", {**LINEAR, "ub_overlap_ag": True}, "--tp-comm-overlap"),
        ("DotProductAttention", {**ATTENTION, "attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("DotProductAttention", {**ATTENTION, "window_size": (128, 0)}, "window_size=(128, 0)"),
        ("DotProductAttention", {**ATTENTION, "cp_group": "a group"}, "context_parallel_size"),
        ("LayerNormLinear", {**LINEAR, "delay_wgrad_compute": True}, "--delay-wgrad-compute"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(pool, module, settings, named):
    outcome = pool.run(
        cases.refused, world_size=1, arguments={"module": module, "settings": settings}
    )

    assert named in outcome.values()[0]


@pytest.mark.parametrize("version", ["0.16.1", "0.17.1", "0.18.2", "0.19.2"])
def test_every_base_takes_it_for_transformer_engine(version):
    with WorkerPool.for_base(version, transformer_engine=True) as pool:
        assert pool.run(cases.importable_by_the_base, world_size=1).values() == [True]


def test_children_find_it_where_it_was_asked_for(run_python):
    show = "import transformer_engine; print(transformer_engine.__version__)"

    assert run_python("-c", show, environment=environment(transformer_engine=True)).stdout
    assert "No module named" in run_python("-c", show, environment=environment()).stderr


def test_it_cannot_be_imported_without_the_emulation(run_python):
    result = run_python(
        "-c",
        "import transformer_engine",
        environment={**os.environ, "PYTHONPATH": str(PACKAGES_DIRECTORY)},
    )

    assert "--transformer-engine" in result.stderr
    assert result.returncode == 1


def test_the_switch_needs_a_command(run_python):
    result = run_python("-m", "tools.cpu_emulation", "--transformer-engine")

    assert result.returncode == 1
    assert "without a command" in result.stderr
