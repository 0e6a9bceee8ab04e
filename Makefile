# Everything that is fetched lands in ignored folders: .venv (pytest alone) and .cache (tools, official suite, clients).
PYTHON ?= python3
TOOLS := .cache/tools/bin

.PHONY: help run test lint spoof three-ways cuts handles nginx bench hang-ups slow-clients fuzz soak stress schemas conformance interop

help:           ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s  %s\n", $$1, $$2 }' Makefile

run:            ## serve http://127.0.0.1:3000/mcp
	$(PYTHON) reference_server.py

test: .venv/done   ## the suite, in some 20 seconds
	@.venv/bin/python tests/run.py

lint: .cache/tools/done   ## ruff, mypy --strict
	$(TOOLS)/ruff check .
	$(TOOLS)/mypy reference_server.py headers.py sse.py tests/lessons/client.py

spoof:          ## a spoofed header, before a server that compares it with the body and one that does not
	$(PYTHON) tests/lessons/spoof.py

cuts:           ## a stream of three events, cut at each of its places
	$(PYTHON) tests/lessons/cuts.py

three-ways:     ## one slow call over stdio, over this revision's HTTP and over the last one's
	$(PYTHON) tests/lessons/three_ways.py

handles:        ## two processes, one state file: each walk a hundred times, fifty kills; some four minutes
	$(PYTHON) tests/load/handles.py

bench:          ## speed and memory beside the Python SDK's server; PEER='name=command with {port}' adds another
	$(PYTHON) tests/load/bench.py $(OPTIONS)

hang-ups:       ## how long a tool runs on after its client has hung up, beside 100 and 1,000 streams; under a minute
	$(PYTHON) tests/load/hangups.py $(OPTIONS)

slow-clients:   ## what good requests notice of 500 clients that are slow on purpose; seconds
	$(PYTHON) tests/load/slow_clients.py $(OPTIONS)

fuzz:           ## 200,000 mutated inputs and 400 mutated starts, some seven minutes
	$(PYTHON) tests/load/fuzz.py $(OPTIONS)

soak:           ## ten minutes of mixed traffic with random hang-ups; OPTIONS='--unread --stdio' for other ways
	$(PYTHON) tests/load/soak.py $(OPTIONS)

stress:         ## no thread, no descriptor, a killed client, one that does not read, bursts: none may touch the others
	$(PYTHON) tests/load/stress.py $(OPTIONS)

nginx:          ## behind a real nginx (Debian: apt-get install nginx)
	$(PYTHON) tests/load/nginx.py

schemas:        ## the official JSON Schema test suite; needs the network once
	$(PYTHON) tests/official/schemas.py $(OPTIONS)

conformance:    ## the official conformance suite and an independent checker; needs npm and the network
	$(PYTHON) tests/official/conformance.py
	$(PYTHON) tests/official/mcpcheck.py

interop:        ## the official clients, unmodified; needs npm and the network
	$(PYTHON) tests/official/interop.py

.venv/done:
	@$(PYTHON) tests/lessons/by_hand.py
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet "pytest>=9,<10"
	touch $@

.cache/tools/done:
	$(PYTHON) -m venv .cache/tools
	.cache/tools/bin/pip install --quiet ruff==0.17.6 mypy==2.4.1
	touch $@
