#!/bin/sh
# vLLM with the plug-in: prompts and answers are there after a restart, and in other replicas.
#     pip install vllm && pip install .     (the latter in the clone)
#     sh vllm_serve.sh MODEL [DIR or kvstore://unix:/path] [more flags of vllm serve]
# Two replicas: run it twice with the same DIR and another --port.
set -eu
model=${1:?a model: sh vllm_serve.sh MODEL [STORE] [flags]}
store=${2:-$PWD/my-cache}
shift; [ $# -eq 0 ] || shift
exec vllm serve "$model" --kv-transfer-config \
  "{\"kv_connector\": \"KVStoreConnector\", \"kv_role\": \"kv_both\",
    \"kv_connector_extra_config\": {\"store\": \"$store\"}}" "$@"
