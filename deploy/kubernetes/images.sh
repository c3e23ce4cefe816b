#!/bin/sh
# Builds the images that the chart names, and one of a model, and hands them to a cluster:
#
#   deploy/kubernetes/images.sh kind                      into the cluster of kind
#   deploy/kubernetes/images.sh registry.example/team/    pushed; say so to the chart: image.registry
#   deploy/kubernetes/images.sh                           only built, in this Docker Engine
#
# MODEL_DIR (demo_model) is the model's folder, TAG (latest) the images' tag, VARIANT (cpu) that of the
# nodes: cpu or cuda; EXTRAS (node,otel) what is installed in them. ROLES (router prefill decode) are
# the images of Baton: add encode for encode nodes. BUILD (docker build) may be another builder.
set -eu
cd "$(dirname "$0")/../.."
place=${1:-}
registry=
[ "$place" = kind ] || registry=$place
TAG=${TAG:-latest}

ROLES=${ROLES:-router prefill decode}

for role in $ROLES; do
    ${BUILD:-docker build} -f deploy/Dockerfile --target "$role" --build-arg "VARIANT=${VARIANT:-cpu}" \
        --build-arg "EXTRAS=${EXTRAS:-node,otel}" -t "${registry}baton-$role:$TAG" .
done
${BUILD:-docker build} -f deploy/kubernetes/model.Dockerfile -t "${registry}baton-demo-model:$TAG" \
    "${MODEL_DIR:-demo_model}"
for role in $ROLES demo-model; do
    name=baton-$role
    case $place in
    '') ;;
    kind) kind load docker-image "$name:$TAG" ;;
    *) docker push "$registry$name:$TAG" ;;
    esac
done
