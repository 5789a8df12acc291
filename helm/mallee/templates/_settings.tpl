{{/* What `serve deploy` gets: Mallee's settings, made from the values and `settings`. */}}

{{- define "mallee.model" -}}
{{- if include "mallee.isHubId" .Values.model }}/models/model{{ else }}{{ .Values.model }}{{ end }}
{{- end }}

{{/* GiB of a quantity. */}}
{{- define "mallee.gib" -}}
{{- $unit := get (dict "Ki" 0.00000095367431640625 "Mi" 0.0009765625 "Gi" 1.0 "Ti" 1024.0) (regexFind "..$" .) }}
{{- mulf (regexFind "^[0-9.]+" . | float64) $unit }}
{{- end }}

{{/* GiB of each worker on the pod's volume. */}}
{{- define "mallee.diskGib" -}}
{{- divf (mulf (include "mallee.gib" .Values.workers.disk.size) 0.9) .Values.workers.perPod | floor }}
{{- end }}

{{/* MiB of a pod with two gateways, each with its bounds and 768 MiB of its own, and 1 GiB for Ray and HAProxy. */}}
{{- define "mallee.gatewayMib" -}}
{{- $bounds := mustMergeOverwrite (dict "max_index_mb" 1024 "token_memory_mb" 256) (dig "routing" dict .Values.settings) }}
{{- add 768 $bounds.max_index_mb $bounds.token_memory_mb | mul 2 | add 1024 }}
{{- end }}

{{- define "mallee.madeSettings" -}}
{{- $v := .Values }}
model: {{ include "mallee.model" . | quote }}
{{- with $v.servedModelName | default (ternary $v.model "" (eq (include "mallee.isHubId" .Values.model) "true")) }}
served_model_name: {{ . | quote }}
{{- end }}
workers: {{ int $v.workers.replicas }}
gateways: {{ int $v.gateways.replicas }}
nats_url: {{ include "mallee.natsUrl" . | quote }}
{{- if include "mallee.hasNatsLogins" . }}
nats_credentials: /etc/mallee/nats/gateways
nats_worker_credentials: /etc/mallee/nats/workers
{{- end }}
{{- if include "mallee.natsCaSecret" . }}
nats_ca: /etc/mallee/nats/ca.crt
{{- end }}
engine:
  {{- if not (include "mallee.isMocked" .) }}
  device: {{ ternary "cuda" "cpu" (eq (include "mallee.hasGpus" .) "true") }}
  {{- end }}
  {{- if eq $v.workers.disk.kind "url" }}
  disk_path: {{ $v.workers.disk.url | quote }}
  {{- else if ne $v.workers.disk.kind "none" }}
  disk_path: /capsules
  {{- end }}
  {{- if eq $v.workers.disk.kind "ephemeral" }}
  disk_gib: {{ include "mallee.diskGib" . }}
  {{- end }}
{{- if $v.autoscaling.enabled }}
autoscaling:
  max_workers: {{ int $v.autoscaling.maxWorkers }}
  min_workers: {{ int $v.autoscaling.minWorkers }}
  target_rows: {{ $v.autoscaling.targetRows }}
  lower_after_s: {{ $v.autoscaling.lowerAfterS }}
{{- end }}
http:
  {{- if $v.keys.secret }}
  keys_file: /etc/mallee/keys/keys.yaml
  {{- end }}
  max_connections: {{ int $v.haproxy.maxConnections }}
  max_connections_per_client: {{ int $v.haproxy.connectionsPerClient }}
# Within the folder for temporary files, whose size the pod must not exceed.
imports:
  max_gib: 2
  spool_gib: 4
store:
  name: {{ include "mallee.store" . }}
  {{- if $v.nats.enabled }}
  replicas: {{ min 3 (int $v.nats.replicas) }}
  {{- end }}
routing:
  max_index_mb: 1024   # of which the pod's memory is made, as the user's
links:
  tcp: always
  secret_file: /etc/mallee/link/secret
  {{- if $v.links.tlsSecret }}
  tls_cert: /etc/mallee/link-tls/tls.crt
  tls_key: /etc/mallee/link-tls/tls.key
  tls_ca: /etc/mallee/link-tls/ca.crt
  {{- end }}
ray:
  worker_cpus: {{ $v.workers.cpus }}
  {{- if include "mallee.hasGpus" . }}
  worker_gpus: {{ $v.workers.gpus }}
  {{- end }}
  worker_resources: {mallee_worker: 1}
  gateway_resources: {mallee_gateway: 1}
{{- if $v.monitoring.metrics }}
telemetry:
  metrics_host: 0.0.0.0
  metrics_port: {{ int $v.monitoring.port }}
{{- end }}
{{- end }}

{{/* KubeRay makes a new cluster for every change but those of numbers and tolerations. Its fleet has a name of its own, for
both clusters run beside each other for a while and each counts its workers from w0. */}}
{{- define "mallee.fleet" -}}
{{- $fleet := .Values.settings.fleet | default "mallee" }}
{{- if eq .Values.ray.upgrade "NewCluster" }}
{{- $kept := include "mallee.cluster" . | fromYaml }}
{{- $_ := unset (dig "headGroupSpec" "template" "spec" dict $kept) "tolerations" }}
{{- range $group := $kept.workerGroupSpecs }}
{{- range list "replicas" "minReplicas" "maxReplicas" }}
{{- $_ := unset $group . }}
{{- end }}
{{- $_ := unset .template.spec "tolerations" }}
{{- end }}
{{- $fleet = printf "%s-%s" $fleet (toJson $kept | sha256sum | trunc 8) }}
{{- end }}
{{- $fleet }}
{{- end }}

{{/* The name of the store, which the fleets of an upgrade share. */}}
{{- define "mallee.store" -}}
{{- dig "store" "name" "" .Values.settings | default .Values.settings.fleet | default "mallee" }}
{{- end }}

{{/* serveConfigV2. */}}
{{- define "mallee.serveConfig" -}}
{{- $v := .Values }}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
  keep_alive_timeout_s: 90
applications:
  - name: mallee
    route_prefix: /
    import_path: mallee.actors.app:app
    args:
      {{- $made := include "mallee.madeSettings" . | fromYaml }}
      {{- $args := mustMergeOverwrite $made (deepCopy $v.settings) (dict "fleet" (include "mallee.fleet" .)) }}
      {{- toYaml $args | nindent 6 }}
    deployments:
      - name: Worker
        {{- if not $v.autoscaling.enabled }}
        num_replicas: {{ int $v.workers.replicas }}
        {{- end }}
        max_surge_percent: {{ ternary 25 0 $v.workers.surge }}
      - name: Gateway
        num_replicas: {{ int $v.gateways.replicas }}
{{- end }}

{{/* The InferencePool whose pods are picked from. */}}
{{- define "mallee.pool" -}}
{{ .Values.picker.pool | default (include "mallee.name" .) }}
{{- end }}

{{- define "mallee.pickerTlsSecret" -}}
{{ .Values.picker.tls.secret | default (print (include "mallee.name" .) "-picker-tls") }}
{{- end }}

{{/* Settings of `mallee picker`: the user's and the chart's. */}}
{{- define "mallee.pickerSettings" -}}
{{- $v := .Values }}
{{- $made := dict "listen" "0.0.0.0:9002" "health_listen" "0.0.0.0:9003" "pool" (include "mallee.pool" .) "namespace" .Release.Namespace }}
{{- if $v.monitoring.metrics }}
{{- $_ := set $made "metrics_listen" "0.0.0.0:9090" }}
{{- end }}
{{- if $v.picker.tls.enabled }}
{{- $_ := set $made "tls_cert" "/etc/mallee/tls/tls.crt" }}
{{- $_ := set $made "tls_key" "/etc/mallee/tls/tls.key" }}
{{- end }}
{{- with $v.picker.model }}
{{- $_ := set $made "model" (ternary "/models/model" . (ne (include "mallee.isHubId" .) "")) }}
{{- end }}
{{- if include "mallee.hasNats" . }}
{{- $_ := set $made "nats_url" (include "mallee.natsUrl" .) }}
{{- $_ := set $made "fleet" (printf "%s-%s-picker" .Release.Namespace (include "mallee.name" .)) }}
{{- if include "mallee.hasNatsLogins" . }}
{{- $_ := set $made "nats_credentials" "/etc/mallee/nats/gateways" }}
{{- end }}
{{- if include "mallee.natsCaSecret" . }}
{{- $_ := set $made "nats_ca" "/etc/mallee/nats/ca.crt" }}
{{- end }}
{{- end }}
{{- merge $made $v.picker.settings | toYaml }}
{{- end }}
