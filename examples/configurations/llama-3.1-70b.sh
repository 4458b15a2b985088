#!/usr/bin/env bash
# A script as many teams have it: Llama-3.1-70B with Megatron-LM on 8 nodes of 8 GPUs.
TP=8
PP=4

MODEL=(
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --group-query-attention
  --num-query-groups 8
  --seq-length 8192
  --max-position-embeddings 131072
  --position-embedding-type rope
  --rotary-base 500000
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --vocab-size 128256
)

torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py "${MODEL[@]}" \
  --tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP \
  --sequence-parallel \
  --recompute-granularity full \
  --recompute-method uniform \
  --recompute-num-layers 1 \
  --micro-batch-size 1 \
  --global-batch-size 256 \
  --bf16 \
  --overlap-grad-reduce \
  --lr 1.5e-4 --train-iters 100000 --data-path my-data
