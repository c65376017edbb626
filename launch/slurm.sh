#!/usr/bin/env bash
# One run over the nodes of a Slurm job, from a folder with megarl that every node sees:
#
#   sbatch launch/slurm.sh recipes/dapo_qwen3_30b.yaml train.resume=auto [key=value ...]
#   sbatch --nodes=16 launch/slurm.sh recipes/grpo_deepseek_v3.yaml
#   sbatch --nodes=16 --gres=gpu:8 launch/slurm.sh recipes/cuda/grpo_deepseek_v3.yaml     NVIDIA
#
# Edit these lines and the three below for your cluster. Options on sbatch's command line override them.
#SBATCH --job-name=megarl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=npu:16
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Two minutes before its time limit, and at a preemption, the job receives SIGTERM: the run saves a checkpoint and ends. Slurm starts
# a preempted job again. With train.save_every and train.resume=auto it continues from the newest checkpoint.
#SBATCH --signal=TERM@120
#SBATCH --requeue
# Slurm says how many GPUs a node gives, and not how many NPUs.
export DEVICES_PER_NODE=${DEVICES_PER_NODE:-${SLURM_GPUS_ON_NODE:-16}}
# With an image, made as docs/devices_reference.md shows (leave out files that the hosts lack; on GPUs add --nv): container=(apptainer exec --bind /shared,/usr/local/Ascend/driver,/usr/local/dcmi,/usr/local/bin/npu-smi,/etc/ascend_install.info,/etc/hccn.conf megarl.sif)
container=()
export INTERFACE=${INTERFACE:-}                # the network interface between the nodes, where there are several

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
# One task per node, on all its cores. srun forwards signals, and the launcher of each node ends the processes that it started:
# srun must not kill launchers because another has ended.
exec srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" \
  --cpu-bind=none --kill-on-bad-exit=0 --unbuffered ${container[@]+"${container[@]}"} bash launch/multinode.sh "$@"
