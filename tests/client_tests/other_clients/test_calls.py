"""Pipelines called as other projects call them compute what one rank computes."""

import pytest

from tests.client_tests.other_clients.call_cases import (
    FORWARD_ONLY,
    TRAINING,
    evaluate_as_clients,
    generate_between_steps,
    train_as_clients,
)

SINGLE_MODEL = {"NeMo-RL", "MindSpeed-LLM"}
# verl gives a dummy length, ART refuses varying lengths, MindSpeed's function moves data only.
VARIABLE_ONLY = {"verl"}
FIXED_ONLY = {"ART", "MindSpeed-LLM"}


@pytest.mark.parametrize("is_variable", [False, True])
@pytest.mark.parametrize(
    ("pipeline_size", "chunks_per_rank", "overlap"),
    [(2, 1, False), (2, 2, False), (2, 2, True), (4, 2, False)],
)
@pytest.mark.parametrize(
    ("run_as_clients", "calls"),
    [
        pytest.param(train_as_clients, TRAINING, id="training"),
        pytest.param(evaluate_as_clients, FORWARD_ONLY, id="forward_only"),
    ],
)
def test_results_equal_those_of_one_rank(
    fork_pool, run_as_clients, calls, pipeline_size, chunks_per_rank, overlap, is_variable
):
    left_out = (FIXED_ONLY if is_variable else VARIABLE_ONLY) | (
        SINGLE_MODEL if chunks_per_rank > 1 else set()
    )
    outcome = fork_pool.run(
        run_as_clients,
        world_size=pipeline_size,
        arguments={
            "clients": tuple(client for client in calls if client not in left_out),
            "pipeline_size": pipeline_size,
            "chunks_per_rank": chunks_per_rank,
            "is_variable": is_variable,
            "overlap": overlap,
        },
    )
    assert outcome.values() == [[]] * pipeline_size


@pytest.mark.parametrize("pipeline_size", [2, 4])
def test_inference_messages_between_training_steps_arrive(fork_pool, pipeline_size):
    outcome = fork_pool.run(
        generate_between_steps,
        world_size=pipeline_size,
        arguments={"pipeline_size": pipeline_size},
    )
    assert outcome.values() == [[]] * pipeline_size
