# The last part of deploy/try_kubernetes.sh, which reads it: the chart with TLS for clients and mutual TLS
# between routers and nodes. Under streams the deployment's secret and all certificates are replaced,
# step by step as docs/security.md says. After each step a pod of each role is replaced, too: so all
# others open connections to it, and it to them, with what the Secrets hold by then.
# shellcheck shell=sh disable=SC2154

new() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "$@" 2>/dev/null; }
# certify CA NAME NAMES: a certificate of that CA
certify() {
    mkdir -p "$folder/$1/$2"
    new -subj "/CN=$2" -CA "$folder/$1.pem" -CAkey "$folder/$1.key" -addext basicConstraints=CA:FALSE \
        -addext "subjectAltName=$3" -keyout "$folder/$1/$2/tls.key" -out "$folder/$1/$2/tls.crt"
}
# authorities CA...: as one file
authorities() { for each in "$@"; do cat "$folder/$each.pem"; done; }
# certificates CA [OTHER]: the Secrets hold those of CA; nodes and routers believe both
certificates() {
    authorities "$@" >"$folder/ca.crt"
    for name in nodes public; do
        mine create secret generic "baton-$name" --type=kubernetes.io/tls --from-file="$folder/$1/$name/tls.crt" \
            --from-file="$folder/$1/$name/tls.key" --from-file="$folder/ca.crt" --dry-run=client -o yaml \
            | mine apply -f - >/dev/null || return 1
    done
    cp "$folder/$1/nodes/tls.crt" "$folder/nodes.crt"
    cp "$folder/$1/public/tls.crt" "$folder/public.crt"
}
# secrets SECRET...: the deployment's, one on each line
secrets() {
    printf '%s\n' "$@" >"$folder/secret"
    mine patch secret baton -p "{\"data\": {\"secret\": \"$(base64 "$folder/secret" | tr -d '\n')\"}}" >/dev/null
}
# believe CA...: what the client believes
believe() { authorities "$@" | mine exec -i client -- sh -c 'cat >/tmp/ca.crt'; }
# uses POD URL FILE... -- OPTION=PATH...: the pod's process uses the files as they are here. Quiet, if not yet.
uses() {
    pod=$1 page=$2
    shift 2
    : >"$folder/wanted"
    while [ "$1" != -- ]; do cat "$folder/$1" >>"$folder/wanted"; shift; done
    shift
    digest=$(openssl dgst -sha256 -r <"$folder/wanted" | cut -c1-64)
    mine exec -i "$pod" -- python3 - "$page" "$digest" "$@" <<'PYTHON' 2>/dev/null
import hashlib, hmac, os, ssl, sys, urllib.request

page, digest, *options = sys.argv[1:]
paths = {option: files.split(",") for option, _, files in (each.partition("=") for each in options)}
held = b"".join(open(path, "rb").read() for each in paths.values() for path in each)
assert hashlib.sha256(held).hexdigest() == digest, "not mounted yet"
secret = open("/etc/baton/secret/secret", "rb").readline().strip()
token = os.environ.get("BATON_API_KEY") or hmac.digest(secret, b"metrics", "sha256").hex()
itself = ssl._create_unverified_context()
itself.load_cert_chain("/etc/baton/node-tls/tls.crt", "/etc/baton/node-tls/tls.key")
request = urllib.request.Request(page, headers={"Authorization": f"Bearer {token}"})
told = urllib.request.urlopen(request, timeout=60, context=itself).read().decode().splitlines()
name = "baton_file_last_reload_success_timestamp_seconds"
for option, files in paths.items():
    (read_at,) = (float(line.split()[-1]) for line in told if line.startswith(f'{name}{{option="{option}"}}'))
    assert read_at >= max(os.stat(path).st_mtime for path in files), "not read yet"
PYTHON
}
all_use_them() {
    own=/etc/baton/node-tls/tls.crt,/etc/baton/node-tls/ca.crt
    secret=secret_file=/etc/baton/secret/secret
    for each in $(pods prefill) $(pods decode); do
        uses "$each" https://127.0.0.1:9090/metrics secret nodes.crt ca.crt -- "$secret" "tls=$own" || return 1
    done
    for each in $(pods router); do
        uses "$each" https://127.0.0.1:8000/metrics secret nodes.crt ca.crt public.crt -- "$secret" "node_tls=$own" \
            tls=/etc/baton/tls/tls.crt || return 1
    done
}
# used: until all processes use the files; then one pod of each role is replaced: it meets all others
used() {
    until_true "all processes use the files" all_use_them
    mine delete pod "$(pods router | head -1)" --wait=false >/dev/null || return 1
    for role in prefill decode; do
        mine delete pod "$(pods "$role" | "$1" -1)" >/dev/null || return 1
    done
    all_ready
    until_true "4 connected nodes" connected 4
}
rotate_secret() {
    secrets "$old" "$new" && used head || return 1
    secrets "$new" "$old" && used tail || return 1
    secrets "$new" && used head
}
rotate_certificates() {
    certificates old new && used tail || return 1
    certificates new old && used head || return 1
    certificates new && used tail
}

mine delete -f "$folder/objects.yaml" >/dev/null
none_left() { [ -z "$(mine get pods --selector app.kubernetes.io/name=baton -o name)" ]; }
until_true "the end of all pods" none_left
for ca in old new; do
    new -subj "/CN=$ca" -keyout "$folder/$ca.key" -out "$folder/$ca.pem" || fail "openssl"
    certify "$ca" nodes "DNS:*.baton-prefill.$space.svc,DNS:*.baton-decode.$space.svc" || fail "openssl"
    certify "$ca" public DNS:baton-router || fail "openssl"
done
old=$(openssl rand -hex 32)
new=$(openssl rand -hex 32)
secrets "$old"
certificates old || fail "no certificates"
cat >"$folder/tls.yaml" <<'YAML'
nodes: {deletionCost: false}
tls: {clients: {secret: baton-public}, nodes: {secret: baton-nodes}}
YAML
render "$folder/objects.yaml" "$@" -f "$folder/tls.yaml"
workloads="statefulset/baton-redis statefulset/baton-decode statefulset/baton-prefill deployment/baton-router"
url=https://baton-router:8000/v1/completions
apply "$folder/objects.yaml"
believe old
ask "$folder/tls" || fail "a streamed answer over TLS"
same "$folder/tls" "over TLS"
say "the same answer over TLS, with mutual TLS between router and nodes"
believe old new
under_streams "the secret: old; old, new; new, old; new" rotate_secret
under_streams "certificates of another CA: old; old, believing both; new, believing both; new" rotate_certificates
believe new
ask "$folder/tls" || fail "a client that believes the new CA alone"
same "$folder/tls" "with the new CA alone"
never_restarted
