#!/bin/bash
# Train on a Slurm cluster, one process per GPU. Run from the root of a clone that all nodes can access:
#
#   sbatch launch/slurm.sh --config configs/wmt14_big.py --workdir /shared/runs/big --batch.row-multiple 16
#
# All flags are passed to train.py. docs/clusters.md explains the settings. Change the number of nodes and
# GPUs here or on sbatch's command line; ntasks-per-node is the number of GPUs per node.
#SBATCH --job-name=transformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Requeue after preemption or a node failure.
#SBATCH --requeue
# Before the time limit, Slurm sends SIGTERM to the processes but not to this script. They save and
# exit with status 143 = 128 + SIGTERM.
#SBATCH --signal=TERM@300
set -uo pipefail

# JAX assigns GPU i of a node to process i, so each process must see all GPUs (no binding). When a process
# exits with 143, the other processes may still be saving, so srun must not kill them. With any other exit
# status, JAX stops all processes.
srun --gpu-bind=none --kill-on-bad-exit=0 --wait=300 \
    "${PYTHON:-.venv/bin/python}" train.py --distributed "$@"
status=$?

# The run is saved but not finished, so requeue it. scancel also ends this script, so a canceled job is not
# requeued.
if [[ $status -eq 143 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
