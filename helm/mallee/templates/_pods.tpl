{{/* The pods of Ray: one template for the head, gateways and workers. */}}

{{- define "mallee.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.security.user }}
runAsGroup: {{ int64 .Values.security.user }}
fsGroup: {{ int64 .Values.security.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "mallee.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ .Values.security.readOnlyRoot }}
capabilities:
  drop: [ALL]
{{- end }}

{{/* (dict "root" $ "part" "gateway" "values" .Values.gateways). */}}
{{- define "mallee.placement" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if has .part (list "gateway" "worker") }}
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- end }}
securityContext:
  {{- include "mallee.podSecurity" .root | nindent 2 }}
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
{{- if not (has .part (list "head" "check" "test")) }}
{{- $selector := include "mallee.partSelector" . }}
{{- with .root.Values.topologySpread }}
{{- if .keys }}
topologySpreadConstraints:
  {{- $when := .whenUnsatisfiable }}
  {{- range .keys }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: {{ $when }}
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Read by Ray's processes as they start: the same on every node. */}}
{{- define "mallee.environment" -}}
{{- $v := .root.Values }}
- name: HOME
  value: /home/mallee
- name: RAY_AUTH_MODE
  value: {{ $v.ray.auth }}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_LOG_TO_STDERR   # for `kubectl logs`
  value: "1"
- name: RAY_worker_niceness
  value: "0"
- name: RAY_SERVE_ENABLE_HA_PROXY
  value: {{ ternary "1" "0" $v.haproxy.enabled | quote }}
{{- if $v.haproxy.enabled }}
# HAProxy with limits on clients, and its statistics in Unix sockets.
- name: RAY_SERVE_HAPROXY_BINARY_PATH
  value: /opt/mallee/venv/bin/mallee-haproxy
- name: MALLEE_CONNECTIONS_PER_CLIENT
  value: {{ int $v.haproxy.connectionsPerClient | quote }}
- name: RAY_SERVE_HAPROXY_MAXCONN
  value: {{ int $v.haproxy.maxConnections | quote }}
- name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
  value: {{ int $v.haproxy.longestStreamS | quote }}
- name: RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S
  value: "60"
- name: RAY_SERVE_HAPROXY_RETRY_ON
  value: conn-failure empty-response
- name: RAY_SERVE_HAPROXY_METRICS_ENABLED
  value: "0"
- name: RAY_SERVE_HAPROXY_NBTHREAD
  value: "2"
- name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S
  value: "2"
{{- end }}
{{- if ne .part "head" }}
- name: MALLEE_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "mallee.operatorSecret" .root }}
      key: key
{{- end }}
{{- include "mallee.list" .values.env }}
{{- end }}

{{- define "mallee.hasModels" -}}
{{- if and (ne .part "head") (or .root.Values.modelVolume.claim (include "mallee.isHubId" .root.Values.model)) }}true{{ end }}
{{- end }}

{{- define "mallee.hasCapsules" -}}
{{- if and (eq .part "worker") (has .root.Values.workers.disk.kind (list "ephemeral" "claim")) }}true{{ end }}
{{- end }}

{{- define "mallee.mounts" -}}
{{- $v := .root.Values }}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/mallee
{{- if or (include "mallee.hasNatsLogins" .root) (include "mallee.natsCaSecret" .root) }}
- name: nats
  mountPath: /etc/mallee/nats
  readOnly: true
{{- end }}
{{- if ne .part "head" }}
- name: link
  mountPath: /etc/mallee/link
  readOnly: true
{{- if $v.links.tlsSecret }}
- name: link-tls
  mountPath: /etc/mallee/link-tls
  readOnly: true
{{- end }}
{{- if $v.keys.secret }}
- name: keys
  mountPath: /etc/mallee/keys
  readOnly: true
{{- end }}
- name: scripts
  mountPath: /etc/mallee/scripts
  readOnly: true
{{- end }}
{{- if include "mallee.hasModels" . }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if include "mallee.hasCapsules" . }}
- name: capsules
  mountPath: /capsules
{{- end }}
{{- include "mallee.list" $v.extraVolumeMounts }}
{{- end }}

{{- define "mallee.list" }}
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "mallee.scratchVolumes" -}}
{{- range list "tmp" "home" }}
- name: {{ . }}
  emptyDir:
    sizeLimit: {{ $.Values.security.scratchSize }}
{{- end }}
{{- end }}

{{/* Logins of NATS and its CA, where there are any: (dict "root" $ "roles" (list "gateways" "workers")). */}}
{{- define "mallee.natsVolume" -}}
{{- $logins := include "mallee.hasNatsLogins" .root }}
{{- $ca := include "mallee.natsCaSecret" .root }}
{{- if or $logins $ca }}
- name: nats
  projected:
    defaultMode: 0440
    sources:
      {{- if $logins }}
      - secret:
          name: {{ include "mallee.natsSecret" .root }}
          items:
            {{- range .roles }}
            - {key: {{ . }}, path: {{ . }}}
            {{- end }}
      {{- end }}
      {{- if $ca }}
      - secret:
          name: {{ $ca }}
          items:
            - {key: ca.crt, path: ca.crt}
      {{- end }}
{{- end }}
{{- end }}

{{- define "mallee.modelsVolume" -}}
{{- $v := .Values.modelVolume }}
- name: models
  {{- if $v.claim }}
  persistentVolumeClaim:
    claimName: {{ $v.claim }}
    readOnly: true
  {{- else if $v.storageClass }}
  ephemeral:
    {{- include "mallee.claimTemplate" $v | nindent 4 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $v.size }}
  {{- end }}
{{- end }}

{{- define "mallee.volumes" -}}
{{- $v := .root.Values }}
{{- include "mallee.scratchVolumes" .root }}
{{- include "mallee.natsVolume" (dict "root" .root "roles" (list "gateways" "workers")) }}
{{- if ne .part "head" }}
- name: link
  secret:
    secretName: {{ include "mallee.linkSecret" .root }}
    defaultMode: 0440
    items:
      - {key: secret, path: secret}
{{- if $v.links.tlsSecret }}
- name: link-tls
  secret:
    secretName: {{ $v.links.tlsSecret }}
    defaultMode: 0440
{{- end }}
{{- if $v.keys.secret }}
- name: keys
  secret:
    secretName: {{ $v.keys.secret }}
    defaultMode: 0440
    items:
      - {key: keys.yaml, path: keys.yaml}
{{- end }}
- name: scripts
  configMap:
    name: {{ include "mallee.name" .root }}-scripts
{{- end }}
{{- if include "mallee.hasModels" . }}
{{- include "mallee.modelsVolume" .root }}
{{- end }}
{{- if include "mallee.hasCapsules" . }}
- name: capsules
  {{- if eq $v.workers.disk.kind "claim" }}
  persistentVolumeClaim:
    claimName: {{ $v.workers.disk.claim }}
  {{- else }}
  ephemeral:
    {{- include "mallee.claimTemplate" $v.workers.disk | nindent 4 }}
  {{- end }}
{{- end }}
{{- include "mallee.list" $v.extraVolumes }}
{{- end }}

{{- define "mallee.claimTemplate" -}}
volumeClaimTemplate:
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .size }}
{{- end }}

{{/* KubeRay deploys once the head is ready, and a deploy without a broker fails for good: so the head waits for it. A picker
would end, and be started again later and later. */}}
{{- define "mallee.waitForNats" -}}
- name: wait-for-nats
  image: {{ include "mallee.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [/bin/bash, -c]
  args:
    - |
      while true; do
        for place in "$@"; do
          if timeout 3 bash -c "exec 3<>/dev/tcp/${place%:*}/${place##*:}"; then exit 0; fi
        done
        echo "no NATS yet at $*: see the pods of component nats, or nats.url"
        sleep 2
      done
    - wait-for-nats
    {{- range splitList " " (include "mallee.natsPlaces" .root) }}
    - {{ . | quote }}
    {{- end }}
  securityContext:
    {{- include "mallee.containerSecurity" .root | nindent 4 }}
  resources: {{- include "mallee.smallResources" . | nindent 4 }}
{{- end }}

{{- define "mallee.smallResources" -}}
requests: {cpu: 100m, memory: 128Mi}
limits: {memory: 512Mi}
{{- end }}

{{/* All but real engines take the tokenizer and config.json alone. `model` and `revision`, if given, go before the values. */}}
{{- define "mallee.download" -}}
{{- $v := .root.Values }}
- name: download-model
  image: {{ include "mallee.image" . }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command:
    - hf
    - download
    - {{ .model | default $v.model | quote }}
    - --revision
    - {{ .revision | default $v.modelDownload.revision | quote }}
    - --local-dir
    - /models/model
    {{- $files := list "*.json" "*.jinja" "tokenizer*" }}
    {{- if and (eq .part "worker") (not (include "mallee.isMocked" .root)) }}
    {{- $files = append $files "*.safetensors" }}
    {{- end }}
    {{- range $files }}
    - --include
    - {{ . | quote }}
    {{- end }}
  env:
    - name: HOME
      value: /home/mallee
    - name: HF_HUB_DISABLE_TELEMETRY
      value: "1"
    {{- with $v.modelDownload.endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- with $v.modelDownload.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . }}
          key: {{ $v.modelDownload.tokenKey }}
    {{- end }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
    - {name: home, mountPath: /home/mallee}
    {{- include "mallee.list" $v.extraVolumeMounts | indent 4 }}
  securityContext:
    {{- include "mallee.containerSecurity" .root | nindent 4 }}
  resources:
    requests: {cpu: "1", memory: 1Gi}
    limits: {memory: {{ .values.memory }}}
{{- end }}

{{- define "mallee.probes" -}}
# Ray's agent: ends with the raylet.
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  initialDelaySeconds: 30
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 24
{{- if ne .part "head" }}
# This pod's proxy, and a gateway behind it: worker pods too take requests of the Service. Not /health/ready: while no
# worker is there, as in an update of the only one, gateways have requests wait.
readinessProbe:
  httpGet: {path: /-/healthz, port: serve}
  initialDelaySeconds: 5
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 2
{{- else }}
readinessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  initialDelaySeconds: 10
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 10
{{- end }}
{{- end }}

{{/* (dict "root" $ "part" "worker" "values" .Values.workers "cpus" 4 "gpus" 0 "pods" 2). */}}
{{- define "mallee.pod" -}}
{{- $v := .root.Values }}
metadata:
  labels:
    {{- include "mallee.partSelector" . | nindent 4 }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := deepCopy .values.podAnnotations }}
  {{- if and (ne .part "head") (not $v.autoscaling.pods) }}
  {{- /* KubeRay takes no other number of pods into a cluster that runs. This makes it a change of the pods. */}}
  {{- $_ := set $annotations "mallee/pods" (print .pods) }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- $placement := include "mallee.placement" . | fromYaml }}
  {{- if and (eq .part "head") $v.autoscaling.pods }}
  {{- /* Its autoscaler asks Kubernetes for pods, with the account that KubeRay makes. */}}
  {{- $_ := set $placement "automountServiceAccountToken" true }}
  {{- end }}
  {{- toYaml $placement | nindent 2 }}
  {{- if eq .part "worker" }}
  {{- with $v.workers.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add (include "mallee.leaveS" .root) 15 }}
  {{- if eq .part "head" }}
  initContainers:
    {{- include "mallee.waitForNats" . | nindent 4 }}
  {{- else if include "mallee.isHubId" .root.Values.model }}
  initContainers:
    {{- include "mallee.download" . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ .part }}
      image: {{ include "mallee.image" . }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      env:
        {{- include "mallee.environment" . | nindent 8 }}
      ports:
        {{- if eq .part "head" }}
        - {containerPort: 6379, name: gcs-server}
        - {containerPort: 8265, name: dashboard}
        {{- end }}
        - {containerPort: 8000, name: serve}
        - {containerPort: 8080, name: metrics}
      {{- if ne .part "head" }}
      lifecycle:
        preStop:
          exec:
            command: [python, /etc/mallee/scripts/leave.py, {{ include "mallee.leaveS" .root | quote }}]
      {{- end }}
      {{- include "mallee.probes" . | nindent 6 }}
      resources:
        requests:
          cpu: {{ .cpus | quote }}
          memory: {{ .values.memory }}
        limits:
          memory: {{ .values.memory }}
          {{- if gt (int .gpus) 0 }}
          {{ $v.workers.gpuResource }}: {{ int .gpus }}
          {{- end }}
      securityContext:
        {{- include "mallee.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        {{- include "mallee.mounts" . | nindent 8 }}
  volumes:
    {{- include "mallee.volumes" . | nindent 4 }}
{{- end }}
