#!/usr/bin/env bash
# Make (or re-use) an environment with an older vLLM beside .venv; it shares .venv's other packages. tests/engines/test_older_vllm.py
# runs in it. Prints what it does.
#   bash launch/install_older_vllm.sh [0.23|0.18]   the vLLM of the sets for CANN 9.1 (default) and 9.0
#   MEGARL_VENV   the main environment, which must exist (default: .venv beside this repository's README)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=${1:-0.23}
venv=${MEGARL_VENV:-$root/.venv}
older=$venv-vllm-$version
lock=$root/launch/requirements-cpu-vllm-$version
needed=8  # GB of disk while pip installs: wheels, and kernels that are removed afterwards
size=3.3  # GB of the environment with torch's CUDA build
if [ "$version" = 0.18 ]; then size=4.9; fi

stop() { # the test that needs the environment prints the reason
  mkdir -p "$older"
  echo "$1" > "$older/not-installed.txt"
  echo "no vLLM $version: $1" >&2
  exit 1
}
# The CPU build of torch lies on PyTorch's own index. Elsewhere the CUDA build serves: it computes on a CPU too, and loads the
# CUDA libraries that its own lock names.
install() { "$venv/bin/python" -m pip --python "$older/bin/python" install --quiet --no-deps -r "$1"; }

# Not known of 0.18.
if [ "$version" = 0.23 ] && [ "$(uname -m)" = x86_64 ] && ! grep -qw avx512f /proc/cpuinfo; then
  rm -rf "$older"
  stop "its experts need AVX-512 on a CPU, and this processor has none (vLLM's cpu_fused_moe.py)"
fi
if cat "$lock.txt" "$lock-cuda.txt" | cmp -s - "$older/installed.txt"; then exit 0; fi
rm -rf "$older"
free=$(df --output=avail --block-size=1G "$(dirname "$older")" | tail -1)
if [ "$free" -lt $needed ]; then stop "it takes $needed GB of disk while pip installs, and $free GB are free"; fi
echo "making an environment with vLLM $version in $older; a first time takes minutes and up to $size GB ($needed GB while pip installs)"
"$venv/bin/python" -m venv --without-pip "$older"
where='import sysconfig; print(sysconfig.get_path("purelib"))'
packages=$("$older/bin/python" -c "$where")
"$venv/bin/python" -c "$where" > "$packages/main.pth"
if ! install "$lock.txt" 2> "$older/pip.txt"; then
  if ! install "$lock-cuda.txt" 2>> "$older/pip.txt"; then
    stop "pip failed: $(grep ERROR "$older/pip.txt" | tail -1)"
  fi
  rm -f "$packages"/nvidia/cudnn/lib/libcudnn_*  # 0.5 GB to 1 GB of kernels that only a GPU loads
fi
load='from vllm.platforms import current_platform as p; p.import_kernels(); import torch; torch.ops._C.rms_norm'
message=$("$older/bin/python" -c "$load" 2>&1) || { # vLLM chooses the build for the processor, and logs why it cannot be loaded
  status=$?
  stop "its kernels cannot be loaded: $(grep 'Failed to import' <<< "$message" || tail -1 <<< "${message:-exit status $status}")"
}
cat "$lock.txt" "$lock-cuda.txt" > "$older/installed.txt"
