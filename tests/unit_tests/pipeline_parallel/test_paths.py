"""Which way messages take: batches, even/odd groups, a caller's own groups, wrappers."""

import pytest

from tests.unit_tests.pipeline_parallel import path_cases


@pytest.mark.parametrize("pipeline_size", [2, 3, 4])
def test_coalescing_backend_gets_one_batch_per_call_on_the_pipeline_group(
    plain_fork_pool, pipeline_size
):
    for result in plain_fork_pool.run(
        path_cases.exchange_on_a_coalescing_backend,
        world_size=pipeline_size,
        arguments={"pipeline_size": pipeline_size, "is_variable": False},
    ).values():
        assert result["problems"] == []
        assert result["after"]["one by one"] == []
        assert result["after"]["batches"]
        groups = {group for batch in result["after"]["batches"] for _, _, group in batch}
        assert groups == {"PIPELINE_MODEL_PARALLEL_GROUP"}
        # The first batch on a group makes its communicator, with every rank of it.
        (start_up_batch,) = result["start-up"]["batches"]
        used = {operation for batch in result["after"]["batches"] for operation in batch}
        assert used == set(start_up_batch)


@pytest.mark.parametrize(("is_variable", "virtual_size"), [(True, None), (False, 2)])
def test_variable_lengths_and_interleaved_schedules_are_never_batched(
    plain_fork_pool, is_variable, virtual_size
):
    for result in plain_fork_pool.run(
        path_cases.exchange_on_a_coalescing_backend,
        world_size=3,
        arguments={
            "pipeline_size": 3,
            "is_variable": is_variable,
            "virtual_size": virtual_size,
        },
    ).values():
        assert result["problems"] == []
        assert result["after"]["batches"] == []
        posted = set(result["after"]["one by one"])
        warmed = set(result["start-up"]["one by one"])
        assert posted == {
            operation for operation in warmed if is_variable or "SHAPES" not in operation[2]
        }


@pytest.mark.parametrize("pipeline_size", [2, 4])
def test_wrapper_that_passes_no_group_reaches_the_even_odd_groups(plain_fork_pool, pipeline_size):
    for result in plain_fork_pool.run(
        path_cases.exchange_through_a_wrapper_without_group,
        world_size=4,
        arguments={"pipeline_size": pipeline_size},
    ).values():
        assert result["problems"] == []
        assert result["groups"] == {
            f"PIPELINE_{direction}_{colour}_DATA_GROUP"
            for direction in ("FORWARD", "BACKWARD")
            for colour in ("EVEN", "ODD")
        }


def test_wrapper_that_passes_no_group_reaches_the_default_group_on_the_base(base_pool):
    for result in base_pool.run(
        path_cases.exchange_through_a_wrapper_without_group,
        world_size=4,
        arguments={"pipeline_size": 4},
    ).values():
        assert result["groups"] == {"default_pg"}


@pytest.mark.parametrize("is_dedicated", [False, True])
@pytest.mark.parametrize("transport", ["batched", "unbatched", "overlapped"])
@pytest.mark.parametrize("is_variable", [False, True])
@pytest.mark.parametrize("pipelines", [[[0, 1]], [[0, 2], [1, 3]], [[2, 0, 1]], [[0, 1, 2, 3]]])
def test_callers_own_pipeline_group_works(
    plain_fork_pool, pipelines, is_variable, transport, is_dedicated
):
    for result in plain_fork_pool.run(
        path_cases.exchange_on_own_group,
        world_size=sum(map(len, pipelines)),
        arguments={
            "pipelines": pipelines,
            "transport": transport,
            "is_variable": is_variable,
            "backend": "cpu:gloo" if len(pipelines) == 1 else "gloo",
            "is_dedicated": is_dedicated,
        },
    ).values():
        assert result["problems"] == []
        uses_own = bool(result["groups"] & {"own", "default_pg"})
        assert uses_own != is_dedicated


def test_missing_batch_is_reported_once_by_the_first_stage(plain_fork_pool):
    first, *others = plain_fork_pool.run(
        path_cases.warnings_of_unbatched_exchanges,
        world_size=3,
        arguments={"pipeline_size": 3},
    ).values()
    assert len(first) == 1
    assert "'gloo' does not coalesce" in first[0]
    assert "pipeline [0, 1, 2]" in first[0]
    assert others == [[], []]


def test_missing_batch_is_laid_to_the_debug_level_where_that_is_the_cause(plain_fork_pool):
    (message,), _ = plain_fork_pool.run(
        path_cases.warnings_of_unbatched_exchanges,
        world_size=2,
        arguments={"pipeline_size": 2},
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ).values()
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL on torch 2." in message


@pytest.mark.parametrize("transport", ["batched", "unbatched"])
@pytest.mark.parametrize("is_variable", [False, True])
def test_no_step_waits_for_the_whole_device(fork_pool, transport, is_variable):
    counts = fork_pool.run(
        path_cases.count_device_synchronisations,
        world_size=4,
        arguments={"transport": transport, "is_variable": is_variable},
    ).values()
    assert counts == [0] * 4


def test_base_waits_for_the_whole_device(base_pool):
    counts = base_pool.run(
        path_cases.count_device_synchronisations,
        world_size=4,
        arguments={"transport": "batched", "is_variable": True},
    ).values()
    assert min(counts) > 0


def test_sends_are_let_go_once_they_have_arrived(fork_pool):
    after_one, after_five = (
        fork_pool.run(
            path_cases.sends_kept_after, world_size=2, arguments={"num_steps": steps}
        ).values()
        for steps in (1, 5)
    )
    assert after_five == after_one


def test_too_many_dimensions_are_refused_with_the_remedy(plain_fork_pool):
    for error in plain_fork_pool.run(path_cases.send_too_many_dimensions, world_size=2).values():
        assert "9 dimensions" in error
        assert "flatten" in error
