#!/usr/bin/env bash
# One run over the nodes of a Slurm job, from a folder with megarl that every node sees:
#
#   sbatch launch/slurm.sh recipes/dapo_qwen3_30b.yaml train.resume=auto [key=value ...]
#   sbatch --nodes=16 launch/slurm.sh recipes/grpo_deepseek_v3.yaml
#   sbatch --nodes=16 --gres=gpu:8 launch/slurm.sh recipes/cuda/grpo_deepseek_v3.yaml     NVIDIA
#
# The lines to edit for your cluster are these, and the three below. What is on sbatch's own command line goes before.
#SBATCH --job-name=megarl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=npu:16
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# The run is told to end two minutes before its time is over, as by a preemption: it ends in order. Slurm starts a job that
# was preempted again, which with train.save_every and train.resume=auto goes on from the newest checkpoint.
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Slurm says how many GPUs a node gives, and not how many NPUs.
export DEVICES_PER_NODE=${DEVICES_PER_NODE:-${SLURM_GPUS_ON_NODE:-16}}
# With an image (leave out files that the hosts lack; on GPUs add --nv): container=(apptainer exec --bind /shared,/usr/local/Ascend/driver,/usr/local/dcmi,/usr/local/bin/npu-smi,/etc/ascend_install.info,/etc/hccn.conf megarl.sif)
container=()
interface=${MEGARL_INTERFACE:-}                 # the network interface between the nodes, where there are several

set -eu
if [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "launch/slurm.sh runs in a Slurm job: sbatch launch/slurm.sh RECIPE [key=value ...]" >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:?}" # Slurm runs a copy of this file
if [ ! -f launch/multinode.sh ]; then
  echo "no launch/multinode.sh in $PWD: call sbatch in megarl's folder, which every node must see" >&2
  exit 2
fi
if [ -n "$interface" ]; then
  for library in HCCL GLOO TP NCCL; do export "${library}_SOCKET_IFNAME=$interface"; done
fi
# One task a node, on all of its cores; srun hands signals on, and the launcher of each node ends what it started there:
# srun must not kill them for one that is done earlier.
exec srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" \
  --cpu-bind=none --kill-on-bad-exit=0 --unbuffered ${container[@]+"${container[@]}"} bash launch/multinode.sh "$@"
