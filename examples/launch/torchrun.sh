#!/bin/bash
# On every host, in a folder that all of them share: HEAD=ADDRESS NODES=4 bash torchrun.sh [run.yaml]
# HEAD is the address of one of the hosts. On a host that comes back after a failure, add DOCTOR=no. Runs that go on
# at the same time need different names: JOB=NAME.
set -euo pipefail
CONFIG=${1:-run.yaml}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else a host that comes back does not find the others (torch 2.13)

run() {  # run RESTARTS COMMAND ARGUMENTS...
    torchrun \
        --nnodes "$NODES" \
        --nproc-per-node "${RANKS:-gpu}" \
        --max-restarts "$1" \
        --rdzv-backend c10d \
        --rdzv-id "${JOB:-mics}-$2" \
        --rdzv-endpoint "$HEAD:29500" \
        --rdzv-conf join_timeout=300 \
        -m mics.cli "${@:2}"
}

if [[ ${DOCTOR:-yes} == yes ]]; then
    run 3 doctor --config "$CONFIG"  # no-go ends it here
fi
run 3 train --config "$CONFIG" --checkpoint.resume latest
