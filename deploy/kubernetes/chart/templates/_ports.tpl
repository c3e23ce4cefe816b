{{/*
The ports that a node of a role opens, as YAML: a list of {name, port, of}. `of` is what for: `node`
for routers, `kv` for other nodes, `metrics`, `health`. KV lanes that it does not offer have none.
Each rank of a data-parallel group has ports of its own, next to those of the rank before.
*/}}
{{- define "baton.node.ports" -}}
{{- $options := .node.options | default dict -}}
{{- $ranks := int (include "baton.node.ranks" .) -}}
{{- $told := nospace (index $options "kv-lanes" | default "stream,grpc") -}}
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
{{- index (.node.options | default dict) "data-parallel-size" | default 1 | int -}}
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
