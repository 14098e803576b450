"""The change in checkouts made of published releases: what it edits, and that its tests pass."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.harness.worker_pool import WorkerPool
from tests.unit_tests.pipeline_parallel.schedule_cases import Step, run_steps
from tests.unit_tests.upstream_pr.miniature import (
    BLACK_SETTINGS,
    CORE,
    P2P,
    PARALLEL_STATE,
    UNIT_TEST,
    Repository,
    environment,
)
from tools.base_release import supported_bases, unpacked_base

BASE = "0.19.2"
CONFIGURATION = f"{CORE}/model_parallel_config.py"
EDITED = {"_batched_p2p_ops", "_p2p_ops", "_communicate_shapes", "_communicate"}


def with_what_newer_versions_have(read):
    """Adds an option that skips the shape exchange, and decorators where a release has none."""
    communication, changes = re.subn(
        r"config\.variable_seq_lengths or",
        "(config.variable_seq_lengths and not config.pipeline_p2p_fixed_shape) or",
        read(P2P),
    )
    assert changes == 1
    communication, changes = re.subn(
        r"^( *)def (_communicate|_communicate_shapes|_p2p_ops)\(",
        r"\1@nvtx_decorator()\n\1def \2(",
        communication,
        flags=re.MULTILINE,
    )
    assert changes == 3
    option = "    variable_seq_lengths: bool = False\n"
    assert option in read(CONFIGURATION)
    return {
        P2P: communication,
        CONFIGURATION: read(CONFIGURATION).replace(
            option, f"{option}    pipeline_p2p_fixed_shape: bool = False\n"
        ),
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The default base, with what newer versions have, and the change."""
    folder = tmp_path_factory.mktemp("checkouts") / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(unpacked_base(BASE) / CORE, folder / CORE, ignore=ignored)
    # The metadata by which the ranks of a worker pool know what they import.
    (metadata,) = unpacked_base(BASE).glob("*.dist-info")
    shutil.copytree(metadata, folder / metadata.name)
    repository = Repository(folder, {"pyproject.toml": BLACK_SETTINGS})
    repository.commit(with_what_newer_versions_have(repository.read))
    finished = repository.run_tool()
    assert finished.returncode == 0, finished.stderr
    return repository


@pytest.fixture(scope="module")
def pool(checkout):
    """Ranks that import the checkout, under the CUDA emulation that schedules need."""
    with WorkerPool(
        expected_version=BASE, package_folder=checkout.folder, emulate_cuda=True
    ) as ranks:
        yield ranks


def definitions(source):
    """Returns the functions and methods of a module by name."""
    tree = ast.parse(source)
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return {
        node.name: node for body in bodies for node in body if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("version", supported_bases())
def test_release_is_edited_where_the_protocol_is_and_nowhere_else(version, tmp_path):
    base = unpacked_base(version)
    texts = {path: (base / path).read_text() for path in (P2P, PARALLEL_STATE)}
    repository = Repository(tmp_path / "checkout", {"pyproject.toml": BLACK_SETTINGS, **texts})
    finished = repository.run_tool()
    assert finished.returncode == 0, finished.stderr
    before, after = definitions(texts[P2P]), definitions(repository.read(P2P))
    changed = {name for name in before if ast.unparse(before[name]) != ast.unparse(after[name])}
    assert changed == EDITED
    for line in repository.git("diff", "main", "--", PARALLEL_STATE).splitlines():
        assert line.startswith("---") or not line.startswith("-")


def test_formatting_touches_no_line_outside_the_edits(checkout):
    before = checkout.git("show", f"main:{P2P}").splitlines()
    removed = [
        line
        for line in checkout.git("diff", "--unified=0", "main", "--", P2P).splitlines()
        if line.startswith("-") and not line.startswith("---")
    ]
    tree = ast.parse("\n".join(before))
    edited_lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in EDITED:
            edited_lines.update(before[node.body[0].lineno - 1 : node.end_lineno])
    assert removed
    assert {line[1:] for line in removed} <= edited_lines


def run_unit_tests(folder, num_ranks, *options):
    """Runs the unit tests of the change as upstream does, and returns what the ranks print."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("--local-addr", "127.0.0.1", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"),
            *(UNIT_TEST, *options),
        ],
        cwd=folder,
        env=environment()
        | {
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": "1",
            "NO_VCS_VERSION": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_unit_tests_of_the_change_pass_on_real_ranks(checkout):
    finished = run_unit_tests(checkout.folder, 4, "-k", "PP2 or PP4 or named")
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert finished.stdout.count(" passed") == 4
    assert "skipped" not in finished.stdout


@pytest.mark.parametrize("chunks_per_rank", [1, 2])
@pytest.mark.parametrize("pipeline_size", [2, 3, 4])
def test_schedules_compute_what_one_rank_computes(pool, pipeline_size, chunks_per_rank):
    """The base stalls, or gets messages crossed, in those with two chunks."""
    steps = tuple(
        Step(num_microbatches, is_variable)
        for num_microbatches in (pipeline_size, 2 * pipeline_size)
        for is_variable in (False, True)
    )
    outcome = pool.run(
        run_steps,
        world_size=pipeline_size,
        arguments={
            "pipeline_size": pipeline_size,
            "chunks_per_rank": chunks_per_rank,
            "transport": "batched",
            "steps": steps,
        },
    )
    assert outcome.values() == [[]] * pipeline_size


def test_unit_tests_of_the_change_see_crossed_messages(checkout, tmp_path):
    """The negative control: one group for all links, and receives in another order than sends."""
    broken = tmp_path / "broken"
    shutil.copytree(checkout.folder, broken)
    source = checkout.read(P2P)
    for old, new in (
        ("group=group_of_channel[groups.channel(role)]", "group=groups.pp_group"),
        ("for role in order:", "for role in (SEND_NEXT, SEND_PREV, RECV_NEXT, RECV_PREV):"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    (broken / P2P).write_text(source)
    finished = run_unit_tests(broken, 2, "-x", "-k", "test_all_roles_at_once and PP2")
    assert finished.returncode != 0
    assert "Mismatched elements" in finished.stdout
