# make demo: train on real text here. make test: the whole CPU suite. Both set everything up first.

PYTHON ?= $(shell tools/find_python.sh)
VENV := .venv
RUN := $(VENV)/bin/python
UV := $(VENV)/bin/uv
CLIENTS := $(addprefix build/clients/,current oldest others)
PACKAGE_FILES := $(shell find megatron build_backend base -type f -not -name '*.pyc') pyproject.toml LICENSE NOTICE

export GLOO_SOCKET_IFNAME ?= lo
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: install develop demo test test-clients proof lint bench clean

install: $(VENV)/installed-fork

$(VENV)/bin/python:
	@test -n "$(PYTHON)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-requirements: tests/requirements.txt | $(VENV)/bin/python
	$(RUN) -m pip install --quiet --requirement tests/requirements.txt
	touch $@

$(VENV)/installed-fork: $(PACKAGE_FILES) | $(VENV)/installed-requirements
	$(RUN) -m pip install --quiet --force-reinstall --no-deps .
	touch $@

# Edits of the fork's files are live; of grafts and new files only after another `make develop`.
develop: $(VENV)/installed-requirements
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(VENV)/installed-fork

demo: install
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" examples/demo/train.sh build/demo

test: install
	$(RUN) -m pytest

# The real clients on the fork: ms-swift's newest release, its oldest that supports base 0.17.1, and
# others. By uv, which links packages from its cache: another PyTorch takes seconds and no space.
test-clients: $(CLIENTS:%=%/installed-fork)
	build/clients/current/bin/python -m pytest tests/client_tests/pinning tests/client_tests/megatron_sft
	build/clients/oldest/bin/python -m pytest tests/client_tests/megatron_sft -m every_pair
	build/clients/others/bin/python -m pytest tests/client_tests/other_clients

$(CLIENTS:%=%/installed-requirements): build/clients/%/installed-requirements: tests/client_tests/requirements/%.txt | $(VENV)/installed-requirements
	$(UV) venv --quiet --clear --python $(RUN) $(@D)
	$(UV) pip sync --quiet --python $(@D) $<
	touch $@

build/clients/current/installed-fork build/clients/others/installed-fork: FORK := .
build/clients/oldest/installed-fork: FORK := ./base/0.17.1
$(CLIENTS:%=%/installed-fork): %/installed-fork: %/installed-requirements $(PACKAGE_FILES)
	$(UV) pip install --quiet --python $(@D) --reinstall --no-deps $(FORK)
	touch $@

# The deadlock checker on every configuration, large pipelines included; make test takes a part.
proof: install
	PROOF_MATRIX=full $(RUN) -m pytest tests/unit_tests/deadlock_check/test_proof_matrix.py

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy megatron build_backend tools pretrain_gpt.py examples/demo

bench: install
	$(RUN) -m tests.benchmarks.pipeline_step
	$(RUN) -m tests.benchmarks.checker_scale
	$(RUN) -m tests.benchmarks.start_up

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
