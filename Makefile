# Everything that is fetched lands in ignored folders: .venv (pytest alone) and .cache (tools, official suite, clients).
PYTHON ?= python3
VENV := .venv/bin/python
TOOLS := .cache/tools/bin

.PHONY: run test lint conformance interop

run:            ## serve http://127.0.0.1:3000/mcp
	$(PYTHON) reference_server.py

test: .venv/done   ## the suite, in under 20 seconds
	$(VENV) -X dev -W error -m pytest -q tests

lint: .cache/tools/done   ## ruff, mypy --strict
	$(TOOLS)/ruff check .
	$(TOOLS)/mypy reference_server.py headers.py sse.py tests/lessons/client.py

conformance:    ## the official conformance suite and an independent checker; needs npm and the network
	$(PYTHON) tests/official/conformance.py
	$(PYTHON) tests/official/mcpcheck.py

interop:        ## the official clients, unmodified; needs npm and the network
	$(PYTHON) tests/official/interop.py

.venv/done:
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet pytest
	touch $@

.cache/tools/done:
	$(PYTHON) -m venv .cache/tools
	.cache/tools/bin/pip install --quiet ruff mypy
	touch $@
