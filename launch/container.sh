#!/usr/bin/env bash
# Start megarl's container on this node, in the background: with all devices, the host's network and driver, and folders
# that every node sees.
#
#   launch/container.sh npu|cuda
#   docker exec -it megarl bash      a shell in it
#   docker rm -f megarl              ends it, and deletes what lies outside the three folders
#
#   SHARED      a folder of all nodes; its data/, models/ and runs/ are mounted below /opt/megarl (/shared/megarl)
#   CHECKOUT    a checkout of megarl on this node, in place of the image's (/opt/megarl); without a .venv
#   IMAGE       the image (megarl-npu or megarl-cuda)
#   CONTAINER   the container's name (megarl)
#   SANDBOX     0: leaves out the rights that recipes which run generated code need (docs/sandbox.md)
set -eu
case "${1:-}" in
  -h | --help)
    sed -n '2,/^set -eu/{/^set -eu/d; s/^# \{0,1\}//; p;}' "$0"
    exit 0
    ;;
esac
kind=${1:-}
shared=${SHARED:-/shared/megarl}
case "$kind" in
  npu)
    devices=(/dev/davinci[0-9]* /dev/davinci_manager /dev/devmm_svm /dev/hisi_hdc)
    mounts=(/usr/local/Ascend/driver /usr/local/dcmi /usr/local/bin/npu-smi /etc/ascend_install.info /etc/hccn.conf)
    options=()
    ;;
  cuda)
    devices=(/dev/infiniband) # docker takes all devices of a folder
    mounts=()
    options=(--gpus all)
    ;;
  *)
    echo "usage: launch/container.sh npu|cuda, got '$kind'" >&2
    exit 2
    ;;
esac
if [ "$kind" = npu ] && [ ! -e /usr/local/bin/npu-smi ] && [ -e /usr/local/sbin/npu-smi ]; then
  mounts+=(/usr/local/sbin/npu-smi)
fi
for device in "${devices[@]}"; do
  if [ -e "$device" ]; then
    options+=(--device "$device")
  elif [ "$kind" = npu ]; then
    echo "container.sh on $(hostname): this node has no $device: is Ascend's driver installed?" >&2
    exit 1
  fi
done
for path in ${mounts[@]+"${mounts[@]}"}; do # docker would create an empty folder for one that is missing
  if [ -e "$path" ]; then options+=(-v "$path:$path:ro"); else echo "container.sh on $(hostname): no $path here, not mounted" >&2; fi
done
name=${CONTAINER:-megarl}
if docker container inspect "$name" > /dev/null 2>&1; then
  echo "container.sh on $(hostname): this node has a container $name already: docker rm -f $name ends it" >&2
  exit 1
fi
if [ -n "${CHECKOUT:-}" ]; then options+=(-v "$CHECKOUT:/opt/megarl"); fi
if [ "${SANDBOX:-1}" != 0 ]; then
  options+=(--cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined)
fi
for folder in data models runs; do
  if ! mkdir -p "$shared/$folder"; then
    echo "container.sh on $(hostname): cannot make $shared/$folder: set SHARED to a folder of all nodes in which $(id -un) may write" >&2
    exit 1
  fi
  options+=(-v "$shared/$folder:/opt/megarl/$folder")
done
docker run -d --name "$name" --network host --ipc host --init \
  --ulimit nofile=65536:65536 --ulimit memlock=-1:-1 "${options[@]}" "${IMAGE:-megarl-$kind}" sleep infinity
if ! docker exec "$name" sh -c 'for folder in data models runs; do rm "$(mktemp "/opt/megarl/$folder/.XXXXXX")" || exit 1; done'; then
  echo "container.sh on $(hostname): root of the container cannot write in $shared (NFS with root_squash?): chmod 1777 its data, models and runs" >&2
  exit 1
fi
