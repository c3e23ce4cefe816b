{{/* The first part of each object's name: the release's name, with the chart's where it lacks it. */}}
{{- define "baton.name" -}}
{{- if contains "baton" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-baton" (.Release.Name | trunc 34 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a role. Takes (dict "root" $ "role" ROLE), as all templates of a role. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Name and labels of an object of a role. */}}
{{- define "baton.metadata" -}}
name: {{ include "baton.name" .root }}-{{ .role }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{/* The roles of nodes that there are, as YAML. */}}
{{- define "baton.node.roles" -}}
- prefill
- decode
{{- if .Values.encode.replicas }}
- encode
{{- end }}
{{- end -}}

{{/* What a node of a role is made of: `nodes`, and over it the role's own values. As YAML. */}}
{{- define "baton.node" -}}
{{- mergeOverwrite (deepCopy .root.Values.nodes) (deepCopy (index .root.Values .role)) | toYaml -}}
{{- end -}}

{{/* The image of a role; `image` is the role's own value, a whole name or nothing. */}}
{{- define "baton.image" -}}
{{- .image | default (printf "%sbaton-%s:%s" .root.Values.image.registry .role .root.Values.image.tag) -}}
{{- end -}}

{{/* StatefulSet where nodes have TLS: their certificate must name them, and an address is drawn. */}}
{{- define "baton.workload" -}}
{{- if and .root.Values.tls.nodes.secret (eq .node.workload "Deployment") -}}
StatefulSet
{{- else -}}
{{ .node.workload }}
{{- end -}}
{{- end -}}
