{{/* Where the model comes from: exactly one of these has a value. */}}
{{- define "baton.model.source" -}}
{{- $found := list -}}
{{- range list "claim" "hostPath" "image" "imageVolume" "hub" -}}
{{- if index $.Values.model . }}{{ $found = append $found . }}{{ end -}}
{{- end -}}
{{- if ne (len $found) 1 -}}
{{- fail (printf "model: exactly one of claim, hostPath, image, imageVolume and hub; given: %s" ($found | join ", " | default "none")) -}}
{{- end -}}
{{- first $found -}}
{{- end -}}

{{- define "baton.model.volume" -}}
{{- $model := .Values.model -}}
- name: model
{{- $source := include "baton.model.source" . }}
{{- if eq $source "claim" }}
  persistentVolumeClaim: {claimName: {{ $model.claim.name }}, readOnly: true}
{{- else if eq $source "hostPath" }}
  hostPath: {path: {{ $model.hostPath | quote }}, type: Directory}
{{- else if eq $source "imageVolume" }}
  image: {reference: {{ $model.imageVolume | quote }}, pullPolicy: {{ .Values.image.pullPolicy }}}
{{- else }}
  emptyDir: {}
{{- end }}
{{- end -}}

{{/* Fills the volume of a pod that has a copy of its own. A router needs no weights. */}}
{{- define "baton.model.init" -}}
{{- $source := include "baton.model.source" .root -}}
{{- if has $source (list "image" "hub") -}}
initContainers:
  - name: model
    {{- if eq $source "image" }}
    image: {{ .root.Values.model.image | quote }}
    command: [cp, -r, /model/., /target]
    {{- else }}
    image: {{ include "baton.image" (dict "root" .root "role" .role "image" .values.image) | quote }}
    command: [hf, download, {{ .root.Values.model.hub | quote }}, --local-dir, /target{{ if eq .role "router" }}, --exclude, "*.safetensors"{{ end }}]
    env:
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ .root.Values.secret }}, key: hf-token, optional: true}
    {{- end }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    {{- include "baton.container.security" . | nindent 4 }}
    {{- with .values.resources }}
    resources:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    volumeMounts:
      - {name: model, mountPath: /target}
      - {name: tmp, mountPath: /tmp}
{{- end -}}
{{- end -}}
