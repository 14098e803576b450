"""One rank of two: a training step with the real schedule, its result compared with autograd's."""

from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps

differences = run_steps(2, 1, "batched", (Step(num_microbatches=3, is_variable=True),))
assert not differences, differences
