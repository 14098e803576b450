"""The fork over each base release runs that release's own schedules."""

import zipfile

from build_backend.release import fork_version
from tests.harness.worker_pool import WorkerPool
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps


def test_interleaved_schedule_with_variable_lengths(base, fork_wheel, tmp_path):
    """On every unmodified base this step stalls (live_configurations has the default one)."""
    with zipfile.ZipFile(fork_wheel(base)) as archive:
        archive.extractall(tmp_path)
    with WorkerPool(
        expected_version=fork_version(base), package_folder=tmp_path, emulate_cuda=True
    ) as pool:
        for transport in ("batched", "overlapped"):
            outcome = pool.run(
                run_steps,
                world_size=4,
                arguments={
                    "pipeline_size": 4,
                    "chunks_per_rank": 2,
                    "transport": transport,
                    "steps": (Step(4, is_variable=True), Step(8, is_variable=False)),
                },
            )
            assert outcome.values() == [[]] * 4
