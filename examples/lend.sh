#!/bin/bash
#SBATCH --gpus=2 --time=1-00:00:00
# A server whose idle time is lent to runs like examples/a800-8-borrow.toml.
libra-hpc lend serve --slo ttft=500ms --memory 30GiB --runs runs -- \
    vllm serve /shared/models/Qwen3-4B --tensor-parallel-size 2 --gpu-memory-utilization 0.5
