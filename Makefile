PYTHON ?= python3

.PHONY: setup quickstart test kills lint format

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed

quickstart: setup
	.venv/bin/cfkv quickstart runs/quickstart

test: setup
	.venv/bin/pytest -n 2

kills: setup
	.venv/bin/pytest -n 2 -m kills -rP tests/cli/test_killed.py

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
