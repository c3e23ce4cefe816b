#!/bin/bash
# Health check of a container: probe.sh /PAGE... succeeds if each page of the health port says yes.
# No Python: its start alone can take longer on a busy machine than a check may.
for page; do
    exec 3<>"/dev/tcp/127.0.0.1/$BATON_HEALTH_PORT" || exit 1
    printf 'GET %s HTTP/1.0\r\n\r\n' "$page" >&3
    read -r _ status _ <&3
    exec 3>&-
    [ "$status" = 200 ] || exit 1
done
