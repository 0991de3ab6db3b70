# The commands of this project; `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help demo test lint docs unit e2e e2e-matrix e2e-recovery e2e-builds e2e-routers e2e-upstream nightly chaos chaos-long completions generated

BIN := .venv/bin

# With the Debian package libibverbs1 present (Mooncake needs it), UCX's InfiniBand module loads a second copy of libnl
# and every process that made a NIXL agent dies with SIGSEGV when it exits. The demo and the tests use no InfiniBand.
export UCX_MODULES ?= ^ib

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

demo:  ## two CPU engines, a daemon between them, a transfer; ARGS="..." goes to `kvctl demo`
	@.ci/setup vllm; status=$$?; \
	if [ $$status -eq 0 ]; then exec $(BIN)/kvctl demo $(ARGS); fi; \
	if [ $$status -ne 3 ]; then exit $$status; fi; \
	echo "demo: no CPU build of torch, so no real engines here: simulating them" >&2; \
	.ci/setup base && exec $(BIN)/kvctl demo --simulate $(ARGS)

test:  ## every check and every test, real engines included
	@.ci/setup vllm
	@.ci/setup routers
	@.ci/setup shells
	@.ci/setup browser
	@.ci/setup etcd
	@$(BIN)/python .ci/checks lint unit e2e

lint:  ## style, types, floors, and that the docs' site builds
	@.ci/setup base
	@$(BIN)/python .ci/checks lint

docs:  ## the site of docs/ into .builds/site, every internal link checked; read it at .builds/site/index.html
	@.ci/docs

unit:  ## the tests that need no engine
	@.ci/setup base
	@.ci/setup shells
	@.ci/setup browser
	@.ci/setup etcd
	@$(BIN)/python .ci/checks unit

e2e:  ## the tests with real vLLM engines
	@.ci/setup vllm
	@.ci/setup routers
	@.ci/setup etcd
	@$(BIN)/python .ci/checks e2e

e2e-matrix:  ## every backend, mode and kind of cache with real engines (about an hour); writes docs/matrix.md
	@.ci/setup vllm
	@WRITE_MATRIX=1 $(BIN)/python .ci/checks matrix

e2e-recovery:  ## every kind of cache, mode and backend against every fault (an hour and more); writes docs/recovery-matrix.md
	@.ci/setup vllm
	@WRITE_RECOVERY_MATRIX=1 $(BIN)/python .ci/checks recovery

e2e-builds:  ## hand-overs and faults on another vLLM, VLLM=0.26.0 for instance (20 minutes); notes them in docs/builds.md
	@.ci/setup-build $(VLLM)
	@WRITE_BUILDS=1 .builds/$(VLLM)/bin/python -m pytest -q $(addprefix tests/e2e/test_,gpu_caches.py recovering.py by_hand.py builds.py)

e2e-routers:  ## vllm-router and vLLM's own proxies, unmodified, in front of real engines (10 minutes)
	@.ci/setup vllm
	@.ci/setup routers
	@$(BIN)/python .ci/checks routers

e2e-upstream:  ## vLLM's own tests of connectors against KvdConnector, those of running servers too (10 minutes)
	@.ci/setup vllm
	@.ci/setup routers
	@$(BIN)/python -m tests.upstream --served

nightly:  ## 50,000 random pairs of engines against the byte-level oracle (500 in each run of the tests)
	@.ci/setup base
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q --timeout 7200 tests/kvd/topology/test_oracle.py

chaos:  ## faults on two hosts, hostile messages, a short soak (five minutes, takes root); docs/chaos.md
	@.ci/setup base
	@$(BIN)/python -m tests.chaos

chaos-long:  ## the same many times over, a million mutated and a million hostile messages, an hour's soak (three hours)
	@.ci/setup base
	@$(BIN)/python -m tests.chaos --long

completions:  ## write completions/ anew from the command line itself
	@.ci/setup base
	@$(BIN)/kvctl completion bash >completions/kvctl.bash
	@$(BIN)/kvctl completion zsh >completions/_kvctl
	@$(BIN)/kvctl completion fish >completions/kvctl.fish

generated: completions  ## what is made of the program, anew: completions/, tests/golden, what docs/ quotes and pictures
	@.ci/setup browser
	@WRITE_DOCS=1 $(BIN)/python -m pytest -q -n 2 tests/kvctl/test_docs.py tests/kvctl/test_examples.py \
		tests/kvd/service/test_settings_page.py tests/kvctl/top/test_pictures.py \
		tests/kvctl/views/reports/test_pictures.py::test_pictures_in_docs_are_of_the_pages_as_they_are
