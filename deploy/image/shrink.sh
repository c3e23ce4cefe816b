#!/bin/sh
# Makes an environment of packages smaller: shrink.sh FOLDER. For the router's image; 250 MB with a
# base image of usual size is the goal (docs/operations.md#sizes-of-images).
set -eu
site=$(echo "$1"/lib/python3*/site-packages)

# Symbols for debuggers, most of them uvloop's. Not in *.libs: wheels' tools have patched those.
find "$site" -name '*.so' ! -path '*.libs/*' -exec strip --strip-unneeded {} +

# Nobody reads AVIF here (baton/images/decoding.py), and Pillow does without its codec.
rm -f "$site"/PIL/_avif.*.so "$site"/pillow.libs/libavif-*

# It makes downloads of weights quicker, which a router never fetches; `hf` takes plain HTTP instead.
pip --python "$1" uninstall --quiet --yes hf-xet

# Bytecode, as the file system is read-only later; of what only `baton top`, `hf` and nodes run, none.
# It is never checked against its source, whose time a copy between images may change.
python3 -m compileall -q --invalidation-mode unchecked-hash \
    -x '/(textual|pygments/lexers/[a-z]|huggingface_hub|fsspec|baton/engine|kv_transfer|[a-z]+_node/)' "$site"
