{{/* Names and labels are those of NVIDIA's chart: a release of it is upgraded in place, node by node. */}}
{{- define "linkwise.name" -}}
{{ .Values.nameOverride | default "nvidia-device-plugin" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "linkwise.fullname" -}}
{{- $name := .Values.nameOverride | default "nvidia-device-plugin" -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{ .Values.fullnameOverride | default $full | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* The name of a further DaemonSet: (list root suffix). */}}
{{- define "linkwise.nameOf" -}}
{{ printf "%s-%s" (include "linkwise.fullname" (first .)) (last .) | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "linkwise.namespace" -}}
{{ .Values.namespaceOverride | default .Release.Namespace }}
{{- end -}}

{{- define "linkwise.podLabels" -}}
app.kubernetes.io/name: {{ include "linkwise.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- with .Values.selectorLabelsOverride }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "linkwise.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride -}}
{{ toYaml .Values.selectorLabelsOverride }}
{{- else -}}
{{ include "linkwise.podLabels" . }}
{{- end -}}
{{- end -}}

{{- define "linkwise.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "linkwise.podLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* A whole values file of NVIDIA's chart names NVIDIA's image: ours takes its place, tag included. */}}
{{- define "linkwise.image" -}}
{{- $image := .Values.image | default dict -}}
{{- if eq ($image.repository | default "") "nvcr.io/nvidia/k8s-device-plugin" -}}
{{- $image = dict -}}
{{- end -}}
{{- $repository := $image.repository | default "linkwise" -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $repository ($image.tag | default (printf "v%s" .Chart.AppVersion)) }}
{{- end -}}
{{- end -}}

{{/* What the values and the configuration files may ask of the node, as JSON:
     configMap: its name, empty without configuration files; mig: MIG devices may be offered; strategies: every way by which the
     container runtime may be told of the GPUs; migRights: MIG devices may be made and destroyed. The files of a ConfigMap that is not ours may ask for everything, for CDI too
     (`cdi-?`). */}}
{{- define "linkwise.facts" -}}
{{- include "linkwise.refuse" . -}}
{{- $config := .Values.config | default dict -}}
{{- $configMap := $config.name | default "" -}}
{{- $strategies := list .Values.deviceListStrategy -}}
{{- $mig := list .Values.migStrategy -}}
{{- if $configMap -}}
{{- $strategies = append $strategies "volume-mounts,cdi-?" -}}
{{- $mig = append $mig "mixed" -}}
{{- else if $config.map -}}
{{- $configMap = printf "%s-configs" (include "linkwise.fullname" .) -}}
{{- range $text := $config.map -}}
{{- $flags := (fromYaml $text).flags | default dict -}}
{{- $mig = append $mig $flags.migStrategy -}}
{{- $strategies = append $strategies (join "," ($flags.plugin | default dict).deviceListStrategy) -}}
{{- end -}}
{{- end -}}
{{- if .Values.migStrategy -}}{{- $mig = list .Values.migStrategy -}}{{- end -}}
{{- if .Values.deviceListStrategy -}}{{- $strategies = list .Values.deviceListStrategy -}}{{- end -}}
{{- dict "configMap" $configMap
    "mig" (gt (without $mig nil "" "none" | len) 0)
    "migRights" ((.Values.dra).migRights | default false)
    "strategies" (without $strategies nil "" | join ",") | toJson -}}
{{- end -}}

{{/* The command that installs NFD as the affinity and gpu-feature-discovery need it. */}}
{{- define "linkwise.installNfd" -}}
helm install nfd oci://registry.k8s.io/nfd/charts/node-feature-discovery --version 0.19.0 \
  --namespace node-feature-discovery --create-namespace \
  --set-json 'worker.config.sources.pci={"deviceClassWhitelist":["02","03"],"deviceLabelFields":["vendor"]}' \
  --set-json 'worker.tolerations=[{"key":"nvidia.com/gpu","operator":"Exists","effect":"NoSchedule"}]'
{{- end -}}
