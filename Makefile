# make demo, test and lint install what they need into VENV first, once; make clean removes it.
#   make demo ARGS='--data FILE'      make test ARGS='-k policy'      make demo TORCH='torch==2.13.0'
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch
ARGS   ?=
BIN    := $(VENV)/bin
TYPING := build/typing/fp4compile

.PHONY: demo test test-matrix test-gpu sanitize lint clean
.NOTPARALLEL:

demo: $(VENV)/installed-plots
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

# The oldest and the newest torch that are supported, each in an environment of its own.
test-matrix:
	$(MAKE) test VENV=.venv-oldest TORCH='torch==2.11.*'
	$(MAKE) test VENV=.venv-newest TORCH='torch<2.15'

test-gpu: $(VENV)/installed-test
	$(BIN)/pytest tests/gpu $(ARGS)

sanitize: $(VENV)/installed-test
	for tool in memcheck racecheck initcheck; do PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	  compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 9 \
	  $(BIN)/python tests/gpu/sanitize.py || exit 1; done

# mypy sees packages where their names say, so it gets a tree of links that is laid out like that.
lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	rm -rf $(TYPING) && mkdir -p $(TYPING)
	cd $(TYPING) && ln -s ../../../fp4compile/* ../../../passes ../../../kernels .
	MYPYPATH=build/typing $(BIN)/mypy --ignore-missing-imports -p fp4compile

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/installed-%: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)' -e '.[$*]'
	touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	  || { echo '$(PYTHON) is missing or older than Python 3.10: set PYTHON' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo '$(PYTHON) lacks its venv module: install it (Debian: python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
