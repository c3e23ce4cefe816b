#!/bin/sh
# Replaces the containers of a service one at a time, with the image and options of now:
#
#   deploy/roll.sh router|prefill|decode|encode [--no-build]
#
# A new container is healthy before an old one is told to end; that one hands its requests over, or
# lets them finish within its grace period. COMPOSE says how compose is called
# (default: docker compose -f deploy/compose.yaml).
set -eu
cd "$(dirname "$0")/.."
service=$1
compose=${COMPOSE:-docker compose -f deploy/compose.yaml}
PATIENCE_S=${PATIENCE_S:-1800} # a large model loads slowly

all_healthy() {
    for each in $($compose ps -q "$service"); do
        [ "$(docker inspect -f '{{.State.Health.Status}}' "$each")" = healthy ] || return 1
    done
}
wait_for_all() {
    since=$(date +%s)
    until all_healthy; do
        if [ $(($(date +%s) - since)) -ge "$PATIENCE_S" ]; then
            echo "$service: a new container is not healthy; the old ones go on" >&2
            exit 1
        fi
        sleep 1
    done
}

[ "${2:-}" = --no-build ] || $compose build "$service"
old=$($compose ps -q "$service")
one_more=$(($(echo "$old" | wc -l) + 1))
for container in $old; do
    $compose up -d --no-deps --no-recreate --no-build --scale "$service=$one_more" "$service"
    wait_for_all
    sleep 3 # the others hear of it with its next heartbeat
    docker stop "$container" >/dev/null
    docker rm "$container" >/dev/null
done
wait_for_all
