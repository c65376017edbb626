#!/usr/bin/env bash
# One run over several nodes. Start it once on every node, with the same arguments:
#
#   launch/multinode.sh RECIPE [key=value ...]
#   launch/multinode.sh -- COMMAND ...          any command, in place of training
#
#   MASTER_ADDR          address of node rank 0
#   NODE_RANK, NNODES    which node this is, and of how many (default: the only one)
#   DEVICES_PER_NODE     devices of each node (default: what Ray finds). Also on a single node, which then starts Ray here
#   MASTER_PORT          Ray's port on node rank 0 (6379); the next two are used as well
#   MEGARL_JOIN_TIMEOUT  seconds until every node must have joined (600). With cluster.elastic, a run that goes on then starts without the rest
#   INTERFACE            the network interface between the nodes (ip -br addr), where they have several: the value of
#                        HCCL_, GLOO_, TP_ and NCCL_SOCKET_IFNAME, each unless it is set
#   MEGARL_NODE_IP       this node's address, where it has several
#   MEGARL_JOIN_DIR      a folder that every node sees; node rank 0 writes the run's secret there (runs_dir)
#   MEGARL_VENV          the Python environment (.venv)
#
# What Slurm (srun --ntasks-per-node=1), PyTorchJob, JobSet and StatefulSets set is understood; where
# RAY_ADDRESS is set (KubeRay), that cluster is joined. Every node returns the run's exit status.
# A signal to a node ends the run in order, in 300 s at most: a checkpoint that is being written is completed. A second
# signal ends it at once. With rollout.min_engines, a node that has only engines leaves instead, and the run goes on.
set -eu
case "${1:-}" in
  -h | --help)
    sed -n '2,/^set -eu/{/^set -eu/d; s/^# \{0,1\}//; p;}' "$0"
    exit 0
    ;;
esac
if [ -n "${MEGARL_INTERFACE:-}" ]; then
  echo "megarl multinode: set INTERFACE=$MEGARL_INTERFACE instead of MEGARL_INTERFACE, which no launcher reads" >&2
  exit 2
fi
if [ -n "${INTERFACE:-}" ]; then
  for name in {HCCL,GLOO,TP,NCCL}_SOCKET_IFNAME; do export "$name=${!name:-$INTERFACE}"; done
fi
cd "$(dirname "$0")/.."
python=python3
if [ -n "${MEGARL_VENV:-}" ] || [ -x .venv/bin/python ]; then python=${MEGARL_VENV:-.venv}/bin/python; fi
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("omegaconf") is None)' > /dev/null 2>&1; then
  echo "megarl multinode: megarl's packages are not installed for $(command -v "$python" || echo "$python"). On a laptop run" \
    "bash launch/install_cpu.sh first; on a node with devices start this in the image's container, or set MEGARL_VENV." >&2
  exit 2
fi
wanted=$(ulimit -Hn)
if [ "$wanted" = unlimited ] || [ "$wanted" -gt 65536 ]; then wanted=65536; fi
ulimit -n "$wanted" # Ray keeps a connection to every worker
exec "$python" -m megarl.commands.launch.multinode "$@"
