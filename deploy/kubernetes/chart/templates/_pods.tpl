{{/*
What the pods of all roles have. The pod's own security is that of the Pod Security Standard
`restricted`; it is no value, because nothing in Baton needs more.
*/}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.name" .root }}{{ with .node }}{{ if .deletionCost }}-nodes{{ end }}{{ end }}
automountServiceAccountToken: false
# For a service called `baton` Kubernetes would set BATON_PORT to a URL.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 10001 }}
  runAsGroup: {{ .group | default 10001 }}
  fsGroup: {{ .group | default 10001 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
{{- end -}}

{{- define "baton.container.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* The three pages of the health port (docs/operations.md, Health). Restart on /livez alone. */}}
{{- define "baton.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add .values.startSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /livez, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 2
  timeoutSeconds: 5
{{- end -}}

{{/* Environment of routers and nodes. Kubernetes puts values in place of $(NAME). */}}
{{- define "baton.environment" -}}
- name: BATON_SECRET_FILE # read again when it changes
  value: /etc/baton/secret/secret
{{- if .root.Values.redis.bundled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .root.Values.secret }}, key: redis-password}
- name: BATON_REDIS_URL
  value: redis://baton:$(REDIS_PASSWORD)@{{ include "baton.name" .root }}-redis:6379/0
{{- else }}
- name: BATON_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .root.Values.secret }}, key: redis-url}
{{- end }}
- name: BATON_GRACE_S # the image makes the time to drain of it
  value: {{ .values.graceSeconds | quote }}
{{- with .values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Fails for an option that a pod's environment sets, which goes before the file of options. Each has
what sets it: a value of the role or of the chart; nothing where no value does.
*/}}
{{- define "baton.options.check" -}}
{{- $set := dict "host" "" "port" "" "health-port" "" "secret-file" "secret" "redis-url" "redis" "drain-s" "graceSeconds" -}}
{{- $own := dict "node-id" "" "advertise-host" "" "kv-port" "" "kv-stream-port" "" "metrics-port" "" "pod-name" "deletionCost" -}}
{{- if eq .role "router" -}}
{{- $own = dict "grpc-port" "" "shutdown-s" "graceSeconds" "api-key" "router.apiKeys" "admin-key" "router.admin" -}}
{{- end -}}
{{- $set = merge $set $own -}}
{{- range $name, $_ := .values.options | default dict -}}
{{- $name = $name | replace "_" "-" -}}
{{- if hasKey $set $name -}}
{{- $by := index $set $name | default "no value changes it" -}}
{{- fail (printf "options of %s: %s is set by the chart: %s" $.role $name $by) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The file of Baton's options, as YAML: what the chart knows, and over it the values' own. */}}
{{- define "baton.options" -}}
{{- include "baton.options.check" . -}}
{{- $known := dict "model" "/model" "served-model-name" .root.Values.model.name -}}
{{- $tls := .root.Values.tls -}}
{{- $files := dict "cert" "/etc/baton/node-tls/tls.crt" "key" "/etc/baton/node-tls/tls.key" "ca" "/etc/baton/node-tls/ca.crt" -}}
{{- $own := eq .role "router" | ternary $tls.clients.secret $tls.nodes.secret -}}
{{- if not $own }}{{ $_ := set $known "insecure" true }}{{ end -}}
{{- if $tls.nodes.secret -}}
{{- range $name, $file := $files -}}
{{- $_ := set $known (printf "%s%s" (eq $.role "router" | ternary "node-tls-" "tls-") $name) $file -}}
{{- end -}}
{{- end -}}
{{- if eq .role "router" -}}
{{- with $tls.clients -}}
{{- if .secret -}}
{{- $_ := set $known "tls-cert" "/etc/baton/tls/tls.crt" -}}
{{- $_ := set $known "tls-key" "/etc/baton/tls/tls.key" -}}
{{- if .mutual }}{{ $_ := set $known "tls-ca" "/etc/baton/tls/ca.crt" }}{{ end -}}
{{- else if .mutual -}}
{{- fail "tls.clients.mutual needs tls.clients.secret: its ca.crt says whom routers let in" -}}
{{- end -}}
{{- end -}}
{{- with .values.apiKeys }}{{ $_ := set $known "api-keys" (printf "/etc/baton/keys/%s" .file) }}{{ end -}}
{{- if .values.admin -}}
{{- $_ := set $known "admin-port" 9000 -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite $known (.values.options | default dict) | toYaml -}}
{{- end -}}

{{- define "baton.mounts" -}}
- {name: options, mountPath: /etc/baton/options, readOnly: true}
- {name: model, mountPath: /model, readOnly: true{{ with .root.Values.model.claim }}{{ with .path }}, subPath: {{ . | quote }}{{ end }}{{ end }}}
- {name: tmp, mountPath: /tmp}
- {name: secret, mountPath: /etc/baton/secret, readOnly: true}
{{- if .root.Values.tls.nodes.secret }}
- {name: node-tls, mountPath: /etc/baton/node-tls, readOnly: true}
{{- end }}
{{- if .root.Values.redis.ca }}
- {name: redis-ca, mountPath: /etc/baton/redis, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: options
  configMap: {name: {{ include "baton.name" .root }}-{{ .role }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: secret
  secret: {secretName: {{ .root.Values.secret }}, defaultMode: 0440, items: [{key: secret, path: secret}]}
{{- with .root.Values.tls.nodes.secret }}
- name: node-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .root.Values.redis.ca }}
- name: redis-ca
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{ include "baton.model.volume" .root }}
{{- end -}}
