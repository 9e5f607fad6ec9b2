# Every target makes what it needs in .venv; bootstrap returns at once when nothing has changed.
#   make demo ARGS="--budget 10"      make test ARGS="-k decode"      make check PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PACKAGES = draft distill verify eval cli
BOOTSTRAP = $(PYTHON) tools/bootstrap.py --venv $(VENV)

.DEFAULT_GOAL := help

help:
	@echo "make demo       install, then distil, evaluate and report on a small real model"
	@echo "make test       install, then run the tests"
	@echo "make test-vllm  install vLLM for the CPU (3.5 GB), then run the tests that need it"
	@echo "make check      lint, types and tests"
	@echo "make clean      remove what the other targets made here"

demo:
	@$(BOOTSTRAP)
	$(VENV)/bin/sparksmith demo $(ARGS)

test:
	@$(BOOTSTRAP) --group test
	$(VENV)/bin/python -m pytest $(ARGS)

test-vllm:
	@$(PYTHON) tools/vllm_environment.py --venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pytest -m vllm $(ARGS)

check: lint types
	@$(BOOTSTRAP) --group dev
	$(VENV)/bin/python -m pytest $(ARGS)

lint:
	@$(BOOTSTRAP) --group dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: .typing
	@$(BOOTSTRAP) --group dev
	$(VENV)/bin/mypy
	MYPYPATH=tools $(VENV)/bin/mypy tools/*.py

# A type checker cannot follow an editable install's import hook: the same mapping as links.
.typing: Makefile
	mkdir -p $@/sparksmith
	for p in $(PACKAGES); do ln -sfn ../../$$p $@/sparksmith/$$p; done
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm .typing build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find $(PACKAGES) tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo test test-vllm check lint types clean
