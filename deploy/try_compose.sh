#!/bin/sh
# Tries the compose stack in real containers: everything healthy, kernels without a compiler, a
# streamed answer, KV by lane shm, a decode node killed in mid-stream that nobody notices, the restart
# policy, two routers of which one dies, decode nodes replaced one by one under a stream and all at
# once under four, five nodes, a stop in good order. Leaves nothing behind.
#
#   deploy/try_compose.sh [--no-build]      needs docker, compose, curl, python3; DOCKER_HOST is heard
#
# Its exit status is 0 if each step did what its line says. See docs/operations.md.
set -eu
cd "$(dirname "$0")/.."

STREAM_TOKENS=${STREAM_TOKENS:-1500}
PATIENCE_S=${PATIENCE_S:-180}
# 43 tokens: more than one block, and full ones a decode node reads where they lie.
PROMPT="PagedAttention keeps the keys and values of each token in blocks of a fixed size, which \
need not lie one after the other. Who serves many requests at once wastes hardly any memory that \
way, because a block"
url=http://${BATON_HTTP_ADDRESS:-127.0.0.1:8000}
export BATON_SECRET=try-compose-secret BATON_REDIS_PASSWORD=try-compose-password
export BATON_API_KEY=try-compose-key COMPOSE_PROJECT_NAME=baton-try
folder=$(mktemp -d)
COMPOSE="docker compose -f deploy/compose.yaml"
if ! docker compose version >/dev/null 2>&1; then # 1.29 knows all of the file but its name
    sed '/^name:/d' deploy/compose.yaml >"$folder/compose.yaml"
    COMPOSE="docker-compose --project-directory deploy -f $folder/compose.yaml"
fi
export COMPOSE
stack() { $COMPOSE "$@"; }
say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
fail() {
    say "FAILED: $*"
    stack ps -a 2>/dev/null || stack ps || true
    stack logs --tail=30 || true
    exit 1
}
end() {
    stack down --volumes --timeout 5 >/dev/null 2>&1 || true
    rm -rf "$folder"
}
trap end EXIT

# until_true WHAT COMMAND...: repeat it until it succeeds, PATIENCE_S at most
until_true() {
    what=$1
    shift
    since=$(date +%s)
    until "$@"; do
        [ $(($(date +%s) - since)) -lt "$PATIENCE_S" ] || fail "not in time: $what"
        sleep 0.3
    done
}
# healthy N: N containers run, and each one's health check says so
healthy() {
    [ "$(docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
        --filter health=healthy | wc -l)" -eq "$1" ]
}
# containers SERVICE: the ids of its containers, stopped ones too
containers() {
    docker ps -aq --no-trunc --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
        --filter "label=com.docker.compose.service=$1"
}
connected() {
    [ "$(metrics | awk '/^baton_router_nodes.*state="ready"/ { n += $NF } END { print n + 0 }')" -eq "$1" ]
}
metrics() { curl -fsS -H "Authorization: Bearer $BATON_API_KEY" "$url/metrics"; }
# ask FILE: one streamed completion, always the same
ask() {
    curl -fsSN --max-time "$PATIENCE_S" "$url/v1/completions" -o "$1" \
        -H "Authorization: Bearer $BATON_API_KEY" -H 'Content-Type: application/json' \
        -d '{"model": "baton-demo", "prompt": "'"$PROMPT"'", "temperature": 0, "stream": true,
             "ignore_eos": true, "max_tokens": '"$STREAM_TOKENS"',
             "stream_options": {"include_usage": true}, "baton_timing": true}'
}
# text FILE: the text of a stream; fails unless it has all tokens and one end
text() {
    python3 - "$1" "$STREAM_TOKENS" <<'PYTHON'
import json, sys

events = [line[6:] for line in open(sys.argv[1]).read().splitlines() if line.startswith("data: ")]
assert events.count("[DONE]") == 1 and events[-1] == "[DONE]", "one end"
chunks = [json.loads(event) for event in events[:-1]]
told = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
assert told[-1] == int(sys.argv[2]), told
print("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))
PYTHON
}
retries() { grep -o '"retries": *[0-9]*' "$1" | tail -1 | grep -o '[0-9]*$'; }
# busy: the id of the decode node that runs something
busy() {
    metrics | grep '^baton_node_live_requests{.*role="decode".* [1-9]' \
        | sed 's/.*node="\([^"]*\)".*/\1/' | grep -m 1 .
}
# container_of NODE: each node says its id when it is ready
container_of() {
    for each in $(containers decode); do
        if docker logs "$each" 2>/dev/null | grep -q "\"node_id\": \"$1\""; then echo "$each"; fi
    done
}
# by_shm: hand-overs that the decode nodes took out of shared memory, and bytes that they read where
# they lie. A node's own metrics are told to who knows the secret, inside the network.
by_shm() {
    for each in $(containers decode); do
        docker exec -i "$each" python3 <<'PYTHON'
import hmac, os, urllib.request

token = hmac.digest(os.environb[b"BATON_SECRET"], b"metrics", "sha256").hex()
headers = {"Authorization": f"Bearer {token}"}
request = urllib.request.Request("http://127.0.0.1:9090/metrics", headers=headers)
print(urllib.request.urlopen(request, timeout=10).read().decode())
PYTHON
    done | awk '/^baton_kv_lane_fetches_total.*lane="shm"/ { fetches += $NF }
                /^baton_kv_lane_adopted_bytes_total.*lane="shm"/ { bytes += $NF }
                END { printf "%d %d\n", fetches, bytes }'
}

say "building and starting: Redis, router, 1 prefill node, 2 decode nodes"
how=--build
[ "${1:-}" != --no-build ] || how=--no-build
stack up -d "$how" >"$folder/up" 2>&1 || { cat "$folder/up"; fail "compose up"; }
until_true "5 healthy containers" healthy 5
until_true "3 connected nodes" connected 3
say "all 5 containers are healthy, 3 nodes are connected"

one=$(containers decode | head -1)
docker exec "$one" sh -c 'command -v cc || command -v gcc || command -v g++' && fail "a compiler"
docker exec "$one" python3 -c 'from baton.engine.kernels.cpu.library import state; print(state())' \
    >"$folder/kernels" 2>/dev/null || fail "no kernels"
grep -q '^compiled' "$folder/kernels" || fail "kernels: $(cat "$folder/kernels")"
docker exec "$one" sh -c 'ls /var/cache/baton/limits/*.json' >/dev/null || fail "no limits are kept"
docker exec "$one" touch /app/x 2>/dev/null && fail "its home can be written"
say "without a compiler and a home: $(head -c 60 "$folder/kernels")"

ask "$folder/whole" || fail "a streamed answer"
text "$folder/whole" >"$folder/whole.txt" || fail "the streamed answer is not whole"
say "a streamed answer: $STREAM_TOKENS tokens, '$(head -c 50 "$folder/whole.txt" | tr '\n' ' ')...'"

found=$(by_shm)
[ "${found% *}" -ge 1 ] || fail "no KV came by lane shm: $found"
[ "${found#* }" -ge 1 ] || fail "no KV was read where it lies: $found"
say "between containers: ${found% *} hand-over by lane shm, ${found#* } bytes read where they lie"

ask "$folder/killed" &
asking=$!
until_true "a decode node at work" busy >"$folder/busy"
victim=$(container_of "$(tail -1 "$folder/busy")")
[ -n "$victim" ] || fail "which container is node $(cat "$folder/busy")?"
docker kill "$victim" >/dev/null
kill -0 $asking 2>/dev/null || fail "the stream had ended before the kill: raise STREAM_TOKENS"
say "killed the decode container that streams, docker kill $(echo "$victim" | cut -c1-12)"
wait $asking || fail "the stream broke"
text "$folder/killed" >"$folder/killed.txt" || fail "the stream is not whole"
cmp -s "$folder/whole.txt" "$folder/killed.txt" || fail "the stream differs from that without a kill"
[ "$(retries "$folder/killed")" -ge 1 ] || fail "no retry: the kill came too late"
say "the stream went on, and is the same text; its receipt tells $(retries "$folder/killed") retry"
docker start "$victim" >/dev/null # docker does not restart what docker kill has ended
until_true "5 healthy containers" healthy 5

victim=$(containers decode | head -1)
before=$(docker inspect -f '{{.RestartCount}}' "$victim")
docker exec "$victim" sh -c 'kill -9 -1' >/dev/null 2>&1 || true
restarted() { [ "$(docker inspect -f '{{.RestartCount}}' "$victim")" -gt "$before" ]; }
until_true "a restart" restarted
until_true "5 healthy containers" healthy 5
until_true "3 connected nodes" connected 3
say "kill -9 of a decode node's process: the restart policy brought it back"

stack up -d --no-build --scale router=2 >"$folder/up" 2>&1 || { cat "$folder/up"; fail "scaling"; }
until_true "6 healthy containers" healthy 6
victim=$(containers router | head -1)
docker kill "$victim" >/dev/null
until_true "an answer beside a dead router" ask "$folder/routers"
text "$folder/routers" | cmp -s - "$folder/whole.txt" || fail "the other router answers otherwise"
docker start "$victim" >/dev/null
until_true "6 healthy containers" healthy 6
stack up -d --no-build --scale router=1 >/dev/null 2>&1 || fail "scaling"
until_true "5 healthy containers" healthy 5
until_true "3 connected nodes" connected 3
say "two routers behind one address; one was killed, the other answered"

containers decode | sort >"$folder/before"
ask "$folder/rolled" &
asking=$!
until_true "a decode node at work" busy >/dev/null
deploy/roll.sh decode --no-build >"$folder/up" 2>&1 || { cat "$folder/up"; fail "roll.sh"; }
wait $asking || fail "the stream broke"
text "$folder/rolled" | cmp -s - "$folder/whole.txt" || fail "the stream differs"
containers decode | sort | comm -12 - "$folder/before" | grep -q . && fail "an old one is left"
until_true "5 healthy containers" healthy 5
say "both decode nodes were replaced, one after the other, under a stream: the same text"

asking=
for each in 1 2 3 4; do
    ask "$folder/all$each" &
    asking="$asking $!"
done
until_true "a decode node at work" busy >/dev/null
stack up -d --no-deps --no-build --force-recreate decode >"$folder/up" 2>&1 || fail "recreating"
for each in $asking; do wait "$each" || fail "a stream broke"; done
for each in 1 2 3 4; do
    text "$folder/all$each" | cmp -s - "$folder/whole.txt" || fail "stream $each differs"
done
until_true "5 healthy containers" healthy 5
until_true "3 connected nodes" connected 3
say "both decode nodes were replaced at once, under four streams: the same text"

stack up -d --no-build --scale prefill=2 --scale decode=3 >/dev/null 2>&1 || fail "scaling"
until_true "7 healthy containers" healthy 7
until_true "5 connected nodes" connected 5
ask "$folder/scaled" || fail "a streamed answer of five nodes"
text "$folder/scaled" | cmp -s - "$folder/whole.txt" || fail "five nodes answer otherwise"
say "2 prefill and 3 decode nodes are connected; the answer is the same"

stack stop >"$folder/up" 2>&1 || fail "stop"
for each in $(containers router; containers prefill; containers decode); do
    status=$(docker inspect -f '{{.State.ExitCode}}' "$each")
    [ "$status" -eq 0 ] || fail "$(docker inspect -f '{{.Name}}' "$each") ended with $status"
done
say "every process ended in good order when it was told to"
say "PASSED"
