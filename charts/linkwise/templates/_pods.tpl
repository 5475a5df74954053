{{/* What the pods of all three DaemonSets have in common. */}}

{{/* (dict "root" $ "part" .Values.PART "least" whether the pod has the least privileges: it is not the MPS daemon's) */}}
{{- define "linkwise.pod" -}}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if (.part).enableHostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with include "linkwise.podSecurityContext" . | fromYaml }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
serviceAccountName: {{ include "linkwise.fullname" .root }}-service-account
# Whoever speaks to the API server has the token mounted by name.
automountServiceAccountToken: false
enableServiceLinks: false
{{- end -}}

{{/* (dict "root" $ "least" ...), as above. The SCC of openshift.enabled has these options and no others. */}}
{{- define "linkwise.podSecurityContext" -}}
{{- $context := deepCopy (.root.Values.podSecurityContext | default dict) -}}
{{- if and .least (.root.Values.openshift).enabled -}}
{{- $context = mergeOverwrite $context (dict "seLinuxOptions" (include "linkwise.seLinuxOptions" . | fromYaml)) -}}
{{- end -}}
{{ toYaml $context }}
{{- end -}}

{{/* The type that may connect to the kubelet, and the level by which the next pod reads the health record (manifests/README.md). */}}
{{- define "linkwise.seLinuxOptions" -}}
type: container_device_plugin_t
level: s0
{{- end -}}

{{- define "linkwise.scheduling" -}}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := .Values.tolerations | default list -}}
{{- range (.Values.nodeCondition).startupTaints }}{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists") }}{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* How the plugin's pods are replaced: a new one takes over from the old one beside it. Not on the host's network, where the
     port cannot be bound twice. */}}
{{- define "linkwise.updateStrategy" -}}
{{- $strategy := .Values.updateStrategy | default dict | deepCopy -}}
{{- $strategy = merge $strategy (dict "type" "RollingUpdate") -}}
{{- if and (eq $strategy.type "RollingUpdate") (not $strategy.rollingUpdate) (not (.Values.devicePlugin).enableHostNetwork) -}}
{{- $strategy = merge (dict "rollingUpdate" (dict "maxSurge" 1 "maxUnavailable" 0)) $strategy -}}
{{- end -}}
{{ toYaml $strategy }}
{{- end -}}

{{/* A change of config.map replaces the pods where it takes effect at the start alone. What does so at once is left out of the
     checksum: the programs follow their file. (dict "root" $ "container" the program's "least" ...), as above. */}}
{{- define "linkwise.annotations" -}}
{{- $annotations := deepCopy (.root.Values.podAnnotations | default dict) -}}
{{- /* config-manager is in front of it: kubectl exec and logs would go there. */ -}}
{{- $annotations = merge $annotations (dict "kubectl.kubernetes.io/default-container" .container) -}}
{{- if and .least (.root.Values.openshift).enabled -}}
{{- $annotations = merge $annotations (dict "openshift.io/required-scc" (include "linkwise.fullname" .root)) -}}
{{- end -}}
{{- with (.root.Values.config).map -}}
{{- $files := dict -}}
{{- range $name, $text := . -}}
{{- $file := omit (fromYaml $text) "sharing" "resources" -}}
{{- $own := omit ($file.linkwise | default dict) "naming" "numaHints" "filter" -}}
{{- $_ := set $files $name (set (omit $file "linkwise") "linkwise" $own) -}}
{{- end -}}
{{- $annotations = merge $annotations (dict "checksum/config" (toJson $files | sha256sum)) -}}
{{- end -}}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "linkwise.container" -}}
image: {{ include "linkwise.image" . }}
imagePullPolicy: {{ (.Values.image).pullPolicy | default "IfNotPresent" }}
{{- end -}}

{{/* (list root component): `resources` for all, else the component's own. */}}
{{- define "linkwise.resources" -}}
{{- with (first .).Values.resources | default (last .).resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "linkwise.leastPrivilege" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end -}}

{{/* (dict "facts" $facts "given" a securityContext of the values): for the plugin and gpu-feature-discovery. SYS_ADMIN opens MIG
     devices of others, and lets the NVIDIA runtime hand in GPUs where it heeds no variable of ordinary containers. */}}
{{- define "linkwise.securityContext" -}}
{{- if .given -}}
{{ toYaml .given }}
{{- else if or .facts.mig (contains "volume-mounts" .facts.strategies) -}}
# What has SYS_ADMIN can gain privileges; the API server refuses any other claim.
allowPrivilegeEscalation: true
readOnlyRootFilesystem: true
capabilities:
  add: ["SYS_ADMIN"]
  drop: ["ALL"]
{{- else -}}
{{ include "linkwise.leastPrivilege" . }}
{{- end -}}
{{- end -}}

{{/* The settings that the values hold for a program, as the variables that the program reads: (list root facts VARIABLE...).
     One that is not given is not set, so that the configuration file counts. */}}
{{- define "linkwise.settings" -}}
{{- $root := first . -}}
{{- $facts := index . 1 -}}
{{- $values := $root.Values -}}
{{- $given := dict
    "MIG_STRATEGY" $values.migStrategy
    "FAIL_ON_INIT_ERROR" $values.failOnInitError
    "PASS_DEVICE_SPECS" $values.compatWithCPUManager
    "DEVICE_LIST_STRATEGY" $values.deviceListStrategy
    "DEVICE_ID_STRATEGY" $values.deviceIDStrategy
    "NVIDIA_DRIVER_ROOT" $values.nvidiaDriverRoot
    "NVIDIA_DEV_ROOT" $values.nvidiaDevRoot
    "NVIDIA_CDI_HOOK_PATH" ($values.cdi).nvidiaHookPath
    "CDI_FEATURE_FLAGS" ($values.cdi).featureFlags
    "GDRCOPY_ENABLED" $values.gdrcopyEnabled
    "GDS_ENABLED" $values.gdsEnabled
    "MOFED_ENABLED" $values.mofedEnabled
    "DEVICE_DISCOVERY_STRATEGY" $values.deviceDiscoveryStrategy
    "MPS_ROOT" (($values.mps).root | default "/run/nvidia/mps")
    "GFD_NO_TIMESTAMP" (kindIs "bool" ($values.gfd).noTimestamp | ternary ($values.gfd).noTimestamp $values.noTimestamp)
    "GFD_SLEEP_INTERVAL" (($values.gfd).sleepInterval | default $values.sleepInterval)
    "CONFIG_FILE" (empty $facts.configMap | ternary nil "/config/config.yaml")
    "NVIDIA_MIG_CONFIG_DEVICES" ($facts.migRights | ternary "all" nil)
    "NVIDIA_MIG_MONITOR_DEVICES" ($facts.mig | ternary "all" nil) -}}
{{- range slice . 2 }}
{{- $value := get $given . }}
{{- if or (kindIs "bool" $value) $value }}
- name: {{ . }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* (list name fieldPath) */}}
{{- define "linkwise.fieldEnv" -}}
- name: {{ first . }}
  valueFrom:
    fieldRef:
      fieldPath: {{ last . }}
{{- end -}}

{{/* The two containers of config-manager: (dict "root" $ "name" NAME "signal" the program that gets SIGHUP, or
     empty "given" a securityContext of the values). A privileged program can be signalled by a privileged container only where
     AppArmor is in force; so the sidecar has the privileges that the values give its program. */}}
{{- define "linkwise.configManagerInit" -}}
- name: {{ .name }}-init
  {{- include "linkwise.configManager" (dict "root" .root "oneshot" true) | nindent 2 }}
  securityContext:
    {{- include "linkwise.leastPrivilege" . | nindent 4 }}
{{- end -}}

{{- define "linkwise.configManagerSidecar" -}}
- name: {{ .name }}-sidecar
  {{- include "linkwise.configManager" (dict "root" .root "oneshot" false "signal" .signal) | nindent 2 }}
  securityContext:
    {{- if .given }}
    {{- toYaml .given | nindent 4 }}
    {{- else }}
    {{- include "linkwise.leastPrivilege" . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "linkwise.configManager" -}}
{{- $config := .root.Values.config -}}
{{ include "linkwise.container" .root }}
command: ["config-manager"]
env:
  {{- include "linkwise.fieldEnv" (list "NODE_NAME" "spec.nodeName") | nindent 2 }}
  - name: NODE_LABEL
    value: nvidia.com/device-plugin.config
  - name: CONFIG_FILE_SRCDIR
    value: /available-configs
  - name: CONFIG_FILE_DST
    value: /config/config.yaml
  - name: DEFAULT_CONFIG
    value: {{ $config.default | default "" | quote }}
  - name: FALLBACK_STRATEGIES
    value: {{ $config.fallbackStrategies | default list | join "," | quote }}
  - name: ONESHOT
    value: {{ .oneshot | quote }}
  - name: SEND_SIGNAL
    value: {{ not (empty .signal) | quote }}
  {{- with .signal }}
  - name: SIGNAL
    value: "1"
  - name: PROCESS_TO_SIGNAL
    value: {{ . }}
  {{- end }}
volumeMounts:
  - name: available-configs
    mountPath: /available-configs
    readOnly: true
  - name: config
    mountPath: /config
  - name: api-access
    mountPath: /var/run/secrets/kubernetes.io/serviceaccount
    readOnly: true
{{- with (.root.Values.configManager).resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The program's side of the configuration. */}}
{{- define "linkwise.configMounts" -}}
- name: available-configs
  mountPath: /available-configs
  readOnly: true
- name: config
  mountPath: /config
  readOnly: true
{{- end -}}

{{- define "linkwise.configVolumes" -}}
- name: available-configs
  configMap:
    name: {{ .configMap }}
- name: config
  emptyDir: {sizeLimit: 4Mi}
{{- end -}}

{{/* Over this folder an operator releases the driver in all our pods of the node; the plugin's mount holds it too. */}}
{{- define "linkwise.driverGateMount" -}}
- name: kubelet-device-plugins-dir
  mountPath: /var/lib/kubelet/device-plugins/linkwise/driver
  # Nothing else of it. The kubelet makes the folder.
  subPath: linkwise/driver
{{- end -}}

{{- define "linkwise.driverGateVolume" -}}
- name: kubelet-device-plugins-dir
  hostPath:
    path: {{ .Values.kubeletRootDir | default "/var/lib/kubelet" | trimSuffix "/" }}/device-plugins
    # A folder made for us would hide a kubelet with another root folder.
    type: Directory
{{- end -}}

{{/* The folder from which Node Feature Discovery reads labels. */}}
{{- define "linkwise.featuresMount" -}}
- name: output-dir
  mountPath: /etc/kubernetes/node-feature-discovery/features.d
{{- end -}}

{{- define "linkwise.featuresVolume" -}}
- name: output-dir
  hostPath:
    path: /etc/kubernetes/node-feature-discovery/features.d
    type: DirectoryOrCreate
{{- end -}}

{{/* What a pod gets of its ServiceAccount, for the containers that speak to the API server. */}}
{{- define "linkwise.apiAccess" -}}
- name: api-access
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3607
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end -}}
