{{/* The pods of a node's role. */}}
{{- define "baton.node.template" -}}
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
        - name: BATON_ADVERTISE_HOST
        {{- if eq (include "baton.workload" .) "StatefulSet" }}
          value: $(BATON_NODE_ID).{{ include "baton.name" .root }}-{{ .role }}.{{ .root.Release.Namespace }}.svc
        {{- else }}
          valueFrom:
            fieldRef: {fieldPath: status.podIP}
        {{- end }}
      ports:
        - {name: node, containerPort: 50061}
        - {name: kv-grpc, containerPort: 50062}
        - {name: kv-stream, containerPort: 50063}
        - {name: kv-shm, containerPort: 50064}
        - {name: kv-nixl, containerPort: 50065}
        - {name: kv-dist, containerPort: 50066}
        - {name: metrics, containerPort: 9090}
        - {name: health, containerPort: 8080}
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
  volumes:
    {{- include "baton.volumes" . | nindent 4 }}
    - name: cache
      emptyDir: {sizeLimit: 4Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .node.sharedMemory }}}
{{- end -}}
