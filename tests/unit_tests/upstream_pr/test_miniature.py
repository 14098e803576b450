"""What the tool does to a checkout, what it keeps, and what it refuses without a trace."""

import ast

import pytest

from tests.unit_tests.upstream_pr.miniature import (
    BLACK_SETTINGS,
    FILES,
    P2P,
    PARALLEL_STATE,
    UNIT_TEST,
    Repository,
    run_tool,
)
from tools.upstreaming.command_line import DEFAULT_BRANCH, pull_request_text


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path / "checkout", FILES)


def functions_of(source):
    return {
        node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
    }


def test_change_is_one_commit_on_a_new_branch(repository):
    base = repository.git("rev-parse", "main")
    finished = repository.run_tool()
    assert finished.returncode == 0, finished.stderr
    assert repository.git("branch", "--show-current") == DEFAULT_BRANCH
    assert repository.git("rev-parse", "HEAD^", "main").split() == [base, base]
    assert repository.git("status", "--porcelain", "--ignored") == ""
    assert set(repository.git("diff", "--name-only", "main").splitlines()) == {
        P2P,
        PARALLEL_STATE,
        UNIT_TEST,
        P2P.replace("p2p_communication", "even_odd_groups"),
    }
    for line in repository.git("diff", "--numstat", "main").splitlines():
        added, removed, path = line.split("\t")
        (row,) = (row for row in finished.stdout.splitlines() if row.strip().startswith(path))
        assert row.split()[1:3] == [f"+{added}", f"-{removed}"]
    assert finished.stdout.endswith(pull_request_text())


def test_decorators_signatures_and_conditions_of_the_checkout_stay(repository):
    repository.run_tool()
    before, after = functions_of(FILES[P2P]), functions_of(repository.read(P2P))
    for name, function in before.items():
        assert ast.unparse(after[name].args) == ast.unparse(function.args)
        assert [ast.unparse(node) for node in after[name].decorator_list] == [
            ast.unparse(node) for node in function.decorator_list
        ]
    exchange = ast.unparse(after["_communicate"])
    assert "exchanges_shapes = config.variable_seq_lengths and (not config.fixed_shape)" in exchange
    assert "if is_batch and config.batch_p2p_sync:" in exchange
    assert exchange.count("batch_p2p_comm") == 1
    assert "UNTOUCHED = {'quotes': 'stay'}" in repository.read(P2P)
    assert "A comment about the old body" not in repository.read(P2P)


def test_shape_exchange_in_the_else_branch_is_found(repository):
    old = FILES[P2P]
    test = "config.variable_seq_lengths and not config.fixed_shape"
    exchange = "self._communicate_shapes(None, None, False, False)"
    turned = (
        old.replace(test, f"not ({test})")
        .replace(exchange, "HERE")
        .replace("shapes = tensor_shape", f"shapes = {exchange}")
        .replace("HERE", "tensor_shape")
    )
    repository.commit({P2P: turned})
    assert repository.run_tool().returncode == 0
    exchange = ast.unparse(functions_of(repository.read(P2P))["_communicate"])
    condition = "exchanges_shapes = not not (config.variable_seq_lengths and (not"
    assert condition in exchange
    assert "if not exchanges_shapes:" in exchange


def test_second_run_changes_nothing(repository):
    repository.run_tool()
    for branch in (DEFAULT_BRANCH, "main"):
        repository.git("switch", "--quiet", branch)
        before = repository.state()
        finished = repository.run_tool()
        assert finished.returncode == 0, finished.stderr
        assert "has the change already; nothing was changed" in finished.stdout
        assert repository.state() == before


@pytest.mark.parametrize(
    ("settings", "named", "line"),
    [
        (BLACK_SETTINGS, "settings for black (100 columns)", "        is_batch = (\n"),
        (
            BLACK_SETTINGS.replace("100", "140"),
            "settings for black (140 columns)",
            "        is_batch = config.batch_p2p_comm and not exchanges_shapes and self.",
        ),
        (
            "[tool.ruff]\nline-length = 140\n",
            "ruff with the checkout's settings",
            "        is_batch = config.batch_p2p_comm and not exchanges_shapes and self.",
        ),
        ("", "as the checkout names no formatter", "        is_batch = (\n"),
    ],
)
def test_lines_are_formatted_in_the_manner_of_the_checkout(repository, settings, named, line):
    repository.commit({"pyproject.toml": settings + "# Settings.\n"})
    finished = repository.run_tool()
    assert named in finished.stdout
    assert line in repository.read(P2P)
    assert "UNTOUCHED = {'quotes': 'stay'}" in repository.read(P2P)


def replaced(old, new, path=P2P):
    assert old in FILES[path]
    return {path: FILES[path].replace(old, new)}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        pytest.param(
            replaced("def destroy_model_parallel", "def close", PARALLEL_STATE),
            "destroy_model_parallel() in megatron/core/parallel_state.py",
            id="graft without a place",
        ),
        pytest.param(
            replaced("    print(size)", "    return print(size)", PARALLEL_STATE),
            "returns before its end",
            id="graft that would not run",
        ),
        pytest.param(
            replaced("def _p2p_ops", "def _post_each"), "defines _p2p_ops() 0 times", id="renamed"
        ),
        pytest.param(
            replaced("class P2PCommunicator", "class Link"), "class P2PCommunicator 0", id="class"
        ),
        pytest.param(
            replaced("group: dist.ProcessGroup,", "groups: list,"),
            "_batched_p2p_ops() takes",
            id="other signature",
        ),
        pytest.param(
            replaced("tensor_send_prev: Optional[torch.Tensor]", "tensor_send_prev: Payload"),
            "takes Payload as tensor_send_prev",
            id="several tensors at once",
        ),
        pytest.param(
            replaced("shapes = self._communicate_shapes(None, None, False, False)", "shapes = 1"),
            "does not call _communicate_shapes in one branch",
            id="no shape exchange",
        ),
        pytest.param(
            replaced("config = self.config\n", "config = self.config\n        is_batch = 1\n"),
            "uses the name is_batch already",
            id="name taken",
        ),
        pytest.param(
            replaced("post = _batched_p2p_ops", "post = other"),
            "does not choose _batched_p2p_ops",
            id="no choice of a batch",
        ),
        pytest.param(
            replaced("UNTOUCHED", "RECV_PREV"), "uses the name RECV_PREV", id="clash of constants"
        ),
        pytest.param({P2P: "def broken(:\n"}, "is not valid Python", id="syntax error"),
        pytest.param({UNIT_TEST: "\n"}, f"{UNIT_TEST} exists already", id="file in the way"),
        pytest.param({"pyproject.toml": "[tool"}, "not valid TOML", id="settings"),
    ],
)
def test_unknown_layout_is_refused_without_a_trace(repository, files, named):
    repository.commit(files)
    refuses(repository, named)


def test_missing_file_is_refused(repository):
    repository.git("rm", "--quiet", P2P)
    repository.git("commit", "--quiet", "--message", "Less")
    refuses(repository, f"{P2P} does not exist")


@pytest.mark.parametrize("path", [P2P, "notes.txt"])
def test_dirty_tree_is_refused(repository, path):
    repository.write({path: "x = 1\n"})
    refuses(repository, path)
    assert repository.read(path) == "x = 1\n"


def test_branch_with_other_content_is_refused(repository):
    repository.git("branch", DEFAULT_BRANCH)
    repository.git("switch", "--quiet", DEFAULT_BRANCH)
    repository.commit({"notes.txt": "x\n"})
    refuses(repository, "pass another name as --branch")
    repository.git("switch", "--quiet", "main")
    assert repository.run_tool("--branch", "another").returncode == 0


def test_branch_that_was_edited_is_refused(repository):
    repository.run_tool()
    repository.write({P2P: repository.read(P2P) + "\nMORE = 1\n"})
    repository.git("commit", "--quiet", "--all", "--amend", "--no-edit")
    refuses(repository, "differs from the change")


def test_commit_without_an_identity_is_refused(repository):
    repository.git("config", "user.useConfigOnly", "true")
    repository.git("config", "--unset", "user.email")
    refuses(repository, "git commit-tree failed")


def test_bad_branch_name_is_refused(repository):
    before = repository.state()
    finished = repository.run_tool("--branch", "no spaces")
    assert finished.returncode == 1
    assert "git branch failed" in finished.stderr
    assert repository.state() == before


def test_only_the_top_of_a_repository_is_taken(repository, tmp_path):
    (tmp_path / "plain").mkdir()
    for folder in (repository.folder / "megatron", tmp_path / "plain", tmp_path / "none"):
        finished = run_tool(folder)
        assert finished.returncode == 1
        assert finished.stderr.startswith(f"upstream_pr: --megatron-lm {folder} is not")


def refuses(repository, named):
    before = repository.state()
    finished = repository.run_tool()
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1, finished.stderr
    assert named in finished.stderr
    assert repository.state() == before
