"""Loss curves of ``pretrain_gpt.py``, however the model is split and the documents are packed."""

import pytest

from tests.functional_tests.case_file import case_names, load_case


@pytest.mark.parametrize("name", case_names())
def test_loss_falls_as_in_the_reference(name, run_case):
    case = load_case(name)
    training = run_case(name)

    assert len(training.losses) == case.model_args["--train-iters"]
    assert training.losses[-1] < training.losses[0] - 0.3
    if case.same_loss_as:
        reference = run_case(case.same_loss_as)
        assert training.losses == pytest.approx(reference.losses, rel=2e-5)


def test_packed_microbatches_vary_in_length_and_are_the_same_on_every_pipeline(run_case):
    sequence_length = load_case("gpt/pp1_packed").model_args["--seq-length"]
    microbatches = run_case("gpt/pp1_packed").microbatch_lengths

    assert all(0 < length <= sequence_length for step in microbatches for length in step)
    assert all(len(set(step)) > 1 for step in microbatches)
    assert run_case("gpt/pp4_vpp2_packed").microbatch_lengths == microbatches


def test_packing_needs_fewer_microbatches_for_the_same_documents(run_case):
    packed = run_case("gpt/pp1_packed_4_documents").microbatch_lengths
    unpacked = run_case("gpt/pp2_unpacked").microbatch_lengths

    assert [sum(step) for step in packed] == [sum(step) for step in unpacked]
    assert [4 * len(step) for step in packed] == [len(step) for step in unpacked]
