"""The base's real schedules over the fork's communication compute what one rank computes."""

import pytest

from tests.unit_tests.pipeline_parallel.schedule_cases import TRANSPORTS, Step, run_steps

NOT_OVERLAPPED = ("batched", "unbatched")


def _steps(pipeline_size: int, chunks_per_rank: int) -> tuple[Step, ...]:
    steps = [
        Step(num_microbatches, is_variable, is_forward_only)
        for num_microbatches in (pipeline_size, 2 * pipeline_size)
        for is_variable in (False, True)
        for is_forward_only in (False, True)
    ]
    for is_variable in (False, True):
        if chunks_per_rank == 1:
            # Less than a full pipeline, and a remainder; interleaved schedules allow neither.
            steps += [Step(1, is_variable), Step(pipeline_size + 1, is_variable)]
        else:
            # Chunks that take more microbatches in a row than there are stages buffer receives.
            group_size = pipeline_size + 1
            steps.append(Step(2 * group_size, is_variable, group_size=group_size))
        steps += [
            Step(pipeline_size, is_variable, is_forward_only, frees_outputs=False)
            for is_forward_only in (False, True)
        ]
    return tuple(steps)


@pytest.mark.parametrize(
    ("chunks_per_rank", "transport"),
    [
        (chunks_per_rank, transport)
        for chunks_per_rank in (1, 2, 3)
        # The schedule without interleaving refuses overlapped communication.
        for transport in (TRANSPORTS if chunks_per_rank > 1 else NOT_OVERLAPPED)
    ],
)
@pytest.mark.parametrize("pipeline_size", [2, 3, 4, 5])
def test_losses_and_gradients_equal_those_of_one_rank(
    fork_pool, pipeline_size, chunks_per_rank, transport
):
    outcome = fork_pool.run(
        run_steps,
        world_size=pipeline_size,
        arguments={
            "pipeline_size": pipeline_size,
            "chunks_per_rank": chunks_per_rank,
            "transport": transport,
            "steps": _steps(pipeline_size, chunks_per_rank),
        },
    )
    assert outcome.values() == [[]] * pipeline_size
