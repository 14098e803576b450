"""Every call of ``P2PCommunicator`` delivers to each role what was sent to it.

Nothing is emulated here: the fork's communication works on plain gloo and CPU tensors. The same
tests run over NCCL where there is a GPU.
"""

import pytest

from tests.unit_tests.pipeline_parallel import exchange_cases

lengths = pytest.mark.parametrize(
    "is_variable", [False, True], ids=["fixed lengths", "variable lengths"]
)
transports = pytest.mark.parametrize("transport", exchange_cases.TRANSPORTS)


def _assert_no_problems(ranks, function, world_size, **arguments):
    if ranks.backend == "nccl" and arguments.get("transport") == "ring_exchange":
        pytest.skip(
            "ring_exchange is a stand-in over gloo; only NVIDIA's own torch has the real one"
        )
    outcome = ranks.run(function, world_size=world_size, arguments=arguments)
    assert outcome.values() == [[]] * world_size


@lengths
@transports
@pytest.mark.parametrize("pipeline_size", [2, 3, 4, 5, 8])
def test_every_role_gets_its_message(plain_ranks, pipeline_size, transport, is_variable):
    _assert_no_problems(
        plain_ranks,
        exchange_cases.run_exchanges,
        world_size=pipeline_size,
        pipeline_size=pipeline_size,
        transport=transport,
        is_variable=is_variable,
    )


@lengths
@pytest.mark.parametrize("transport", ["batched", "unbatched", "overlapped"])
@pytest.mark.parametrize("pipeline_size", [2, 3])
def test_several_pipelines_keep_apart(plain_ranks, pipeline_size, transport, is_variable):
    _assert_no_problems(
        plain_ranks,
        exchange_cases.run_exchanges,
        world_size=2 * pipeline_size,
        pipeline_size=pipeline_size,
        transport=transport,
        is_variable=is_variable,
        tensor_ranks=(3,),
    )


@lengths
@pytest.mark.parametrize("transport", ["batched", "unbatched"])
@pytest.mark.parametrize("pipeline_size", [2, 3])
def test_lists_of_tensors_arrive_in_order(plain_ranks, pipeline_size, transport, is_variable):
    _assert_no_problems(
        plain_ranks,
        exchange_cases.run_list_exchanges,
        world_size=pipeline_size,
        pipeline_size=pipeline_size,
        transport=transport,
        is_variable=is_variable,
    )


@transports
@pytest.mark.parametrize("pipeline_size", [2, 3])
def test_mtp_standalone_exchanges_shapes(plain_ranks, pipeline_size, transport):
    _assert_no_problems(
        plain_ranks,
        exchange_cases.run_mtp_standalone,
        world_size=pipeline_size,
        pipeline_size=pipeline_size,
        transport=transport,
    )


@pytest.mark.parametrize("field", ["pipeline_dtype", "tensor_shape"])
def test_receiving_without_dtype_or_shape_is_refused(plain_ranks, field):
    outcome = plain_ranks.run(
        exchange_cases.receive_without, world_size=2, arguments={"field": field}
    )
    for raised in outcome.values():
        for call, error in raised.items():
            assert error.startswith("RuntimeError: "), call
            assert field in error, call
