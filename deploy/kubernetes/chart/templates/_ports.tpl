{{/*
The ports that a node of a role opens, as YAML: a list of {name, port, of}. `of` is what for: `node`
for routers, `kv` for other nodes, `metrics`, `health`. KV lanes that it does not offer have none.
Each rank of a data-parallel group has ports of its own, next to those of the rank before.
*/}}
{{- define "baton.node.ports" -}}
{{- $ranks := int (include "baton.node.ranks" .) -}}
{{- $told := include "baton.option" (list .node.options "kv-lanes" "stream,grpc") | nospace -}}
{{- $lanes := splitList "," (eq $told "auto" | ternary "shm,stream,grpc" $told) -}}
{{- if eq .role "encode" -}}
{{- /* Rows of images take no others; without either of them, both. */ -}}
{{- $both := list "stream" "grpc" -}}
{{- $others := without $lanes "stream" "grpc" -}}
{{- $lanes = eq (len $others) (len $lanes) | ternary $both (without $lanes "shm" "nixl" "dist") -}}
{{- end -}}
{{- range $rank := until $ranks }}
{{- $mark := eq $rank 0 | ternary "" (printf "-%d" $rank) }}
{{- $stream := add 50061 (mul 2 $ranks) (mul 4 $rank) }}
- {name: node{{ $mark }}, port: {{ add 50061 $rank }}, of: node}
{{- if has "grpc" $lanes }}
- {name: kv-grpc{{ $mark }}, port: {{ add 50061 $ranks $rank }}, of: kv}
{{- end }}
{{- range $offset, $lane := list "stream" "shm" "nixl" "dist" }}
{{- if has $lane $lanes }}
- {name: kv-{{ $lane }}{{ $mark }}, port: {{ add $stream $offset }}, of: kv}
{{- end }}
{{- end }}
- {name: metrics{{ $mark }}, port: {{ add 9090 $rank }}, of: metrics}
- {name: health{{ $mark }}, port: {{ add 8080 $rank }}, of: health}
{{- end }}
{{- end -}}

{{- define "baton.node.ranks" -}}
{{- include "baton.option" (list .node.options "data-parallel-size" 1) | int -}}
{{- end -}}

{{/* An option of a process, by its flag's name or its variable's. Takes options, name, default. */}}
{{- define "baton.option" -}}
{{- $options := index . 0 | default dict -}}
{{- $name := index . 1 -}}
{{- index $options $name | default (index $options (replace "-" "_" $name)) | default (index . 2) -}}
{{- end -}}

{{/* The port of the endpoint picker for gateways; nothing without one. */}}
{{- define "baton.picker.port" -}}
{{- with include "baton.option" (list .Values.router.options "picker-port" "") }}{{ int . }}{{ end -}}
{{- end -}}

{{/* Of these, those whose `of` is .of; as YAML. Takes what templates of a role take, and `of`. */}}
{{- define "baton.node.ports.of" -}}
{{- $of := .of -}}
{{- $found := list -}}
{{- range include "baton.node.ports" . | fromYamlArray -}}
{{- if eq .of $of }}{{ $found = append $found . }}{{ end -}}
{{- end -}}
{{- $found | toYaml -}}
{{- end -}}
