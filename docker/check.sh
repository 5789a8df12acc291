#!/bin/sh
# Installs Mallee as the image does, in a clean virtual environment, and serves from there: `make image-check`.
# Needs no container runtime; takes some minutes and 2 GB of /tmp. TORCH_INDEX: see install.sh.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d "${TMPDIR:-/tmp}/mallee-image.XXXXXX")
service=
clean_up() {
    test -z "$service" || kill "$service" 2>/dev/null || true
    test -z "$service" || wait "$service" 2>/dev/null || true
    rm -rf "$folder"
}
trap clean_up EXIT
trap 'exit 1' INT TERM
unset PYTHONPATH
cd "$folder"

echo "dependencies (cpu) ..."
timeout 1200 "$root/docker/install.sh" dependencies "$folder/venv" cpu
echo "package ..."
"$folder/venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$folder/dist" "$root"
timeout 120 "$root/docker/install.sh" package "$folder/venv" "$folder"/dist/*.whl
echo "kernels ..."
timeout 300 "$root/docker/install.sh" kernels "$folder/venv" "$folder/numba"

PATH=$folder/venv/bin:$PATH NUMBA_CACHE_DIR=$folder/numba HOME=$folder
export PATH NUMBA_CACHE_DIR HOME
mallee version
mallee check "$root/serve.yaml"
python -m pip check

port=$(python -c "from mallee.runtime.addresses import free_port; print(free_port())")
mkdir model
PYTHONPATH=$root/tests python -c "
from pathlib import Path
from support.mock_scene import make_folder
make_folder(Path('model'))"
echo "serving on port $port ..."
mallee mock --model model --engines 4 --port "$port" 2>serve.log &
service=$!
for _ in $(seq 60); do
    if wget --quiet --tries=1 --output-document=- "http://127.0.0.1:$port/health/ready" 2>/dev/null; then
        echo
        echo "ready"
        exit 0
    fi
    kill -0 "$service" 2>/dev/null || break
    sleep 1
done
cat serve.log >&2
echo "image-check: the service is not ready" >&2
exit 1
