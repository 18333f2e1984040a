#!/usr/bin/env bash
# Builds .venv with the pinned closure: "cpu" is what the demo needs, "dev" the test tools too.
# Stamps of the requirement files' hash make a second call instant; a call with other requirements installs
# over what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
what=${1:-cpu}

stamp_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "PDD needs Python 3.11 to 3.14 with venv and pip (on Debian: python3 and python3-venv); none was found." >&2
    echo "Name one with PYTHON=/path/to/python make ..." >&2
    exit 1
}

check_platform() {
    if [ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]; then
        echo "The pinned closure is for Linux on x86-64; this is $(uname -s) on $(uname -m)." >&2
        exit 1
    fi
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check -qq --no-deps "$@"; }
note() { echo "install: $*"; }

install_cpu() {
    note "build tools"
    pip_install --require-hashes -r requirements/build.txt
    note "torch (CPU build)"
    if ! pip_install -r requirements/torch-cpu.txt; then
        echo "pip found no CPU build of torch. Set PIP_EXTRA_INDEX_URL to the CPU wheel index that PyTorch's" >&2
        echo "install page names (Stable, Linux, Pip, CPU), and call make again." >&2
        exit 1
    fi
    note "vLLM on the CPU and what PDD needs (some 600 MB; a few minutes)"
    pip_install --require-hashes -r requirements/cpu.txt
    note "PDD"
    pip_install --no-build-isolation packaging/vllm-metadata
    pip_install --no-build-isolation --editable .
}

# The stamp comes last, so a stopped install is done again. A new file in requirements changes both.
once() {
    local name=$1 stamp
    shift
    stamp=$(stamp_of "$@")
    if [ "$(cat "$venv/.installed-$name" 2>/dev/null)" != "$stamp" ]; then
        "install_$name"
        echo "$stamp" >"$venv/.installed-$name"
    fi
}

install_dev() {
    note "test tools"
    pip_install --require-hashes -r requirements/dev.txt
}

check_platform
if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    note "environment in $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
once cpu requirements/build.txt requirements/torch-cpu.txt requirements/cpu.txt packaging/vllm-metadata/pyproject.toml pyproject.toml \
    tools/build_native.py src/pdd/router/fastpath/*.[ch]pp
[ "$what" = cpu ] || once dev requirements/dev.txt
