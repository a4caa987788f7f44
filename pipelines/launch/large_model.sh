#!/usr/bin/env bash
# A model that is larger than one GPU: one process, whose layers are spread over all GPUs of the node.
#
#   pipelines/launch/large_model.sh RECIPE.yaml RUN [options of `cfkv run`]
#   pipelines/launch/large_model.sh RECIPE.yaml RUN --shard 1/4               # the second of four such nodes
#   CUDA_VISIBLE_DEVICES=0,1,2,3 pipelines/launch/large_model.sh RECIPE.yaml RUN --shard 0/2 &
#   CUDA_VISIBLE_DEVICES=4,5,6,7 pipelines/launch/large_model.sh RECIPE.yaml RUN --shard 1/2 &    # two on a node
#
# No torchrun: each of its processes would take all the GPUs for itself, which cfkv refuses. The jobs of --shard
# do not know of each other, and the one that ends last correlates and writes the report.
#
# Killed, also with -9 and at any moment: give the same command again. Parts that are done stay, and the tables
# end up as those of a run that nobody killed. A smaller `trace.part_size` in the recipe loses less work.
set -euo pipefail

if (($# < 2)); then
    echo "usage: $0 RECIPE.yaml RUN [options of cfkv run]" >&2
    exit 2
fi
exec cfkv run "$@" --device-map auto
