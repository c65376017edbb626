#!/usr/bin/env bash
# Make (or re-use) the virtual environment .venv with everything a CPU machine needs. Prints what it does.
#   MEGARL_PYTHON   interpreter to make it with (default: python3.11, python3.12 or python3, whichever is found first)
#   MEGARL_VENV     where (default: .venv beside this repository's README)
#   PIP_EXTRA_INDEX_URL   where pip finds the CPU build of torch (see README)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MEGARL_VENV:-$root/.venv}
extra=${1:-}   # "dev": also what the tests need
files=("$root/launch/requirements-cpu.txt")
if [ "$extra" = dev ]; then files+=("$root/launch/requirements-dev.txt"); fi

has_supported_python() { # sets version; the locked packages have wheels for Python 3.11 and 3.12 alone
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || version="not found"
  case $version in 3.11 | 3.12) ;; *) return 1 ;; esac
}
if "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
  if ! has_supported_python "$venv/bin/python"; then
    echo "the locked packages need Python 3.11 or 3.12, and the environment $venv has $version." \
      "Remove it, or name another folder: MEGARL_VENV=/path/to/environment" >&2
    exit 2
  fi
else
  # An environment without pip was interrupted while it was made, or its maker adds none (uv). It is made again from nothing.
  clear=()
  if [ -f "$venv/pyvenv.cfg" ]; then
    clear=(--clear)
  elif [ -x "$venv/bin/python" ]; then
    echo "$venv/bin/python has no pip, and $venv is no virtual environment, which would be made again." \
      "Install pip there, or name another folder: MEGARL_VENV=/path/to/environment" >&2
    exit 2
  fi
  python=${MEGARL_PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3 || true)}
  if ! has_supported_python "${python:-python3}"; then
    echo "the locked packages need Python 3.11 or 3.12, and ${python:-python3} is $version." \
      "Install one of them, and name it: MEGARL_PYTHON=/path/to/python3.11 (vLLM 0.32 needs at least 3.11)" >&2
    exit 2
  fi
  echo "making a virtual environment in $venv with $("$python" --version)${clear:+, since the one there has no pip}"
  "$python" -m venv ${clear[@]+"${clear[@]}"} "$venv"
fi
for file in "${files[@]}"; do
  stamp=$venv/installed-$(basename "$file")
  if ! cmp -s "$file" "$stamp"; then
    echo "installing $(grep -c '==' "$file") packages of $(basename "$file"); a first time takes some minutes and 2.5 GB"
    # The lock names every package; the resolver could only add what a CPU cannot use (torchvision, CUDA).
    "$venv/bin/python" -m pip install --quiet --no-deps -r "$file" || {
      echo "installation failed. If torch was not found, name the index of its CPU builds and start again:" \
        "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" >&2
      exit 1
    }
    cp "$file" "$stamp"
  fi
done
# megarl itself: a path file and the command, as an editable install leaves them. pip would build the package for that,
# and fetch its build tools. -I: neither the current folder nor PYTHONPATH may stand in for an installation.
source_of_megarl() {
  "$venv/bin/python" -I -c 'import importlib.util as u, os; s = u.find_spec("megarl"); print(os.path.dirname(os.path.dirname(os.path.realpath(s.origin))) if s else "")'
}
installed=$(source_of_megarl)
if [ -z "$installed" ] || [ ! -x "$venv/bin/megarl" ]; then
  if [ -z "$installed" ]; then
    "$venv/bin/python" -I -c 'import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "megarl.pth").write_text(sys.argv[1] + "\n")' "$root"
  fi
  # As pip writes it: sh starts Python, since the first line of a script may hold neither spaces nor a long path.
  cat > "$venv/bin/megarl" << END
#!/bin/sh
'''exec' "$(cd "$venv" && pwd)/bin/python" "\$0" "\$@"
' '''
import sys

from megarl.cli import main

sys.exit(main())
END
  chmod a+rx "$venv/bin/megarl"
  echo "installed megarl from $(source_of_megarl): $venv/bin/megarl"
elif [ "$installed" != "$(cd "$root" && pwd -P)" ]; then
  echo "the megarl command in $venv runs $installed; \`python -m megarl\` in $root runs this checkout"
fi
if [ "$extra" = dev ]; then "$venv/bin/python" "$root/launch/unpack_sources.py" "${MEGARL_SOURCES:-$venv/sources}"; fi
if [ "$extra" = dev ]; then
  bash "$root/launch/install_older_vllm.sh" 0.23 || true # it says why; tests/engines/test_older_vllm.py is then skipped with the reason
fi
if ! command -v bwrap > /dev/null; then
  if [ "$extra" = dev ] && [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "installing bubblewrap, which the sandbox for generated code is tested with"
    { apt-get update && apt-get install -y --no-install-recommends bubblewrap; } > /dev/null ||
      echo "apt-get could not install bubblewrap: the sandbox's tests are skipped" >&2
  else
    echo "bubblewrap is not installed; only the scoring of generated code needs it (docs/sandbox.md)"
  fi
fi
