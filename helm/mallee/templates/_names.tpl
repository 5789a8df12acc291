{{/* Names, labels and figures that several templates share. */}}

{{- define "mallee.name" -}}
{{- if contains "mallee" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-mallee{{ end }}
{{- end }}

{{- define "mallee.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "mallee.selector" . }}
{{- end }}

{{- define "mallee.selector" -}}
app.kubernetes.io/name: mallee
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of the pods of a part: (dict "root" $ "part" "gateway"). */}}
{{- define "mallee.partSelector" -}}
{{ include "mallee.selector" .root }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "mallee.isMocked" -}}
{{- if eq (dig "engine" "kind" "model" .Values.settings) "mock" }}true{{ end }}
{{- end }}

{{- define "mallee.hasGpus" -}}
{{- if gt (float64 .Values.workers.gpus) 0.0 }}true{{ end }}
{{- end }}

{{/* (dict "root" $ "part" "gateway"): pickers and checks need no CUDA, all pods of Ray take one image. */}}
{{- define "mallee.image" -}}
{{- $isCuda := and (not (has .part (list "picker" "check"))) (include "mallee.hasGpus" .root) -}}
{{- with .root -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (print .Chart.AppVersion (ternary "-cuda" "" (not (empty $isCuda)))) }}
{{- end }}
{{- end }}

{{/* Whether a model is an id of the hub that init containers download: checks refuse one beside a claim. */}}
{{- define "mallee.isHubId" -}}
{{- if regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$" . }}true{{ end }}
{{- end }}

{{- define "mallee.workerPods" -}}
{{- ceil (divf .Values.workers.replicas .Values.workers.perPod) -}}
{{- end }}

{{- define "mallee.gpusOfPod" -}}
{{- ceil (mulf .Values.workers.gpus .Values.workers.perPod) -}}
{{- end }}

{{/* Seconds that a pod gets to end: requests drain, then Ray stops. */}}
{{- define "mallee.leaveS" -}}
{{- add (ceil (dig "drain_s" 30 .Values.settings)) 20 -}}
{{- end }}

{{/* Without Ray it may be left out: pickers do without it. */}}
{{- define "mallee.hasNats" -}}
{{- if or .Values.nats.enabled .Values.nats.url }}true{{ end }}
{{- end }}

{{- define "mallee.natsScheme" -}}
{{- ternary "tls" "nats" (ne .Values.nats.tlsSecret "") -}}
{{- end }}

{{- define "mallee.natsUrl" -}}
{{- if .Values.nats.enabled -}}
{{ include "mallee.natsScheme" . }}://{{ include "mallee.name" . }}-nats.{{ .Release.Namespace }}.svc:4222
{{- else -}}
{{ .Values.nats.url }}
{{- end }}
{{- end }}

{{/* host:port of each server, apart by spaces. */}}
{{- define "mallee.natsPlaces" -}}
{{- $places := list }}
{{- range splitList "," (include "mallee.natsUrl" .) }}
{{- $host := regexReplaceAll "^[a-z]+://" (trim .) "" | trimSuffix "/" }}
{{- $places = append $places (ternary $host (print $host ":4222") (contains ":" $host)) }}
{{- end }}
{{- join " " $places }}
{{- end }}

{{- define "mallee.natsSecret" -}}
{{ .Values.nats.secret | default (print (include "mallee.name" .) "-nats") }}
{{- end }}

{{- define "mallee.hasNatsLogins" -}}
{{- if or .Values.nats.enabled .Values.nats.secret }}true{{ end }}
{{- end }}

{{- define "mallee.natsCaSecret" -}}
{{- if .Values.nats.enabled }}{{ .Values.nats.tlsSecret }}{{ else }}{{ .Values.nats.caSecret }}{{ end }}
{{- end }}

{{- define "mallee.tokenSecret" -}}
{{ .Values.ray.tokenSecret | default (print (include "mallee.name" .) "-ray-token") }}
{{- end }}

{{- define "mallee.linkSecret" -}}
{{ .Values.links.secret | default (print (include "mallee.name" .) "-link") }}
{{- end }}

{{- define "mallee.operatorSecret" -}}
{{ .Values.keys.operatorSecret | default (print (include "mallee.name" .) "-operator") }}
{{- end }}
