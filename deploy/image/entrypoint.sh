#!/bin/sh
# What a container runs: entrypoint.sh router|prefill_node|decode_node|encode_node [FLAGS].
#
# It adds to the image's environment what only the container knows: the name that other containers
# reach it by, and how long it may take to end. BATON_GRACE_S is the time between SIGTERM and SIGKILL
# (stop_grace_period, terminationGracePeriodSeconds; `docker stop` gives 10 s): what a margin leaves
# of it is for running requests. What is set already stays, and flags win over all of it.
set -eu
grace=${BATON_GRACE_S:-10}
if [ "$1" = router ]; then
    # first /readyz says no for a while, so that balancers notice; then running answers may end
    drain=$((grace / 6 < 5 ? grace / 6 : 5))
    export BATON_DRAIN_S="${BATON_DRAIN_S:-$drain}"
    export BATON_SHUTDOWN_S="${BATON_SHUTDOWN_S:-$((grace > drain + 5 ? grace - drain - 5 : 0))}"
else
    export BATON_DRAIN_S="${BATON_DRAIN_S:-$((grace > 10 ? grace - 5 : grace / 2))}"
    export BATON_ADVERTISE_HOST="${BATON_ADVERTISE_HOST:-$(hostname)}"
fi
exec python3 -m "$@"
