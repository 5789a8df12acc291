#!/bin/sh
# The Python packages of the image, in a virtual environment: `make image-check` runs the same steps.
#
#   docker/install.sh dependencies VENV cpu|cuda   torch, Ray and the rest, as docker/constraints.txt says;
#                                                  with CUDA FlashInfer and a compiler, as docker/flashinfer.txt
#   docker/install.sh toolkit VENV FOLDER          CUDA's toolkit there, of the parts that wheels brought
#   docker/install.sh package VENV WHEEL           Mallee itself, a layer of its own
#   docker/install.sh kernels VENV FOLDER          the router's kernels, compiled for this machine's CPU
#
# TORCH_INDEX: where torch's wheels come from, in place of PyTorch's own index. CONSTRAINTS: another file
# of versions, or /dev/null for the newest.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
extras="serve objects gguf traces epp"

dependencies() {
    venv=$1
    case $2 in
    cpu) index=https://download.pytorch.org/whl/cpu ;;
    cuda) index=https://download.pytorch.org/whl/cu130 ;;
    *)
        echo "install.sh: variant $2: give cpu or cuda" >&2
        exit 2
        ;;
    esac
    constraints=${CONSTRAINTS:-$here/constraints.txt}
    test -x "$venv/bin/python" || python3 -m venv "$venv"
    pip="$venv/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check"
    # First and alone from its index: of another index nothing else is taken.
    $pip --constraint "$constraints" --index-url "${TORCH_INDEX:-$index}" "$(pinned torch)"
    requirements "$venv/bin/python" >"$venv/requirements.txt"
    $pip --constraint "$constraints" --requirement "$venv/requirements.txt"
    test "$2" = cpu || $pip --no-deps --requirement "$here/flashinfer.txt"
}

# Wheels have libraries with version numbers alone, and none of the driver's to link with.
toolkit() {
    parts=$("$1/bin/python" -c "import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], 'cu13'))")
    mkdir -p "$2/lib64/stubs"
    for part in bin include nvvm; do ln -sfn "$parts/$part" "$2/$part"; done
    for library in "$parts"/lib/lib*.so.*; do
        name=$(basename "$library")
        ln -sf "$library" "$2/lib64/${name%%.so.*}.so"
    done
    echo 'void mallee_stub(void) {}' \
        | c++ -x c - -shared -Wl,-soname,libcuda.so.1 -o "$2/lib64/stubs/libcuda.so"
    "$2/bin/nvcc" --version
}

# The version of a package that the constraints name.
pinned() {
    grep --max-count=1 "^$1==" "$here/constraints.txt"
}

# What pyproject.toml asks for, without Mallee itself.
requirements() {
    "$1" - "$here/../pyproject.toml" "$extras" <<'PYTHON'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = project["optional-dependencies"]
found, todo = list(project["dependencies"]), sys.argv[2].split()
while todo:
    for line in extras[todo.pop(0)]:
        if line.startswith("mallee["):
            todo.append(line[len("mallee["):-1])
        else:
            found.append(line)
print("\n".join(found))
PYTHON
}

package() {
    "$1/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-deps "$2"
    # Whole seconds: numba compares a source's time with its kernel's, and layers of images keep no fractions.
    folder=$("$1/bin/python" -I -c "import mallee; print(mallee.__path__[0])")
    find "$folder" -name '*.py' -exec touch -d @1767225600 {} +
    "$1/bin/python" -m compileall -q "$folder"
}

kernels() {
    mkdir -p "$2"
    NUMBA_CACHE_DIR=$2 "$1/bin/python" -I -c "
from mallee.router.config import RouterConfig
from mallee.router.router import Router
Router(RouterConfig(), clock=float)"
}

command=$1
shift
case $command in
dependencies | toolkit | package | kernels) "$command" "$@" ;;
*)
    echo "install.sh: $command: give dependencies, toolkit, package or kernels" >&2
    exit 2
    ;;
esac
