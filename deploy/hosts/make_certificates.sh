#!/bin/sh
# A CA, and for each host a folder with its certificate, key and the CA, as /etc/baton/tls wants them:
#   make_certificates.sh FOLDER router=10.0.0.1 prefill-1=10.0.0.2 decode-1=10.0.0.3 redis=10.0.0.4
# A certificate names the host's address and its name. A second call keeps the CA and makes new
# certificates. FOLDER/ca.key signs whoever is to be let in: keep it away from the hosts.
set -eu
[ $# -ge 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1 days=${DAYS:-90}
shift
umask 077
mkdir -p "$folder"
new() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "$@" 2>/dev/null; }
if [ ! -f "$folder/ca.key" ]; then
    new -days 3650 -subj /CN=baton -keyout "$folder/ca.key" -out "$folder/ca.pem"
fi
for host; do
    name=${host%%=*} address=${host#*=}
    mkdir -p "$folder/$name"
    new -days "$days" -subj "/CN=$name" -keyout "$folder/$name/host.key" -out "$folder/$name/host.pem" \
        -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -addext basicConstraints=CA:FALSE \
        -addext "subjectAltName=DNS:$name,IP:$address"
    cp "$folder/ca.pem" "$folder/$name/ca.pem"
done
