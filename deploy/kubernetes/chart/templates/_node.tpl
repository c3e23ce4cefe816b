{{/* The pods of a node's role. */}}
{{- define "baton.node.template" -}}
{{- if and .node.deletionCost (ne (include "baton.workload" .) "Deployment") -}}
{{- fail (printf "deletionCost of %s: a %s removes its pods in an order of its own" .role (include "baton.workload" .)) -}}
{{- end -}}
metadata:
  labels:
    {{- include "baton.selector" . | nindent 4 }}
  annotations:
    baton/options: {{ include "baton.options" . | sha256sum }}
    {{- with .node.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "baton.pod" . | nindent 2 }}
  # SIGTERM drains: running requests move to other nodes with their KV, or end here.
  terminationGracePeriodSeconds: {{ .node.graceSeconds }}
  {{- include "baton.model.init" . | nindent 2 }}
  containers:
    - name: {{ .role }}
      image: {{ include "baton.image" (dict "root" .root "role" .role "image" .node.image) | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: [--config, /etc/baton/options/options.yaml]
      env:
        {{- include "baton.environment" . | nindent 8 }}
        - name: BATON_NODE_ID
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        {{- $ranks := int (include "baton.node.ranks" .) }}
        {{- if gt $ranks 1 }}
        - {name: BATON_KV_PORT, value: {{ add 50061 $ranks | quote }}} # behind the ranks' own
        - {name: BATON_KV_STREAM_PORT, value: {{ add 50061 (mul 2 $ranks) | quote }}}
        {{- end }}
        {{- if .node.deletionCost }}
        - name: BATON_POD_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        {{- end }}
        - name: BATON_ADVERTISE_HOST
        {{- if eq (include "baton.workload" .) "StatefulSet" }}
          value: $(BATON_NODE_ID).{{ include "baton.name" .root }}-{{ .role }}.{{ .root.Release.Namespace }}.svc
        {{- else }}
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
      ports:
        {{- range include "baton.node.ports" . | fromYamlArray }}
        - {name: {{ .name }}, containerPort: {{ .port }}}
        {{- end }}
      {{- include "baton.probes" . | nindent 6 }}
      {{- include "baton.container.security" . | nindent 6 }}
      {{- with .node.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "baton.mounts" . | nindent 8 }}
        - {name: cache, mountPath: /var/cache/baton}
        - {name: shm, mountPath: /dev/shm}
        {{- if .node.deletionCost }}
        - {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
        {{- end }}
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
    - name: cache
      emptyDir: {sizeLimit: 4Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .node.sharedMemory }}}
    {{- if .node.deletionCost }}
    - name: account # the node's container alone has it, not the one that fetches the model
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
    {{- end }}
{{- end -}}
