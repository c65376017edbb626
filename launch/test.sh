#!/usr/bin/env bash
# Install what the tests need and run them. --all adds those that take minutes.
#   bash launch/test.sh [--all] [pytest arguments]
#   MEGARL_TEST_WORKERS   files that are tested at a time (default: 2; 0: one, in pytest's own process, as --pdb needs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PIP_NO_COMPILE=0 bash launch/install_cpu.sh dev # 0 turns compiling off: pip inverts this variable. Compiling all modules takes 2 minutes
bin=${MEGARL_VENV:-.venv}/bin
marks=(-m "not slow")
if [ "${1:-}" = --all ]; then shift; marks=(); fi
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
"$bin/python" -m pytest -n "${MEGARL_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "${marks[@]}" "$@"
