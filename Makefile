# Everything runs in a virtual environment of its own; torch is pinned, because a looser pin fetches CUDA packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS_STAMP := $(VENV)/.installed-triton
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Some images have it set; each of the tests' processes would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

OLDEST := torch==2.11.0 transformers==5.17.0 accelerate==1.14.0 peft==0.21.0 bitsandbytes==0.50.0

NUMBERS := tests/sim/quantized/test_bits.py tests/sim/quantized/test_training.py tests/sim/optim tests/sim/engine/test_parity.py \
	tests/unit/train/setup/test_quantization.py

QUICK := src/fullshard/core/layout tests/unit/layout tests/unit/engine/step tests/sim/engine/test_parity.py \
	tests/dist/train/test_train.py::test_the_saved_model_gives_the_reported_loss

.PHONY: demo quick test test-all test-avx2 test-kernels test-newest test-oldest suite check docs dist notebook bench bench-network faults mutants gpu clean

demo: $(STAMP)
	$(BIN)/fullshard train examples/banking77_tiny.yaml

# Two at a time; a file's tests share what they set up, so they stay together; those of processes, which take long, come first.
test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# While one works: layout, the schedule, parity with ranks as threads, and one run of the program.
quick: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist worksteal $(QUICK)

test-all: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu"

# The tests of numbers by the kernels for CPUs without AVX-512: torch, and bitsandbytes by it, choose theirs by this variable.
test-avx2: $(STAMP)
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/pytest -q -n 2 --dist loadfile $(NUMBERS)

# The kernels in Triton's interpreter, on the CPU, against eager attention.
test-kernels: $(STAMP) $(KERNELS_STAMP)
	PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 $(BIN)/pytest -n 2 tests/kernels

# The suite with the newest releases that the index offers, or with the oldest supported ones, each in an environment of its own; torch
# then comes as PyPI's build, several GB. What ran: docs/reference/versions.md.
test-newest:
	$(MAKE) --no-print-directory suite IN=.venv-newest LIBRARIES="torch transformers accelerate peft bitsandbytes"

test-oldest:
	$(MAKE) --no-print-directory suite IN=.venv-oldest LIBRARIES="$(OLDEST)"

suite:
	$(PYTHON) -m venv $(IN)
	$(IN)/bin/pip install -q --disable-pip-version-check -U $(LIBRARIES) -e ".[dev]"
	$(IN)/bin/pip install -q --disable-pip-version-check --no-deps --target $(IN)/torchao --upgrade torchao
	$(IN)/bin/pip list --disable-pip-version-check | grep -E "^(torch|transformers|accelerate|peft|bitsandbytes|tokenizers) "
	$(IN)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# A site with search in site/; stale generated pages and broken links are errors.
docs: $(STAMP) $(DOCS_STAMP)
	$(BIN)/python docs/generate.py --check
	$(DOCS_VENV)/bin/zensical build --clean --strict

# dist/: the wheel, and the source distribution with examples/ and deploy/.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build

# The guide of ten minutes as a Jupyter notebook, ten-minutes.ipynb; it needs no Jupyter.
notebook:
	$(PYTHON) docs/notebook.py

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py

# Steps over a slow link between two network namespaces; needs Linux, root, `ip` and `tc`.
bench-network: $(STAMP)
	$(BIN)/python benchmarks/network.py

# Ranks, machines and launchers that die at random moments; continues where it was left. Then what snapshots cost.
faults: $(STAMP)
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python benchmarks/faults.py

# Small changes of the engine and the layout that the tests must notice; `--only N` runs N more of the sample.
mutants: $(STAMP)
	$(BIN)/python benchmarks/mutants.py

# What only a GPU can tell, with the machine's own python3. STAGE=first: eight minutes; STAGE=doctor,tests chooses; DRY=1: tiny shapes on the CPU.
gpu:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu $(if $(DRY),--dry) $(if $(STAGE),--stage $(STAGE)) $(if $(OUT_DIR),--out $(OUT_DIR))

# torchao has a folder of its own: transformers imports it where it is installed, which takes two seconds of every process.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps --target $(VENV)/torchao --upgrade torchao
	touch $@

# triton too, for the tests of kernels alone: 700 MB on the disk, and what finds it compiles with it.
$(KERNELS_STAMP): constraints.txt | $(STAMP)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps --target $(VENV)/triton --upgrade triton
	touch $@

# Only the generator: the extra `docs` would bring torch along.
$(DOCS_STAMP): constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q --disable-pip-version-check -c constraints.txt zensical
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) runs site dist build ten-minutes.ipynb
