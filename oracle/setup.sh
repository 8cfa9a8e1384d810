#!/bin/sh
# Makes a virtual environment for the oracle: setup.sh [FOLDER], default target/oracle-venv. About 1.7 GB, CPU only.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../target/oracle-venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup.sh: Python 3.11 or newer is needed, $python is $("$python" --version 2>&1); set PYTHON to another" >&2
    exit 1
}
for tool in gcc readelf; do
    command -v "$tool" >/dev/null || { echo "setup.sh: $tool is needed to stand in for the CUDA libraries" >&2; exit 1; }
done

"$python" -m venv "$folder"
# The list is complete, so nothing has to be resolved, and torch's CUDA packages stay away.
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
"$folder/bin/python" "$here/stub_cuda.py" "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torch/lib"
"$folder/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
echo "ready: $folder/bin/python oracle/make_fixtures.py"
