#!/bin/bash
# Train on a Slurm cluster, one process for each GPU. From the root of a clone that all nodes see:
#
#   sbatch launch/slurm.sh --config configs/wmt14_big.py --workdir /shared/runs/big --batch.row-multiple 16
#
# Every flag goes to train.py. docs/clusters.md explains the settings. Change nodes and GPUs here or on
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
# Before the time limit the processes, not this script, get SIGTERM: they save and exit with status
# 143 = 128 + SIGTERM.
#SBATCH --signal=TERM@300
set -uo pipefail

# JAX gives process i of a node its GPU number i, so each process must see all GPUs: no binding. A process
# that exits with 143 is no reason to kill the others, which are saving too; JAX notices any other exit and
# ends the rest.
srun --gpu-bind=none --kill-on-bad-exit=0 --wait=300 \
    "${PYTHON:-.venv/bin/python}" train.py --distributed "$@"
status=$?

# Saved, but not finished: requeue. scancel ends this script as well, so a cancelled job does not come back.
if [[ $status -eq 143 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
