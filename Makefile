# Every target does its own set-up in .venv. PYTHON may name another interpreter (3.11 or newer);
# run `make clean` before you change it.
PYTHON ?= python3
# The accelerator that `make test-gpu` runs on, as JAX calls it (cuda or tpu).
PLATFORM ?= cuda
# Processes that run tests: more than cores, as many tests wait for programs that they start. Each
# takes up to 5 GB of memory.
WORKERS ?= 3
VENV := .venv
RUN := $(VENV)/bin/python

NUMBERS := 'forty-two' 'Seventeen thousand, six hundred and eight.' \
	'nine hundred and ninety-nine thousand and one'

# What `make quick` runs: no training runs, no engine, no other toolkit.
QUICK := tests/test_layout.py tests/settings/test_config.py tests/test_cli.py tests/test_docs.py \
	tests/test_launch.py tests/tokenization/test_tokenizer.py tests/test_evaluation.py tests/data tests/parsing \
	tests/model/test_attention.py tests/decoding/test_beam_search.py tests/translation/test_input_file.py

# The tests of the branches (serving, export, parsing, report) and of what uses them.
BRANCHES := tests/export tests/parsing tests/serving tests/test_benchmarks.py tests/test_figures.py \
	tests/test_report.py tests/test_sentence_attention.py tests/test_wheel.py

# Python compiles modules when they are first imported; few of those installed are. Container images
# often set this variable, which makes each program compile all its modules again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(RUN) -m pip install -qq --disable-pip-version-check --no-compile

PYTEST = $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --slowest 12

# What `make test` leaves out: the other values of large grids, and tests that take long.
SHORT := -m 'not exhaustive'

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all test-gpu lint types unit all trunk branches docs check-docs format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## train on number names for a few minutes, then translate three
	$(RUN) examples/number_names.py --folder data/numbers
	$(RUN) train.py --config configs/demo.py --workdir runs/demo
	@printf '\nThree lines to translate:\n' && printf '  %s\n' $(NUMBERS)
	@printf '%s\n' $(NUMBERS) | $(RUN) decode.py --workdir runs/demo

quick: lint types  ## lint, types and the fast tests: about 90 s on 2 cores
	$(PYTEST) $(SHORT) $(QUICK)

# Two at a time: types are checked while what the tests compare with is installed.
test:  ## lint, types and a test of every property: what CI runs
	@$(MAKE) --no-print-directory --jobs=2 lint types unit

test-all:  ## lint, types and every test: nightly and before a release
	@$(MAKE) --no-print-directory --jobs=2 lint types all

test-gpu: $(VENV)/.installed-compare $(VENV)/.installed-$(PLATFORM)  ## every test, on a GPU (PLATFORM=tpu: on a TPU)
	TEST_PLATFORM=$(PLATFORM) $(RUN) -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.installed  ## ruff: style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed  ## mypy
	$(VENV)/bin/mypy

unit: $(VENV)/.installed-compare $(VENV)/.installed-npm  ## a test of every property; also installs PyTorch and CTranslate2 to compare with
	$(PYTEST) $(SHORT)

all: $(VENV)/.installed-compare $(VENV)/.installed-npm  ## every test
	$(PYTEST)

trunk: $(VENV)/.installed-compare  ## the tests of the package without its branches, as in `make unit`
	$(PYTEST) $(SHORT) $(BRANCHES:%=--ignore=%)

branches: $(VENV)/.installed-compare $(VENV)/.installed-npm  ## the other tests, as in `make unit`
	$(PYTEST) $(SHORT) $(BRANCHES)

docs: $(VENV)/.installed-docs  ## the documentation site, in build/site
	$(RUN) -m sphinx -q -W --keep-going -c docs . build/site
	$(RUN) docs/check_site.py build/site
	@echo 'Open build/site/index.html'

check-docs:  ## run the commands of README.md and the tutorials in a fresh clone
	$(PYTHON) docs/check_commands.py

format: $(VENV)/.installed  ## rewrite the code in the project's style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove .venv, caches and build output; runs/ and data/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build *.egg-info

$(VENV)/.created:
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip  # Python 3.11 brings one that takes more than twice as long
	@touch $@

$(VENV)/.installed: requirements.txt pyproject.toml $(VENV)/.created
	$(PIP) --no-warn-conflicts -r requirements.txt
	@touch $@

# The two largest packages, while another pip installs the first requirements. What they need comes
# with the others, as does the message if they cannot be installed.
$(VENV)/.installed-large: requirements-compare.txt $(VENV)/.created
	$(PIP) -q --no-warn-conflicts --no-deps $$(sed -En 's/^((torch|transformers)[=>][^ #]*).*/\1/p' $<) || true
	@touch $@

$(VENV)/.installed-compare: $(VENV)/.installed-large
$(VENV)/.installed-compare $(VENV)/.installed-docs: $(VENV)/.installed-%: requirements-%.txt $(VENV)/.installed
	$(PIP) -r requirements-$*.txt
	@touch $@

# Two clients of the service, in $(VENV)/node_modules. Their test is skipped where npm cannot install
# them.
$(VENV)/.installed-npm: tests/serving/package.json $(VENV)/.installed
	cp $< $(VENV)
	npm install --prefix $(VENV) --no-package-lock --ignore-scripts --no-audit --no-fund \
		--loglevel error && touch $@ || echo 'No npm clients: their test will be skipped.'

$(VENV)/.installed-cuda $(VENV)/.installed-tpu: $(VENV)/.installed-%: $(VENV)/.installed
	$(PIP) -e '.[$*]'
	@touch $@
