#!/bin/bash
# Trains on four nodes with eight GPUs each: one worker per node, with one replica per GPU.
#
#   sbatch examples/recipes/slurm.sh
#
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train-%j.log

set -euo pipefail
source "$HOME/replicax/bin/activate" # an environment that all nodes see

# What all workers read and write is on a file system that they share.
checkpoints="$SLURM_SUBMIT_DIR/checkpoints"

srun --ntasks=1 --nodes=1 replicax doctor --no-self-test

# When one worker ends with an error, `srun` ends the others. They resume when the job runs again.
srun --kill-on-bad-exit=1 python train.py "$checkpoints"
