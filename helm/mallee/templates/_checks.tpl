{{/* Refuses values that contradict each other: each message names the value and the remedy. */}}

{{- define "mallee.checks" -}}
{{- $v := .Values }}
{{- $name := include "mallee.name" . }}
{{- if gt (len $name) 40 }}
{{- fail (printf "the release's name gives %q, of %d characters: KubeRay has room for 40, so give the release a shorter name" $name (len $name)) }}
{{- end }}
{{- if $v.ray.enabled }}
{{- if not $v.model }}
{{- fail "model is not set: --set model=Qwen/Qwen3-0.6B (a Hugging Face id), or a folder of modelVolume.claim such as /models/my-model" }}
{{- end }}
{{- include "mallee.checkModel" (dict "root" . "value" "model" "model" $v.model) }}
{{- include "mallee.checkOwn" (dict "value" "settings" "settings" $v.settings "own" (include "mallee.ownSettings" . | fromYaml) "page" "docs/configure.md") }}
{{- include "mallee.checkWorkers" . }}
{{- else if not $v.picker.enabled }}
{{- fail "ray.enabled=false and picker.enabled=false: nothing is left to run; give one of them" }}
{{- end }}
{{- include "mallee.checkServices" . }}
{{- include "mallee.checkPicker" . }}
{{- end }}

{{/* (dict "root" $ "value" "model" "model" .Values.model). */}}
{{- define "mallee.checkModel" -}}
{{- $claim := .root.Values.modelVolume.claim }}
{{- $isInside := or (eq .model "/models") (hasPrefix "/models/" .model) }}
{{- if and $claim (not $isInside) }}
{{- fail (printf "%s=%q is not below /models, where modelVolume.claim=%q is mounted: give --set %s=/models/FOLDER, or leave modelVolume.claim out to download the model" .value .model $claim .value) }}
{{- end }}
{{- if and $isInside (not $claim) }}
{{- fail (printf "%s=%q needs modelVolume.claim: the PersistentVolumeClaim that holds it" .value .model) }}
{{- end }}
{{- end }}

{{/* Settings that the chart makes, and the value to give instead. */}}
{{- define "mallee.ownSettings" -}}
model: model
served_model_name: servedModelName
workers: workers.replicas
gateways: gateways.replicas
nats_url: nats.url
nats_credentials: nats.secret
nats_worker_credentials: nats.secret
nats_ca: nats.caSecret
autoscaling: autoscaling
telemetry.metrics_host: monitoring.metrics
telemetry.metrics_port: monitoring.port
engine.disk_path: workers.disk
http.keys_file: keys.secret
links.tcp: nothing (pods reach each other by TCP)
links.secret_file: links.secret
links.tls_cert: links.tlsSecret
links.tls_key: links.tlsSecret
links.tls_ca: links.tlsSecret
ray.worker_cpus: workers.cpus
ray.worker_gpus: workers.gpus
ray.worker_resources: workers.perPod
ray.gateway_resources: gateways.replicas
{{- end }}

{{- define "mallee.ownPickerSettings" -}}
listen: picker.service.port
health_listen: nothing (port 9003 of the pods)
metrics_listen: monitoring.metrics
tls_cert: picker.tls.secret
tls_key: picker.tls.secret
pool: picker.pool
namespace: nothing (an InferencePool and its picker share the release's namespace)
kubernetes_url: nothing (pods ask the cluster's own API)
endpoints: picker.pool
endpoints_file: picker.pool
model: picker.model
nats_url: nats.url
nats_credentials: nats.secret
nats_ca: nats.caSecret
fleet: nothing (it is named after the release)
{{- end }}

{{/* (dict "value" "settings" "settings" .Values.settings "own" names "page" "docs/configure.md"). */}}
{{- define "mallee.checkOwn" -}}
{{- $v := . }}
{{- range $key, $instead := .own }}
{{- $parts := splitList "." $key }}
{{- $section := $v.settings }}
{{- if gt (len $parts) 1 }}
{{- $section = get $v.settings (first $parts) | default dict }}
{{- if not (kindIs "map" $section) }}
{{- fail (printf "%s.%s=%v: give a mapping of its settings (%s)" $v.value (first $parts) $section $v.page) }}
{{- end }}
{{- end }}
{{- if hasKey $section (last $parts) }}
{{- fail (printf "%s.%s is made by the chart: give the value %s instead" $v.value $key $instead) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "mallee.checkPicker" -}}
{{- $v := .Values.picker }}
{{- $pool := $v.inferencePool }}
{{- if not $v.enabled }}
{{- if $pool.create }}
{{- fail "picker.inferencePool.create=true needs picker.enabled=true: the pool names the picker" }}
{{- end }}
{{- else }}
{{- if not (or $v.pool $pool.create) }}
{{- fail "picker.pool is not set: the name of an InferencePool in this namespace, or --set picker.inferencePool.create=true to make one" }}
{{- end }}
{{- if and $pool.create (not $pool.selector) }}
{{- fail "picker.inferencePool.create=true needs picker.inferencePool.selector: labels of the pods, such as {app: vllm-llama}" }}
{{- end }}
{{- if and $v.tls.secret (not $v.tls.enabled) }}
{{- fail (printf "picker.tls.secret=%q with picker.tls.enabled=false: leave one of them out" $v.tls.secret) }}
{{- end }}
{{- if $v.model }}
{{- include "mallee.checkModel" (dict "root" . "value" "picker.model" "model" $v.model) }}
{{- else if hasKey $v.settings "events_port" }}
{{- fail (printf "picker.settings.events_port=%v needs picker.model: KV events name blocks by their tokens" $v.settings.events_port) }}
{{- end }}
{{- include "mallee.checkOwn" (dict "value" "picker.settings" "settings" $v.settings "own" (include "mallee.ownPickerSettings" . | fromYaml) "page" "docs/picker.md") }}
{{- end }}
{{- end }}

{{- define "mallee.checkWorkers" -}}
{{- $w := .Values.workers }}
{{- $gpus := float64 $w.gpus }}
{{- $device := dig "engine" "device" "" .Values.settings }}
{{- if and (gt $gpus 1.0) (ne $gpus (floor $gpus)) }}
{{- fail (printf "workers.gpus=%v: Ray gives whole GPUs from 1 on; give a whole number, or less than 1 to share one" $w.gpus) }}
{{- end }}
{{- if and (gt $gpus 0.0) (include "mallee.isMocked" .) }}
{{- fail (printf "workers.gpus=%v with settings.engine.kind=mock: mocked engines need none, so give 0" $w.gpus) }}
{{- end }}
{{- if and (hasPrefix "cuda" $device) (eq $gpus 0.0) }}
{{- fail (printf "settings.engine.device=%q needs a GPU: give workers.gpus=1" $device) }}
{{- end }}
{{- if and (gt $gpus 0.0) $device (not (hasPrefix "cuda" $device)) }}
{{- fail (printf "workers.gpus=%v with settings.engine.device=%q, which leaves them idle: give one or the other" $w.gpus $device) }}
{{- end }}
{{- $disk := $w.disk }}
{{- if and (ne $disk.kind "none") (include "mallee.isMocked" .) }}
{{- fail (printf "workers.disk.kind=%q with settings.engine.kind=mock: mocked engines write no KV; give settings.mock.disk_kv_tokens for the time that a disk takes" $disk.kind) }}
{{- end }}
{{- if and (eq $disk.kind "claim") (not $disk.claim) }}
{{- fail "workers.disk.kind=claim needs workers.disk.claim: a PersistentVolumeClaim with ReadWriteMany" }}
{{- end }}
{{- if and (eq $disk.kind "url") (not (contains "://" $disk.url)) }}
{{- fail (printf "workers.disk.url=%q: workers.disk.kind=url needs an fsspec URL, such as s3://bucket/prefix" $disk.url) }}
{{- end }}
{{- $a := .Values.autoscaling }}
{{- $most := ternary $a.maxWorkers $w.replicas $a.enabled }}
{{- $pods := ceil (divf $most $w.perPod) }}
{{- if gt (int $pods) (int $w.maxPods) }}
{{- fail (printf "%v workers, %v in a pod, need %v pods: raise workers.maxPods=%v" $most $w.perPod $pods $w.maxPods) }}
{{- end }}
{{- if and $a.enabled (not $a.pods) }}
{{- fail "autoscaling.enabled=true needs autoscaling.pods=true: more workers need more pods" }}
{{- end }}
{{- if and $w.surge (not $a.pods) }}
{{- fail "workers.surge=true needs autoscaling.pods=true: new workers start in pods beside the old ones" }}
{{- end }}
{{- if and $a.enabled (or (gt (int $a.minWorkers) (int $w.replicas)) (lt (int $a.maxWorkers) (int $w.replicas))) }}
{{- fail (printf "workers.replicas=%v, the number at the start, is not within autoscaling.minWorkers=%v and autoscaling.maxWorkers=%v" $w.replicas $a.minWorkers $a.maxWorkers) }}
{{- end }}
{{- end }}

{{- define "mallee.checkServices" -}}
{{- $v := .Values }}
{{- if and $v.nats.enabled $v.nats.url }}
{{- fail "nats.url is given and nats.enabled=true: --set nats.enabled=false to use yours, or leave nats.url out" }}
{{- end }}
{{- if and $v.ray.enabled (not (include "mallee.hasNats" .)) }}
{{- fail "nats.enabled=false needs nats.url: the address of a NATS of yours, such as nats://nats.messaging:4222" }}
{{- end }}
{{- if contains "@" $v.nats.url }}
{{- fail "nats.url holds credentials, which Ray Serve shows and logs: put user:password into a Secret (nats.secret), and change what was given" }}
{{- end }}
{{- if and $v.nats.enabled (eq (mod (int $v.nats.replicas) 2) 0) }}
{{- fail (printf "nats.replicas=%v: give an odd number, of which a majority is left when one is lost" $v.nats.replicas) }}
{{- end }}
{{- if and $v.ray.enabled (eq $v.ray.auth "disabled") (not $v.networkPolicy.enabled) }}
{{- fail "ray.auth=disabled with networkPolicy.enabled=false lets every pod of the cluster run code here: keep one of the two" }}
{{- end }}
{{- if and (eq $v.gcs.backend "redis") (not $v.gcs.redisAddress) }}
{{- fail "gcs.backend=redis needs gcs.redisAddress: host:port of a Redis that outlives the head" }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}
{{- fail "ingress.enabled=true needs ingress.host: the name that clients use" }}
{{- end }}
{{- if and $v.monitoring.enabled (not $v.monitoring.metrics) }}
{{- fail "monitoring.enabled=true needs monitoring.metrics=true: there is nothing to scrape without" }}
{{- end }}
{{- end }}
