#!/usr/bin/env bash
# Two CPU cores, a few minutes: installs, makes a tiny Qwen3-MoE and its data, warms it up with SFT, trains it
# with DAPO through Ray, evaluates before and after, writes runs/quickstart/report.html.
#   bash launch/quickstart.sh [--debug] [key=value ...]    settings for the RL run, e.g. train.seed=1; --debug: tracebacks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install_cpu.sh
exec "${MEGARL_VENV:-.venv}/bin/python" -m megarl quickstart "$@"
