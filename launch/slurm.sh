#!/bin/bash
# Train on a Slurm cluster, one process a GPU:
#
#   sbatch launch/slurm.sh --config configs/wmt14_big.py --workdir /shared/runs/big --batch.row-multiple 16
#
# from the root of a clone that all nodes see; every flag goes to train.py. docs/clusters.md explains the settings.
# Nodes and GPUs: change them here or on sbatch's command line; ntasks-per-node is the number of GPUs in a node.
#SBATCH --job-name=transformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Back into the queue after preemption or a node's failure.
#SBATCH --requeue
# Ahead of the time limit the processes, not this script, get SIGTERM: they save, and end with status 143 = 128 + SIGTERM.
#SBATCH --signal=TERM@300
set -uo pipefail

# JAX gives process i of a node its GPU i, so each must see them all: no binding. A process that ends with 143 is no reason to
# kill the others, which are about to; any other end of one is noticed by JAX, which then ends them.
srun --gpu-bind=none --kill-on-bad-exit=0 --wait=300 \
    "${PYTHON:-.venv/bin/python}" train.py --distributed "$@"
status=$?

# Saved, and not done. scancel ends this script as well, so a job that was cancelled does not come back.
if [[ $status -eq 143 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
