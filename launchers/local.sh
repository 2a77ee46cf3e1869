#!/usr/bin/env bash
# Trains on this machine: one process per GPU, or one alone where there is none; PROCESSES=N says otherwise.
#   launchers/local.sh --config configs/llama3_8b.yaml
#   PROCESSES=4 launchers/local.sh --config configs/demo.yaml --device cpu run.steps=20
# Everything behind the name goes to ultrascale.train as it is. Ctrl-C saves a checkpoint and ends the run; the same
# command goes on from there.
set -euo pipefail

gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Signals go to the ranks, which have five minutes to save; by default USR1 would end torchrun and leave them behind.
exec torchrun --standalone --nproc-per-node "$processes" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 --shutdown-timeout 300 \
    -m ultrascale.train "$@"
