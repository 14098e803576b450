"""What CUDA calls do under the emulation."""

import pytest

from tests.unit_tests.cpu_emulation import emulated_cases as cases


@pytest.fixture
def on_rank(emulated_pool):
    """A function that runs a case on one rank and returns its value."""

    def run(case, **arguments):
        return emulated_pool.run(case, world_size=1, arguments=arguments).values()[0]

    return run


def test_tensors_asked_for_on_cuda_are_on_the_cpu(on_rank):
    assert on_rank(cases.devices_of_created_tensors) == {"cpu"}


def test_tensor_types_are_those_of_cuda(on_rank):
    dtype, name, is_half = on_rank(cases.types_of_tensors)

    assert str(dtype) == "torch.float16"
    assert name == "torch.cuda.HalfTensor"
    assert is_half


def test_computations_on_streams_have_gradients(on_rank):
    assert on_rank(cases.gradient_of_a_cuda_computation) == [2.0, 4.0]


def test_events_measure_host_time(on_rank):
    assert on_rank(cases.elapsed_time_between_events) > 0.0


def test_random_state_can_be_saved_and_restored(on_rank):
    assert on_rank(cases.numbers_drawn_again_from_a_saved_state)


def test_every_rank_of_the_machine_has_a_device(emulated_pool):
    values = emulated_pool.run(cases.devices_seen, world_size=3, arguments={"index": 2}).values()

    assert values == [[3, 2, (0, 0), "CPU emulation"]] * 3


def test_synchronize_can_be_wrapped_to_count_its_calls(on_rank):
    assert on_rank(cases.calls_seen_by_a_synchronize_wrapper) == 2


def test_groups_that_ask_for_nccl_are_on_gloo_and_say_so(emulated_pool):
    values = emulated_pool.run(cases.backends_of_groups, world_size=2).values()

    assert values == [["gloo", "gloo", "gloo"]] * 2


def test_all_to_all_takes_split_sizes_as_tensors(emulated_pool):
    values = emulated_pool.run(cases.rows_exchanged_by_tensor_split_sizes, world_size=2).values()

    assert values == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loaders_do_not_pin(on_rank, workers):
    assert on_rank(cases.batch_of_a_pinning_data_loader, workers=workers) == [0, 1, 2, 3]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_torch_norms_are_marked_for_sequence_parallelism(on_rank, sequence_parallel):
    markers = on_rank(cases.markers_of_norm_parameters, sequence_parallel=sequence_parallel)

    assert markers == [sequence_parallel] * 2


@pytest.mark.parametrize(
    ("reached", "named", "remedy"),
    [
        ("graph", "torch.cuda.CUDAGraph", "--cuda-graph-impl none"),
        ("profiler", "torch.cuda.cudart", "leave out --profile"),
        ("memory pool", "torch.cuda.MemPool", "leave out --use-nccl-ub"),
        ("softmax", "forward_fused_softmax", "--no-masked-softmax-fusion"),
        ("triton", "kernel_of_the_test", "--no-... form"),
        ("not replaced", "torch.cuda.ipc_collect", "--list"),
    ],
)
def test_what_works_on_a_gpu_only_is_named_with_a_remedy(on_rank, reached, named, remedy):
    message = on_rank(cases.message_of_cuda_only, name=reached)

    assert named in message
    assert remedy in message
