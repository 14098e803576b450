"""When the emulation is on, where it refuses, and how child processes get it."""

import os
import sys

import pytest

from tests.unit_tests.cpu_emulation.conftest import REPOSITORY
from tools.cpu_emulation import ENABLE_VARIABLE, STARTUP_DIRECTORY, environment

SAY_WHETHER_CUDA_IS_AVAILABLE = "import torch; print(torch.cuda.is_available())"
START_A_CHILD_THAT_SAYS = (
    "import subprocess, sys; "
    f"subprocess.run([sys.executable, '-c', {SAY_WHETHER_CUDA_IS_AVAILABLE!r}], check=True)"
)
WITH_A_VISIBLE_GPU = "import sys, torch; torch.cuda.is_available = lambda: True; "


def test_importing_the_package_changes_nothing(run_python):
    result = run_python("-c", f"import tools.cpu_emulation; {SAY_WHETHER_CUDA_IS_AVAILABLE}")

    assert result.stdout.strip() == "False"


def test_the_variable_alone_changes_nothing(run_python):
    result = run_python(
        "-c",
        SAY_WHETHER_CUDA_IS_AVAILABLE,
        environment={**os.environ, ENABLE_VARIABLE: "1"},
    )

    assert result.stdout.strip() == "False"


def test_the_search_path_alone_changes_nothing(run_python):
    result = run_python(
        "-c",
        SAY_WHETHER_CUDA_IS_AVAILABLE,
        environment={**os.environ, "PYTHONPATH": str(STARTUP_DIRECTORY)},
    )

    assert result.stdout.strip() == "False"


def test_enable_switches_it_on_in_the_process_and_can_be_repeated(run_python):
    result = run_python(
        "-c",
        "from tools.cpu_emulation import enable; enable(); enable(); "
        + SAY_WHETHER_CUDA_IS_AVAILABLE,
    )

    assert result.stdout.strip() == "True", result.stderr


def test_a_command_and_its_children_run_under_it_in_any_folder(run_python, tmp_path):
    result = run_python(
        "-m",
        "tools.cpu_emulation",
        "python",
        "-c",
        f"import os; os.chdir({str(tmp_path)!r}); {START_A_CHILD_THAT_SAYS}",
    )

    assert result.stdout.strip() == "True", result.stderr


def test_processes_without_torch_do_not_load_it(run_python, tmp_path):
    result = run_python(
        "-c",
        "import sys; print('torch' in sys.modules)",
        folder=tmp_path,
        environment=environment(),
    )

    assert result.stdout.strip() == "False", result.stderr


def test_a_hidden_sitecustomize_still_runs(run_python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hidden one')")
    result = run_python(
        "-c",
        SAY_WHETHER_CUDA_IS_AVAILABLE,
        folder=tmp_path,
        environment=environment({**os.environ, "PYTHONPATH": str(tmp_path)}),
    )

    assert result.stdout.split("\n")[:2] == ["hidden one", "True"], result.stderr


def test_environment_extends_what_it_is_given_and_changes_nothing_else():
    given = {"PATH": "/somewhere", "GLOO_SOCKET_IFNAME": "net0", "OTHER": "kept"}
    extended = environment(given)

    assert given == {"PATH": "/somewhere", "GLOO_SOCKET_IFNAME": "net0", "OTHER": "kept"}
    assert extended["OTHER"] == "kept"
    assert extended["GLOO_SOCKET_IFNAME"] == "net0"
    assert extended["PATH"].endswith(os.pathsep + "/somewhere")
    assert extended["PYTHONPATH"] == str(STARTUP_DIRECTORY)


def test_enable_refuses_a_visible_gpu(run_python):
    result = run_python(
        "-c", f"{WITH_A_VISIBLE_GPU}from tools.cpu_emulation import enable; enable()"
    )

    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "RuntimeError: the CPU emulation does not start"
    )
    assert "CUDA_VISIBLE_DEVICES=''" in result.stderr


def test_a_command_is_refused_in_one_line_where_a_gpu_is_visible(run_python):
    result = run_python(
        "-c",
        f"{WITH_A_VISIBLE_GPU}from tools.cpu_emulation.__main__ import main; "
        "sys.exit(main(['python', '-c', 'print(1)']))",
    )

    assert result.returncode == 1
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if "CPU emulation" in line]
    assert line.startswith("error: ")


def test_enable_refuses_to_come_after_megatron(run_python):
    result = run_python(
        "-c",
        "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core'); "
        "from tools.cpu_emulation import enable; enable()",
    )

    assert result.returncode == 1
    assert "before megatron.core is imported" in result.stderr


def test_a_command_that_does_not_exist_is_named(run_python):
    result = run_python("-m", "tools.cpu_emulation", "no-such-command")

    assert result.returncode == 1
    assert "error: cannot run 'no-such-command'" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_usage(run_python, arguments):
    result = run_python("-m", "tools.cpu_emulation", *arguments)

    assert result.returncode == 0
    assert result.stdout.startswith(
        "usage: python -m tools.cpu_emulation [--transformer-engine] COMMAND"
    )


def test_the_documentation_lists_what_is_replaced(run_python):
    listed = run_python("-m", "tools.cpu_emulation", "--list").stdout.strip()
    page = (REPOSITORY / "docs" / "cpu_emulation.md").read_text()

    assert len(listed.splitlines()) > 30
    assert listed in page
    assert sys.executable not in page
