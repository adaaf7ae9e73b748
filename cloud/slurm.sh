#!/bin/sh
# Train on two nodes with eight GPUs each, one task for each GPU: sbatch cloud/slurm.sh, in a clone that is set up.
#SBATCH --job-name=zerolab
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:30:00
set -eu
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
srun --kill-on-bad-exit "${ZEROLAB_PYTHON:-.venv/bin/python}" -m zerolab train --model gpt-11m --stage 3 "$@"
