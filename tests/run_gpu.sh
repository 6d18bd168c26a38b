#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the tests with the python3 and torch of a machine that has a GPU but perhaps no network:
#   tests/run_gpu.sh [FOLDER] [pytest arguments]
# FOLDER holds wheels of what is missing there; they go into a temporary folder, not into the
# environment. Without arguments for pytest everything runs.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -d ${1:-} ]]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$1"/*.whl
    shift
fi
export PYTHONPATH=$PWD/src:$site
python3 -m pytest -p no:cacheprovider "$@"
