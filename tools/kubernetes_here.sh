#!/bin/bash
# A real Kubernetes of two nodes on one machine without a registry, to try the chart in: Kubernetes
# 1.20.2 (etcd, API server, controllers, scheduler, proxy, two kubelets with a Docker Engine each)
# from Debian's packages. All of it lives in namespaces of its own: no port of the machine is opened,
# no file outside DIR is written, and all processes and mounts end with the first process.
#
#   tools/kubernetes_here.sh build DIR              fetch and compile what is not there yet: 3 GB
#   tools/kubernetes_here.sh images DIR             Baton's images, and those that the chart needs
#   tools/kubernetes_here.sh start DIR
#   tools/kubernetes_here.sh exec DIR COMMAND...    with KUBECONFIG, and kubectl on PATH
#   tools/kubernetes_here.sh stop DIR
#
# For root on Debian 12 with these packages, none of which starts a service:
#   apt-get install --no-install-recommends ca-certificates conntrack curl debootstrap dnsmasq-base \
#       ethtool gcc iptables libc6-dev openssl podman runc socat
# BUILD_OPTIONS go to `podman build`: where PyTorch's index cannot be reached, an index that can, as
# --build-arg TORCH_INDEX=URL, and with --volume what pip needs there. See docs/operations.md.
#
# What differs from a cluster of your own: no network policy is enforced (there is no network plugin),
# DNS knows Services that have an address and StatefulSets' pods only, and all nodes share the machine's cores.
set -eu
usage() { sed -n '6,11p' "$0" | cut -c3- >&2; exit 2; }
[ $# -ge 2 ] || usage
here=$(realpath "$0")
repository=$(dirname "$(dirname "$here")")
command=$1
D=$(realpath -m "$2")
shift 2
mkdir -p "$D"/{apt/parts,apt/lists/partial,deb,bin,run}
export PATH=$D/bin:$D/root/usr/sbin:$D/root/usr/bin:$PATH
NODES="1 2"
ADDRESS=10.79.0.1 # of the control plane and of DNS, on the namespace's loopback; node I has 10.79.I.1
SERVICES=10.96.0.0/24
CGROUP=baton-kubernetes-$(printf %s "$D" | cksum | cut -d' ' -f1)
log() { printf '%s  %s\n' "$(date +%T)" "$*" >&2; }

# ---- programs ------------------------------------------------------------------------------------

# fetch PACKAGE...: packages and Kubernetes' source, into deb/; the machine's own lists stay
fetch() {
    [ -e "$D/deb/fetched" ] && return
    sed 's/^Types: deb$/Types: deb deb-src/' /etc/apt/sources.list.d/debian.sources >"$D/apt/parts/own.sources"
    own="-q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$D/apt/parts
        -o Dir::State::lists=$D/apt/lists -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache="
    # shellcheck disable=SC2086
    (cd "$D/deb" && apt-get $own update && apt-get $own source --download-only kubernetes \
        && apt-get $own download golang-1.19-go golang-1.19-src etcd-server docker.io containerd busybox-static)
    for each in "$D"/deb/*.deb; do dpkg -x "$each" "$D/root"; done
    touch "$D/deb/fetched"
}

compile() {
    export GOROOT=$D/goroot GOPATH=$D/gopath GOCACHE=$D/gocache PATH=$D/goroot/bin:$PATH
    export GOPROXY=off CGO_ENABLED=0 GO111MODULE=off GOFLAGS=-p=3
    source=$GOPATH/src/k8s.io/kubernetes
    if [ ! -e "$source" ]; then
        mkdir -p "$GOROOT" "$GOPATH/src/k8s.io"
        cp -rL "$D/root/usr/share/go-1.19/." "$GOROOT"
        cp -rn "$D/root/usr/lib/go-1.19/." "$GOROOT" || true # links to what was just copied
        tar xzf "$D"/deb/kubernetes_*.orig.tar.gz -C "$GOPATH/src/k8s.io"
        mv "$GOPATH/src/k8s.io/kubernetes-1.20.2" "$source"
    fi
    cd "$source"
    if [ ! -e "$D/bin/openapi-gen" ]; then # the archive lacks one generated file
        go build -o "$D/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
        folders=$(grep -rlE --include=*.go '^ *// \+k8s:openapi-gen=true' staging/src pkg/apis pkg/version \
            | grep -v _test | xargs -n1 dirname | sort -u | sed 's#^staging/src/##; s#^pkg#k8s.io/kubernetes/pkg#' \
            | grep -vE '/(sample-apiserver|sample-controller|code-generator|testapigroup)|/test' | paste -sd,)
        # It ends with 1 for names of fields that are not to its taste.
        openapi-gen --logtostderr -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
            -h "$PWD/hack/boilerplate/boilerplate.generatego.txt" -r "$D/run/violations.txt" || true
    fi
    flags="-s -w"
    for each in component-base/version client-go/pkg/version; do
        for value in gitVersion=v1.20.2 gitMajor=1 gitMinor=20; do
            flags="$flags -X k8s.io/kubernetes/vendor/k8s.io/$each.$value"
        done
    done
    for each in kubectl kube-scheduler kube-proxy kube-controller-manager kubelet kube-apiserver; do
        [ -x "$D/bin/$each" ] && continue
        log "compiling $each"
        go build -tags providerless -trimpath -o "$D/bin/$each" -ldflags "$flags" "./cmd/$each"
    done
    [ -x "$D/bin/pause" ] || gcc -Os -static -o "$D/bin/pause" build/pause/linux/pause.c
}

# Where root lacks CAP_SYS_RESOURCE, no process may get the oom_score_adj below 0 that kubelets ask for.
runtime() {
    cat >"$D/bin/runc-here" <<'PYTHON'
#!/usr/bin/python3
import json, os, sys

words = sys.argv[1:]
if "create" in words or "run" in words:
    bundle = words[words.index("--bundle") + 1] if "--bundle" in words else "."
    path = os.path.join(bundle, "config.json")
    with open(path) as file:
        config = json.load(file)
    if config["process"].get("oomScoreAdj", 0) < 0:
        config["process"]["oomScoreAdj"] = 0
        with open(path, "w") as file:
            json.dump(config, file)
os.execvp("runc", ["runc", *words])
PYTHON
    chmod +x "$D/bin/runc-here"
}

# ---- images --------------------------------------------------------------------------------------

podman_here() { podman --root "$D/podman" --runroot "$D/podman-run" --storage-driver overlay "$@"; }
build_here() {
    # shellcheck disable=SC2086
    podman_here build --isolation chroot --network host --pull=never --format docker ${BUILD_OPTIONS:-} "$@"
}

# Debian in place of the public base images; the chart's Redis is Debian's, and the pause is Kubernetes'.
images() {
    if ! podman_here image exists docker.io/library/python:3.11-slim-bookworm; then
        rm -rf "$D/base"
        debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$D/base"
        rm -rf "$D"/base/var/cache/apt/archives/*.deb "$D"/base/var/lib/apt/lists/*
        # As the public slim images: without documents, translations and bytecode.
        rm -rf "$D"/base/usr/share/{doc,info,locale,man}/* "$D"/base/var/log/*
        find "$D/base/usr" -name '*.pyc' -delete
        tar -C "$D/base" -c . | podman_here import - docker.io/library/python:3.11-slim-bookworm
    fi
    mkdir -p "$D/busybox/bin"
    cp "$D/root/bin/busybox" "$D/busybox/bin"
    for each in cp ls sh; do ln -sf busybox "$D/busybox/bin/$each"; done
    tar -C "$D/busybox" -c . | podman_here import - docker.io/library/busybox:1.37
    tar -C "$D/bin" -c pause | podman_here import --change 'ENTRYPOINT ["/pause"]' - baton-pause:here
    printf '%s\n' 'FROM python:3.11-slim-bookworm' \
        'RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*' \
        | build_here -t baton-redis:here -f - "$D/busybox"
    export -f podman_here build_here
    export D
    BUILD=build_here bash "$repository/deploy/kubernetes/images.sh"
    rm -f "$D/images.tar" # an archive is not written over
    names=
    for each in pause:here redis:here router:latest prefill:latest decode:latest demo-model:latest; do
        names="$names docker.io/library/baton-$each"
        podman_here tag "localhost/baton-$each" "docker.io/library/baton-$each"
    done
    # shellcheck disable=SC2086
    podman_here save --multi-image-archive --format docker-archive -o "$D/images.tar" $names
    # shellcheck disable=SC2086
    podman_here image inspect --format '{{.Id}} {{.Size}} {{.RepoTags}}' $names | tee "$D/images.names"
}

# ---- the cluster ---------------------------------------------------------------------------------

# run NAME COMMAND...: in the background, with its output in run/NAME.log
run() {
    name=$1
    shift
    "$@" >"$D/run/$name.log" 2>&1 &
}
# soon WHAT COMMAND...: repeat it until it succeeds, 300 s at most
soon() {
    what=$1
    shift
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return; fi
        sleep 0.5
    done
    log "not in time: $what; see $D/run"
    exit 1
}
# Everything below runs in the namespaces' own process tree.
private() { for each in "$@"; do mount -t tmpfs none "$each"; done; }

# kubelets set some of the machine's settings: let them set files that only they see
harmless_settings() {
    for each in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops \
        kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
        copy=/run/settings/$each
        mkdir -p "$(dirname "$copy")"
        cat "/proc/sys/$each" >"$copy"
        mount --bind "$copy" "/proc/sys/$each"
    done
}

control_plane() {
    private /run /var/lib
    mkdir -p /run/dns
    harmless_settings
    ip link set lo up
    ip address add "$ADDRESS/32" dev lo
    cat >"$D/kubeconfig" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "https://$ADDRESS:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: $(openssl rand -hex 16)}}]
contexts: [{name: here, context: {cluster: here, user: admin}}]
current-context: here
YAML
    export KUBECONFIG=$D/kubeconfig
    sed -n 's/.*token: \(.*\)}}.*/\1,admin,admin,system:masters/p' "$KUBECONFIG" >/run/tokens.csv
    openssl genrsa -out /run/account.key 2048 2>/dev/null
    run etcd etcd --data-dir /var/lib/etcd --listen-client-urls http://127.0.0.1:2379 \
        --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
    soon etcd curl -fs http://127.0.0.1:2379/health
    run apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=$ADDRESS \
        --advertise-address=$ADDRESS --secure-port=6443 --insecure-port=0 --cert-dir=/run/certificates \
        --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=/run/account.key \
        --service-account-signing-key-file=/run/account.key --token-auth-file=/run/tokens.csv \
        --authorization-mode=RBAC --kubelet-preferred-address-types=InternalIP --service-cluster-ip-range=$SERVICES --allow-privileged=true
    soon "the API server" kubectl get --raw /readyz
    run controllers kube-controller-manager --kubeconfig="$KUBECONFIG" --leader-elect=false --port=0 \
        --service-account-private-key-file=/run/account.key --use-service-account-credentials \
        --root-ca-file=/run/certificates/apiserver.crt
    run scheduler kube-scheduler --kubeconfig="$KUBECONFIG" --leader-elect=false --port=0
    for each in $NODES; do run "node-$each" unshare --mount bash "$here" node "$D" "$each"; done
    for each in $NODES; do
        soon "node $each" kubectl wait "node/node$each" --for=condition=Ready --timeout=1s
    done
    run proxy kube-proxy --kubeconfig="$KUBECONFIG" --proxy-mode=iptables --hostname-override=node1 --masquerade-all \
        --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0
    run dns dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts --hostsdir=/run/dns \
        --local=/cluster.local/ --listen-address=$ADDRESS --bind-interfaces --user=root
    run names names
    touch "$D/run/up"
    wait
}
# The addresses of Services, and of pods that a headless one gives a name, for DNS, as they come.
names() {
    follow services IP:.spec.clusterIP,NAME:.metadata.name,SPACE:.metadata.namespace &
    follow pods IP:.status.podIP,HOST:.spec.hostname,NAME:.spec.subdomain,SPACE:.metadata.namespace &
    wait
}
follow() {
    while kubectl get "$1" --all-namespaces --watch --no-headers -o custom-columns="$2"; do sleep 1; done \
        | while read -r ip name; do
            case "$ip $name" in *None* | *"<none>"*) continue ;; esac
            name=$(echo "$name" | tr -s ' ' .)
            echo "$ip $name.svc.cluster.local" >"/run/dns/$name"
            pkill -HUP -P $$ -x dnsmasq || true # it would keep an address that a name has no longer
        done
}

# node I: a Docker Engine and a kubelet, with folders of their own
node() {
    private /run /var/lib /var/log
    engine=$D/engine-$1
    mkdir -p "$engine"
    ip link add "node$1" type bridge
    ip address add "10.79.$1.1/24" dev "node$1"
    ip link set "node$1" up
    run "engine-$1" dockerd -H unix:///run/docker.sock --data-root "$engine" --exec-root /run/docker \
        --pidfile /run/docker.pid --bridge "node$1" --iptables=false --ip-masq=false --userland-proxy=false --cgroup-parent "/$CGROUP" \
        --add-runtime here="$D/bin/runc-here" --default-runtime here
    export DOCKER_HOST=unix:///run/docker.sock
    soon "engine $1" docker version
    docker ps -aq | xargs -r docker rm -f >/dev/null
    if ! cmp -s "$D/images.names" "$engine/images.names"; then
        docker load -q -i "$D/images.tar"
        cp "$D/images.names" "$engine/images.names"
    fi
    cat >/run/kubelet.yaml <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
address: 10.79.$1.1
port: 10250
readOnlyPort: 0
healthzBindAddress: 10.79.$1.1
clusterDomain: cluster.local
clusterDNS: [$ADDRESS]
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
imageGCHighThresholdPercent: 100
syncFrequency: 10s # a changed Secret is in the pods so soon
YAML
    exec kubelet --config=/run/kubelet.yaml --kubeconfig="$D/kubeconfig" --root-dir=/var/lib/kubelet \
        --container-runtime=docker --docker-endpoint=unix:///run/docker.sock --network-plugin= \
        --pod-infra-container-image=baton-pause:here --hostname-override="node$1" --node-ip="10.79.$1.1" \
        --cert-dir=/run/certificates
}

started() { [ -e "$D/run/pid" ] && kill -0 "$(cat "$D/run/pid")" 2>/dev/null; }
start() {
    if started; then log "it runs already"; exit 1; fi
    rm -f "$D"/run/*.log "$D/run/up"
    # The first process of the tree; what is left of a tree ends with it.
    setsid unshare --net --pid --mount --mount-proc --fork --kill-child \
        bash "$here" control_plane "$D" >"$D/run/control_plane.log" 2>&1 &
    echo $! >"$D/run/pid"
    for _ in $(seq 1000); do
        if [ -e "$D/run/up" ]; then log "up"; return; fi
        started || break
        sleep 0.5
    done
    tail -n 5 "$D"/run/*.log >&2
    stop
    exit 1
}
stop() {
    if started; then
        first=$(pgrep -P "$(cat "$D/run/pid")")
        kill -KILL "$(cat "$D/run/pid")"
        while kill -0 "$first" 2>/dev/null; do sleep 0.1; done
    fi
    rm -f "$D/run/pid" "$D/run/up" "$D/kubeconfig"
    for each in /sys/fs/cgroup/*/"$CGROUP" /sys/fs/cgroup/"$CGROUP"; do
        [ ! -d "$each" ] || find "$each" -depth -type d -exec rmdir {} +
    done
}
enter() {
    started || { log "start it first"; exit 1; }
    first=$(pgrep -P "$(cat "$D/run/pid")")
    export KUBECONFIG=$D/kubeconfig
    exec nsenter --target "$first" --net -- "$@"
}

case $command in
build) fetch && runtime && (compile) ;;
images) images ;;
start) start ;;
exec) [ $# -ge 1 ] || usage; enter "$@" ;;
stop) stop ;;
control_plane | node) "$command" "$@" ;;
*) usage ;;
esac
