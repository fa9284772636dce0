#!/bin/bash
# Train on a Slurm cluster, one process for each GPU. From the root of a clone that all nodes see:
#
#   sbatch launch/slurm.sh --config configs/wmt14_big.py --workdir /shared/runs/big --batch.row-multiple 16
#
# All flags go to train.py. docs/clusters.md explains the settings. Change nodes and GPUs here or on
# sbatch's command line; ntasks-per-node is the number of GPUs in a node.
#SBATCH --job-name=transformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Requeue after preemption or a node's failure.
#SBATCH --requeue
# Before the time limit, Slurm sends SIGTERM to the processes but not to this script. They save and
# exit with status 143 = 128 + SIGTERM.
#SBATCH --signal=TERM@300
set -uo pipefail

# JAX assigns GPU i of a node to process i, so each process must see all GPUs: no binding. When a process
# exits with 143, the other processes may still be saving, so srun must not kill them. On any other exit
# JAX stops all processes.
srun --gpu-bind=none --kill-on-bad-exit=0 --wait=300 \
    "${PYTHON:-.venv/bin/python}" train.py --distributed "$@"
status=$?

# Saved but not finished: requeue. scancel also ends this script, so a canceled job is not requeued.
if [[ $status -eq 143 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
