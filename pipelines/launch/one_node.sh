#!/usr/bin/env bash
# Every stage on one node, a process per GPU.
#
#   pipelines/launch/one_node.sh RECIPE.yaml RUN [options of `cfkv run`]
#   PROCESSES=4 pipelines/launch/one_node.sh RECIPE.yaml RUN                 # instead of 8
#   PROCESSES=2 pipelines/launch/one_node.sh RECIPE.yaml RUN --device cpu    # processes on a CPU
#   pipelines/launch/one_node.sh RECIPE.yaml RUN --shard 3/16                # this node is one job of 16
#
# Killed, also with -9 and at any moment: give the same command again, with any number of processes. Parts that
# are done stay, and the tables end up as those of a run that nobody killed. A `kill -9` of the launcher alone
# leaves its processes running; starting again beside them is safe, only some parts are done twice.
# Exit code 0: done. 1: some items failed (each has a row with its reason), or the error that is printed above
# torchrun's own report.
set -euo pipefail

if (($# < 2)); then
    echo "usage: $0 RECIPE.yaml RUN [options of cfkv run]" >&2
    exit 2
fi
exec torchrun --standalone --nproc-per-node "${PROCESSES:-8}" -m cfkv run "$@"
