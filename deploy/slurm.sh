#!/bin/bash
# `patchloom train` on Slurm, one process per GPU: sbatch deploy/slurm.sh DATA --recipe deit --out /shared/runs/deit
# Two minutes before the limit of the queue the run saves its state and the job is queued again; a preempted or requeued
# job and one whose node failed start again by themselves. The same command line resumes. A rank that dies ends the job.
# Options of sbatch before the script replace those below: sbatch --nodes=8 --time=4:00:00 deploy/slurm.sh …
# Tested by tests/training/test_slurm.py.
#SBATCH --job-name=patchloom
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=patchloom-%j.log

srun --kill-on-bad-exit=1 python -m patchloom.cli train "$@"
code=$?
# 143: saved after SIGTERM. A job that a user or Slurm has ended is not running any more.
if [ $code -eq 143 ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
