#!/usr/bin/env bash
# Two "nodes" of two processes, both on this machine, started by torchrun as on two machines.
#
#     examples/two_nodes.sh                                  # gradients stay fp32 inside a node, int8 between the two
#     examples/two_nodes.sh --strategy commopt_onebit        # further arguments go to digits.py
#
# On real machines, run the torchrun line once on each, with its own --node-rank and the first one's address.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

nodes=()
trap 'kill "${nodes[@]}" 2> /dev/null || true' EXIT
export OMP_NUM_THREADS=1 # four processes share the cores

for rank in 0 1; do
    torchrun --nnodes 2 --node-rank "$rank" --nproc-per-node 2 \
        --master-addr 127.0.0.1 --master-port "${MASTER_PORT:-29511}" \
        digits.py --num-nodes 2 --devices 2 "$@" &
    nodes+=($!)
done
wait "${nodes[0]}" && wait "${nodes[1]}"
