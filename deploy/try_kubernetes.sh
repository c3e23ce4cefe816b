#!/bin/sh
# Tries the chart in a real cluster: the server takes every object, all pods ready, a streamed answer,
# a pod of each role deleted in mid-stream; under streams, every Deployment restarted, the decode nodes
# scaled, evictions and their budget, a machine drained; then, with TLS everywhere, the secret and the
# certificates replaced under streams. Leaves nothing behind.
#
#   deploy/try_kubernetes.sh [VALUES.yaml]     your values, on top of the script's own
#
# STREAMS (16) run at once, each followed by another one until the change is done. DRAIN (nothing) names
# a machine of the cluster that the script may drain: it cordons it for a while, and evicts its own pods
# from it.
#
# It needs kubectl with a cluster of Kubernetes 1.20 or newer (KUBECONFIG is heard), helm and openssl 3;
# the four images of deploy/kubernetes/images.sh and redis:7.4-alpine, where that cluster finds them;
# and room for eleven pods: 6 GiB. Nothing is asked through a port of this machine: a pod of the
# router's image is the client. Its exit status is 0 if each step did what its line says. See
# docs/operations.md.
set -eu
cd "$(dirname "$0")/.."

STREAMS=${STREAMS:-16}
STREAM_TOKENS=${STREAM_TOKENS:-1500}
PATIENCE_S=${PATIENCE_S:-600}
HELM=${HELM:-helm}
DRAIN=${DRAIN:-}
PROMPT="PagedAttention keeps the keys and values of each token in blocks of a fixed size, which \
need not lie one after the other. Who serves many requests at once wastes hardly any memory that \
way, because a block"
workloads="statefulset/baton-redis deployment/baton-decode deployment/baton-prefill deployment/baton-router"
url=http://baton-router:8000/v1/completions
space=baton-try-$(openssl rand -hex 3)
folder=$(mktemp -d)
mine() { kubectl --namespace "$space" "$@"; }
say() { printf '%s  %s\n' "$(date +%T)" "$*"; }
fail() { # on stderr: what waits may be quiet
    exec >&2
    say "FAILED: $*"
    mine get pods -o wide || true
    mine get events --sort-by=.lastTimestamp | tail -20 || true
    mine logs --selector app.kubernetes.io/name=baton --tail=60 --prefix || true
    exit 1
}
end() {
    [ -z "$DRAIN" ] || kubectl uncordon "$DRAIN" >/dev/null 2>&1 || true
    kubectl delete namespace "$space" --ignore-not-found --wait=false >/dev/null 2>&1 || true
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
        sleep 0.5
    done
}
# staying OPTION...: the names of those pods that are not on their way out
staying() {
    mine get pods "$@" -o jsonpath='{range .items[*]}{.metadata.name} {.metadata.deletionTimestamp}{"\n"}{end}' \
        | awk 'NF == 1 { print $1 }'
}
pods() { staying --selector "app.kubernetes.io/component=$1"; }
ready() { mine rollout status "$1" --timeout "${PATIENCE_S}s" >/dev/null || fail "not ready: $1"; }
all_ready() {
    for each in $workloads; do ready "$each"; done
}
# metrics: of all routers, each line with its pod in front
metrics() {
    for each in $(pods router); do
        mine exec "$each" -- python3 -c '
import os, ssl, sys, urllib.request

headers = {"Authorization": "Bearer " + os.environ["BATON_API_KEY"]}
request = urllib.request.Request(sys.argv[2] + "://127.0.0.1:8000/metrics", headers=headers)
itself = ssl._create_unverified_context()
for line in urllib.request.urlopen(request, timeout=60, context=itself).read().decode().splitlines():
    print(sys.argv[1], line)' "$each" "${url%%:*}" 2>/dev/null || true
    done
}
# connected N: each router has N nodes that are ready
connected() {
    metrics | awk -v wanted="$1" '/ baton_router_nodes.*state="ready"/ { n[$1] += $NF }
        END { for (each in n) { all += 1; good += n[each] == wanted } exit !(all && good == all) }'
}
# busy: the decode node that runs something; a node's name is its pod's
busy() {
    metrics | sed -n 's/.* baton_node_live_requests{.*node="\([^"]*\)".*role="decode".* [1-9].*/\1/p
        s/.* baton_node_live_requests{.*role="decode".*node="\([^"]*\)".* [1-9].*/\1/p' | grep -m 1 .
}
# asks ROUTER: the router that holds a stream
asks() { metrics | awk '$2 == "baton_live_requests" && $NF > 0 { print $1 }' | grep -m 1 .; }
# streaming N: so many requests are live
streaming() { metrics | awk -v wanted="$1" '$2 == "baton_live_requests" { n += $NF } END { exit n < wanted }'; }
# ask FILE [STREAMS [UNTIL]]: streamed completions, always the same, STREAMS (1) at once; each is followed
# by another one until the client has the file UNTIL. Their number and their text, only if all are the
# same, each with all tokens and one end.
ask() {
    mine exec -i client -- python3 - "$url" "$STREAM_TOKENS" "$PROMPT" "${2:-1}" "${3:-}" <<'PYTHON' >"$1"
import asyncio, json, os, ssl, sys, time

import httpx

url, tokens, prompt, streams, until = sys.argv[1:]
body = {
    "model": "baton-demo", "prompt": prompt, "temperature": 0, "stream": True,
    "ignore_eos": True, "max_tokens": int(tokens), "stream_options": {"include_usage": True},
}
headers = {"Authorization": "Bearer " + os.environ["BATON_API_KEY"]}


async def read(events):
    trusted = ssl.create_default_context()
    if url.startswith("https"):
        trusted = ssl.create_default_context(cafile="/tmp/ca.crt")
    async with httpx.AsyncClient(verify=trusted, timeout=600, headers=headers) as client:
        async with client.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])


async def ask():
    events, began = [], time.time()
    try:
        await read(events)
    except httpx.TransportError as error:
        causes = [error]
        while causes[-1].__context__ is not None:
            causes.append(causes[-1].__context__)
        sys.exit(f"{len(events)} events in {time.time() - began:.1f} s, then {causes!r}")
    assert events.count("[DONE]") == 1 and events[-1] == "[DONE]", "one end"
    chunks = [json.loads(event) for event in events[:-1]]
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    assert told[-1] == body["max_tokens"], told
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def one_by_one():
    texts = [await ask()]
    while until and not os.path.exists(until):
        texts.append(await ask())
    return texts


async def all_at_once():
    return await asyncio.gather(*(one_by_one() for _ in range(int(streams))))


texts = [text for told in asyncio.run(all_at_once()) for text in told]
assert len(set(texts)) == 1, "the texts differ"
print(len(texts))
print(texts[0])
PYTHON
}
text() { tail -n +2 "$1"; }
same() { text "$1" | cmp -s "$folder/text" - || fail "$2: the text differs"; }
# under_streams WHAT COMMAND...: STREAMS streams begin, the command runs, the streams end as always
under_streams() {
    change=$1
    shift
    began=$(date +%s)
    mine exec client -- rm -f /tmp/changed
    ask "$folder/streams" "$STREAMS" /tmp/changed &
    asking=$!
    until_true "$STREAMS streams" streaming "$STREAMS"
    changing=$(date +%s)
    "$@" || fail "$change"
    lasted=$(($(date +%s) - changing))
    kill -0 "$asking" 2>/dev/null || fail "$change: a stream broke"
    mine exec client -- touch /tmp/changed
    wait "$asking" || fail "$change: a stream broke"
    same "$folder/streams" "$change"
    all_ready
    say "$change took $lasted s: $(head -1 "$folder/streams") streams, $STREAMS at once, the same text;" \
        "$(($(date +%s) - began)) s with all streams"
}
# evict POD: 0 if its budget lets it go
evict() {
    printf '{"apiVersion": "%s", "kind": "Eviction", "metadata": {"name": "%s", "namespace": "%s"}}' \
        "$policy" "$1" "$space" \
        | kubectl create --raw "/api/v1/namespaces/$space/pods/$1/eviction" -f - >"$folder/evicted" 2>&1
}

# render OBJECTS -f VALUES...: what the chart makes of the values for this server
render() {
    objects=$1
    shift
    "$HELM" template baton deploy/kubernetes/chart --namespace "$space" --kube-version "$server" "$@" \
        >"$objects" 2>"$folder/said" || { cat "$folder/said"; fail "helm"; }
}
# taken OBJECTS: the server would take them; how many they are
taken() {
    mine apply --dry-run=server --validate="$how" -f "$1" >"$folder/dry" 2>&1 \
        || { cat "$folder/dry" >&2; fail "the server refuses an object"; }
    wc -l <"$folder/dry"
}
# known OBJECTS: those of an API that this server has
known() {
    kubectl api-versions >"$folder/apis"
    awk 'NR == FNR { apis[$0]; next }
        $0 == "---" { if (good) printf "%s", object; object = ""; good = 0 }
        { object = object $0 "\n" }
        /^apiVersion: / { good = $2 in apis }
        END { if (good) printf "%s", object }' "$folder/apis" "$1"
}

say "rendering, and what the server says of it"
server=$(kubectl version -o json | sed -n '/"serverVersion"/,/}/ s/.*"gitVersion": "\(.*\)".*/\1/p')
policy=policy/v1
kubectl api-versions | grep -qx policy/v1 || policy=policy/v1beta1
kubectl create namespace "$space" >/dev/null || fail "no namespace"
how=true # no unknown field; a kubectl of 1.25 or newer calls it `strict`
if kubectl apply --help | grep -q 'validate=.strict'; then how=strict; fi
cat >"$folder/own.yaml" <<'YAML'
router: {replicas: 2, graceSeconds: 300}
nodes: {graceSeconds: 120, deletionCost: true}
prefill: {replicas: 2}
decode: {replicas: 2}
YAML
set -- -f deploy/kubernetes/values/trial.yaml -f "$folder/own.yaml" ${1:+-f "$1"}
render "$folder/objects.yaml" "$@"
num_objects=$(taken "$folder/objects.yaml")
say "a dry run on the server of Kubernetes $server takes $num_objects objects, validation: $how"
# The values to start from, but for those that need a newer Kubernetes than 1.20.
sets=
for each in ha gpu,rdma external_redis tls,mutual_tls images chat coder picker monitoring,keda; do
    # shellcheck disable=SC2046
    render "$folder/all.yaml" $(echo ",$each" | sed 's#,\([a-z_]*\)# -f deploy/kubernetes/values/\1.yaml#g')
    known "$folder/all.yaml" >"$folder/known.yaml"
    num_objects=$(taken "$folder/known.yaml")
    sets="$sets $each ($num_objects of $(grep -c '^apiVersion:' "$folder/all.yaml"))"
done
say "and of the values to start from those of the APIs that it has:$sets"

# apply OBJECTS: until all pods are ready
apply() {
    applied=$(date +%s)
    mine apply --validate="$how" -f "$1" >/dev/null || fail "apply"
    all_ready
    until_true "4 connected nodes" connected 4
    say "all pods are ready, each of 2 routers has 4 nodes: $(($(date +%s) - applied)) s after they were asked for"
}
never_restarted() {
    mine get pods -o jsonpath='{range .items[*]}{.status.containerStatuses[*].restartCount}{"\n"}{end}' \
        | awk '{ for (i = 1; i <= NF; i++) if ($i) exit 1 }' || fail "a container was restarted"
    say "no container was restarted by its probes"
}

key=$(openssl rand -hex 16)
mine create secret generic baton --from-literal=secret="$(openssl rand -hex 32)" \
    --from-literal=api-key="$key" --from-literal=redis-password="$(openssl rand -hex 32)" >/dev/null
mine apply -f - >/dev/null <<YAML || fail "no client"
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: client
      image: $(sed -n 's/.*image: \("\(.*\/\)*baton-router:.*"\)/\1/p' "$folder/objects.yaml" | head -1)
      imagePullPolicy: IfNotPresent
      command: [sleep, "36000"]
      env: [{name: BATON_API_KEY, value: $key}]
      resources: {requests: {cpu: 100m, memory: 128Mi}}
YAML
apply "$folder/objects.yaml"
until_true "a client" mine wait pod/client --for=condition=Ready --timeout=10s >/dev/null

ask "$folder/whole" || fail "a streamed answer"
text "$folder/whole" >"$folder/text"
say "a streamed answer: $STREAM_TOKENS tokens, '$(head -c 50 "$folder/text" | tr '\n' ' ')...'"

for role in decode prefill router; do
    ask "$folder/deleted" &
    asking=$!
    until_true "a decode node at work" busy >"$folder/busy"
    case $role in
    decode) victim=$(tail -1 "$folder/busy") ;;
    prefill) victim=$(pods prefill | head -1) ;;
    router)
        until_true "a router with a stream" asks >"$folder/asks"
        victim=$(pods router | grep -v -x "$(tail -1 "$folder/asks")" | head -1)
        ;;
    esac
    mine delete pod "$victim" --grace-period=0 --force >/dev/null 2>&1 || fail "deleting $victim"
    wait $asking || fail "the stream broke when $victim was deleted"
    same "$folder/deleted" "$victim was deleted"
    all_ready
    until_true "4 connected nodes" connected 4
    say "deleted $victim in mid-stream, without grace: the same text"
done

for role in decode prefill router; do
    restart() {
        mine rollout restart "deployment/baton-$role" >/dev/null && ready "deployment/baton-$role"
    }
    under_streams "restarting each $role pod" restart
done
until_true "4 connected nodes" connected 4

scale() {
    for count in 4 1; do
        mine scale deployment/baton-decode --replicas="$count" >/dev/null
        ready deployment/baton-decode
    done
}
under_streams "decode nodes from 2 to 4 to 1" scale
mine scale deployment/baton-decode --replicas=2 >/dev/null
all_ready
until_true "4 connected nodes" connected 4

evictions() {
    first=$(busy)
    second=$(pods decode | grep -v -x "$first" | head -1)
    evict "$first" || { cat "$folder/evicted"; return 1; }
    ! evict "$second" || return 1
    grep -q "disruption budget" "$folder/evicted"
}
under_streams "an eviction, and a second one that the budget refuses," evictions

# drain: every pod leaves that machine, as soon as its budget lets it
drain() {
    set -- --selector app.kubernetes.io/name=baton --field-selector "spec.nodeName=$DRAIN"
    kubectl cordon "$DRAIN" >/dev/null || return 1
    refused=0
    gone=0
    since=$(date +%s)
    while [ -n "$(mine get pods "$@" -o name)" ]; do
        [ $(($(date +%s) - since)) -lt "$PATIENCE_S" ] || return 1
        for each in $(staying "$@"); do
            if evict "$each"; then
                gone=$((gone + 1))
            elif grep -q "disruption budget" "$folder/evicted"; then
                refused=$((refused + 1))
            fi
        done
        sleep 1
    done
    told="$gone pods left within $(($(date +%s) - since)) s, the budget said no $refused times"
}
if [ -n "$DRAIN" ]; then
    mine scale deployment/baton-decode --replicas=4 >/dev/null
    all_ready
    until_true "6 connected nodes" connected 6
    crowd=$(staying --selector app.kubernetes.io/component=decode --field-selector "spec.nodeName=$DRAIN" | wc -l)
    under_streams "draining $DRAIN" drain
    [ "$crowd" -lt 2 ] || [ "$refused" -gt 0 ] || fail "$crowd decode nodes left at once"
    say "$told"
    kubectl uncordon "$DRAIN" >/dev/null
    mine scale deployment/baton-decode --replicas=2 >/dev/null
    all_ready
    until_true "4 connected nodes" connected 4
fi


# costs N: so many pods say what they cost
costs() {
    [ "$(mine get pods -o go-template='{{range .items}}{{range $name, $value := .metadata.annotations}}
        {{if eq $name "controller.kubernetes.io/pod-deletion-cost"}}cost {{$value}}{{end}}{{end}}{{end}}' \
        | grep -c cost)" -eq "$1" ]
}
until_true "4 nodes with a deletion cost" costs 4
say "each node says what its pod costs"
never_restarted

. deploy/kubernetes/try_rotation.sh
say "PASSED"
