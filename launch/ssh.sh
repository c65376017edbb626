#!/usr/bin/env bash
# launch/multinode.sh on several nodes over ssh, in the container that launch/container.sh has started on each:
#
#   launch/ssh.sh HOSTS RECIPE [key=value ...]
#   launch/ssh.sh HOSTS -- COMMAND ...
#   launch/ssh.sh HOSTS --stop                 ends the run that another terminal has started
#
# HOSTS is a file with a host per line, node rank 0 first; one line is a run on one node. Ctrl-C ends the run on all nodes,
# in order. Lines of other nodes than the first begin with the host's name.
#
#   INTERFACE          the network interface between the nodes (ip -br addr), where they have several; as in launch/multinode.sh
#   DEVICES_PER_NODE   devices of each node (default: what Ray finds)
#   MASTER_ADDR        address of the first host (default: its name in HOSTS, without user@)
#   MASTER_PORT        as in launch/multinode.sh, like MEGARL_JOIN_TIMEOUT and MEGARL_JOIN_DIR
#   HCCL_*, NCCL_*, GLOO_*, HF_HOME, HF_ENDPOINT, RAY_TMPDIR   as they are set here, on every host
#   CONTAINER          the containers' name (megarl)
set -euo pipefail
case "${1:-}" in
  -h | --help)
    sed -n '2,/^set -eu/{/^set -eu/d; s/^# \{0,1\}//; p;}' "$0"
    exit 0
    ;;
esac
if [ $# -lt 2 ] || [ ! -f "$1" ]; then
  echo "usage: launch/ssh.sh HOSTS RECIPE [key=value ...], or HOSTS -- COMMAND ...; HOSTS is a file, got '${1:-}'" >&2
  exit 2
fi
mapfile -t hosts < <(grep -v '^[[:space:]]*\(#\|$\)' "$1")
shift
if [ ${#hosts[@]} = 0 ]; then
  echo "ssh.sh: the file of hosts is empty" >&2
  exit 2
fi
variables=(NNODES="${#hosts[@]}" MASTER_ADDR="${MASTER_ADDR:-${hosts[0]##*@}}" PYTHONUNBUFFERED=1)
mapfile -t libraries < <(compgen -e | grep -E '^(HCCL|NCCL|GLOO)_')
for name in INTERFACE TP_SOCKET_IFNAME DEVICES_PER_NODE MASTER_PORT MEGARL_JOIN_TIMEOUT MEGARL_JOIN_DIR HF_HOME HF_ENDPOINT RAY_TMPDIR ${libraries[@]+"${libraries[@]}"}; do
  if [ -n "${!name:-}" ]; then variables+=("$name=${!name}"); fi
done
pids=runs/.launcher-${hosts[0]} # files with the process ids of launchers on the first node
pid_file=$pids.$(hostname).$$.pid

quoted() { # WORD ...: as any login shell of a host reads them; printf %q is for bash alone
  local word
  for word in "$@"; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

on() { # HOST COMMAND ...: run it in the host's container
  local host=$1
  shift
  ssh -n -o ServerAliveInterval=60 "$host" "$(quoted docker exec -w /opt/megarl "${CONTAINER:-megarl}" "$@")"
}

start() { # RANK ARGUMENTS ...: of multinode.sh
  local rank=$1 command
  shift
  command=$(printf '%q ' exec env "${variables[@]}" NODE_RANK="$rank" bash launch/multinode.sh "$@")
  if [ "$rank" = 0 ]; then command="echo \$\$ > $pid_file; $command"; fi
  on "${hosts[$rank]}" bash -c "$command"
}

stop() { # FILES: a pattern. A file may be of a launcher that has ended, and its process id of another process
  echo "ssh.sh: ending the run" >&2
  # shellcheck disable=SC2016
  on "${hosts[0]}" bash -c 'status=1
    for file in '"$1"'; do
      id=$(cat "$file" 2> /dev/null) || continue
      if grep -qs multinode "/proc/$id/cmdline"; then kill -TERM "$id" && status=0; else rm -f "$file"; fi
    done
    [ $status = 0 ] || echo "ssh.sh: no run that launch/ssh.sh has started is alive there" >&2
    exit $status'
}

if [ "$1" = --stop ]; then
  stop "$pids.*.pid"
  exit
fi
if [ -n "${MEGARL_INTERFACE:-}" ]; then
  echo "ssh.sh: set INTERFACE=$MEGARL_INTERFACE instead of MEGARL_INTERFACE, which no launcher reads" >&2
  exit 2
fi
trap 'stop "$pid_file" || true' INT TERM HUP
others=()
for ((rank = 1; rank < ${#hosts[@]}; rank++)); do
  (trap '' INT TERM HUP && start "$rank" "$@" 2>&1 | sed -u "s/^/${hosts[$rank]}: /") &
  others+=($!)
done
(trap '' INT TERM HUP && start 0 "$@") &
first=$!
while true; do # a signal interrupts `wait`
  if wait "$first"; then status=0; else status=$?; fi
  kill -0 "$first" 2> /dev/null || break
done
for job in ${others[@]+"${others[@]}"}; do wait "$job" || true; done
exit "$status"
