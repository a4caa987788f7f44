#!/usr/bin/env bash
# Every stage on several nodes that share a file system, a process per GPU. The same command on every node:
#
#   NODES=4 HEAD=node0:29500 pipelines/launch/several_nodes.sh RECIPE.yaml RUN [options of `cfkv run`]
#
# NODES is their number, HEAD one of them with a free port, PROCESSES (8) the processes of each; RUN lies on the
# shared file system. Inside a Slurm allocation of whole nodes:
#
#   export NODES=$SLURM_JOB_NUM_NODES HEAD=$(scontrol show hostnames | head -n 1):29500
#   srun --ntasks-per-node 1 pipelines/launch/several_nodes.sh RECIPE.yaml RUN
#
# The nodes meet once, at HEAD; no data goes over the network between them. A node that is lost ends the others:
# give the same command again, on any number of nodes. Parts that are done stay, and the tables end up as those
# of a run that nobody killed. Where nodes come and go, start one_node.sh with --shard i/n on each instead: then
# they do not know of each other.
set -euo pipefail

if (($# < 2)) || [[ -z ${NODES:-} || -z ${HEAD:-} ]]; then
    echo "usage: NODES=4 HEAD=node0:29500 $0 RECIPE.yaml RUN [options of cfkv run]" >&2
    exit 2
fi
exec torchrun --nnodes "$NODES" --nproc-per-node "${PROCESSES:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "${JOB:-${SLURM_JOB_ID:-cfkv}}" \
    -m cfkv run "$@"
