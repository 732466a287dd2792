#!/usr/bin/env bash
# Fine-tune Qwen3-8B on the 64 logical cores of one trn2.48xlarge: TP 4 x FSDP 16, through torchrun.
# This script was not run on Trainium.
#
#     MODEL=Qwen/Qwen3-8B DATA=text.jsonl RUN=run examples/trn2_torchrun.sh
#
# `qwen3conv train` does the same in one command; here the steps are apart, to be changed at will.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=$(realpath "${DATA:?a .jsonl or .parquet file with texts}")
RUN=$(realpath -m "${RUN:-run}")
STEPS=${STEPS:-1000}
SEQ_LEN=${SEQ_LEN:-4096}

# Two physical cores make a logical one, with 24 GiB: 64 of them. It is the default on trn2, said here all the same.
export NEURON_LOGICAL_NC_CONFIG=2
# An op without a kernel is an error, not a slow detour through the CPU (the default since Neuron 2.33).
export TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION=1

qwen3conv doctor --device neuron --model 8B
mkdir -p "$RUN"
[ -e "$RUN/source" ] || qwen3conv hf-to-dcp "$MODEL" "$RUN/source"

torchrun --standalone --nproc_per_node 64 -m qwen3conv.training --device neuron \
    --module qwen3conv.training.recipes.native --config qwen3_8b \
    --hf_assets_path "$RUN/source/hf_assets" --dump_folder "$RUN" --checkpoint.initial_load_path "$RUN/source" \
    --dataloader.dataset_path "$DATA" \
    --parallelism.data_parallel_shard_degree 16 --parallelism.tensor_parallel_degree 4 \
    --parallelism.expert_parallel_degree 1 \
    --training.steps "$STEPS" --training.seq_len "$SEQ_LEN" "$@"

qwen3conv dcp-to-hf "$RUN/checkpoint/step-$STEPS" "$RUN/export" --dtype bfloat16 --like "$RUN/source"
qwen3conv verify "$RUN/export"
