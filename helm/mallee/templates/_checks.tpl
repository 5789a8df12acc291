{{/* Refuses values that contradict each other on Kubernetes: each message names the value and the remedy. Settings are the
schema's and `mallee check`'s (check.yaml). */}}

{{- define "mallee.checks" -}}
{{- $v := .Values }}
{{- $name := include "mallee.name" . }}
{{- $isRay := $v.ray.enabled }}
{{- $a := $v.autoscaling }}
{{- $most := ternary $a.maxWorkers $v.workers.replicas $a.enabled }}
{{- $pods := ceil (divf $most $v.workers.perPod) | int }}
{{- $pool := $v.picker.inferencePool }}
{{- $isOld := and (.Capabilities.APIVersions.Has "ray.io/v1/RayService") (not (.Capabilities.APIVersions.Has "ray.io/v1/RayCronJob")) }}
{{- $needed := include "mallee.gatewayMib" . | int }}
{{- $given := include "mallee.gib" ($v.gateways.memory | default (printf "%dMi" $needed)) | float64 | mulf 1024 }}
{{- include "mallee.refuse" (list
  (list (gt (len $name) 40) (printf "the release's name gives %q, of %d characters: KubeRay has room for 40, so give the release a shorter name" $name (len $name)))
  (list (not $v.image.repository) "image.repository is not set: --set image.repository=registry.example/mallee, the name under which you pushed the image (docker/Dockerfile, `make image`)")
  (list (and $isRay $isOld) "KubeRay here is older than 1.6 (its CRDs lack RayCronJob), which can't read Ray's token from a Secret: upgrade the operator and its CRDs, which `helm upgrade` leaves alone")
  (list (and $isRay (lt (int $given) $needed)) (printf "gateways.memory=%s has no room for the two gateways of an update: give %dMi, leave it out, or lower settings.routing.max_index_mb" $v.gateways.memory $needed))
  (list (and $isRay (not $v.model)) "model is not set: --set model=Qwen/Qwen3-0.6B (a Hugging Face id), or a folder of modelVolume.claim such as /models/my-model")
  (list (not (or $isRay $v.picker.enabled)) "ray.enabled=false and picker.enabled=false: nothing is left to run; give one of them")
  (list (contains "@" $v.nats.url) "nats.url holds credentials, which Ray Serve shows and logs: put user:password into a Secret (nats.secret), and change what was given")
  (list (and $v.nats.enabled $v.nats.url) "nats.url is given and nats.enabled=true: --set nats.enabled=false to use yours, or leave nats.url out")
  (list (and $isRay (not (include "mallee.hasNats" .))) "nats.enabled=false needs nats.url: the address of a NATS of yours, such as nats://nats.messaging:4222")
  (list (and $v.nats.enabled (eq (mod (int $v.nats.replicas) 2) 0)) (printf "nats.replicas=%v: give an odd number, of which a majority is left when one is lost" $v.nats.replicas))
  (list (and $isRay (eq $v.ray.auth "disabled") (not $v.networkPolicy.enabled)) "ray.auth=disabled with networkPolicy.enabled=false lets every pod of the cluster run code here: keep one of the two")
  (list (and (eq $v.gcs.backend "redis") (not $v.gcs.redisAddress)) "gcs.backend=redis needs gcs.redisAddress: host:port of a Redis that outlives the head")
  (list (and $v.ingress.enabled (not $v.ingress.host)) "ingress.enabled=true needs ingress.host: the name that clients use")
  (list (and $v.monitoring.enabled (not $v.monitoring.metrics)) "monitoring.enabled=true needs monitoring.metrics=true: there is nothing to scrape without")
  (list (and (eq $v.workers.disk.kind "claim") (not $v.workers.disk.claim)) "workers.disk.kind=claim needs workers.disk.claim: a PersistentVolumeClaim with ReadWriteMany")
  (list (gt $pods (int $v.workers.maxPods)) (printf "%v workers, %v in a pod, need %d pods: raise workers.maxPods=%v" $most $v.workers.perPod $pods $v.workers.maxPods))
  (list (and $a.enabled (not $a.pods)) "autoscaling.enabled=true needs autoscaling.pods=true: more workers need more pods")
  (list (and $v.workers.surge (not $a.pods)) "workers.surge=true needs autoscaling.pods=true: new workers start in pods beside the old ones")
  (list (and $pool.create (not $v.picker.enabled)) "picker.inferencePool.create=true needs picker.enabled=true: the pool names the picker")
  (list (and $v.picker.enabled (not (or $v.picker.pool $pool.create))) "picker.pool is not set: the name of an InferencePool in this namespace, or --set picker.inferencePool.create=true to make one")
  (list (and $pool.create (not $pool.selector)) "picker.inferencePool.create=true needs picker.inferencePool.selector: labels of the pods, such as {app: vllm-llama}")
  (list (and $v.picker.tls.secret (not $v.picker.tls.enabled)) (printf "picker.tls.secret=%q with picker.tls.enabled=false: leave one of them out" $v.picker.tls.secret))
) }}
{{- include "mallee.checkModel" (dict "root" . "value" "model" "model" (ternary $v.model "" $isRay)) }}
{{- include "mallee.checkModel" (dict "root" . "value" "picker.model" "model" (ternary $v.picker.model "" $v.picker.enabled)) }}
{{- end }}

{{/* A list of (list IS-WRONG MESSAGE). */}}
{{- define "mallee.refuse" -}}
{{- range . }}{{ if first . }}{{ fail (last .) }}{{ end }}{{ end }}
{{- end }}

{{/* (dict "root" $ "value" "model" "model" .Values.model): a model is on the volume if there is one. */}}
{{- define "mallee.checkModel" -}}
{{- $claim := .root.Values.modelVolume.claim }}
{{- $isInside := or (eq .model "/models") (hasPrefix "/models/" .model) }}
{{- include "mallee.refuse" (list
  (list (and .model $claim (not $isInside)) (printf "%s=%q is not below /models, where modelVolume.claim=%q is mounted: give --set %s=/models/FOLDER, or leave modelVolume.claim out to download the model" .value .model $claim .value))
  (list (and $isInside (not $claim)) (printf "%s=%q needs modelVolume.claim: the PersistentVolumeClaim that holds it" .value .model))
) }}
{{- end }}
