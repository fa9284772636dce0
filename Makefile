# `make demo` and `make test` do all their own set-up. PYTHON may name another interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

LINES := 'forty-two' 'seventeen thousand, six hundred and eight' 'nine hundred and ninety-nine thousand and one'

.PHONY: demo test lint types unit format clean

demo: $(VENV)/.installed  ## train on number names for a few minutes, then translate
	$(RUN) train.py --config configs/demo.py --workdir runs/demo
	@printf '\nThree lines to translate:\n' && printf '  %s\n' $(LINES)
	@printf '%s\n' $(LINES) | $(RUN) decode.py --workdir runs/demo

test: lint types unit  ## what CI runs

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

unit: $(VENV)/.installed-compare
	$(RUN) -m pytest -n 2 --dist loadfile

format: $(VENV)/.installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/.installed: requirements.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-compare: requirements-compare.txt $(VENV)/.installed
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-compare.txt
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build *.egg-info
