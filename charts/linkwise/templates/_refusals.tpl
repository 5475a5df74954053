{{/* Refusals that the schema cannot express, because they depend on several values or need a reason. */}}
{{- define "linkwise.refuse" -}}
{{- $config := .Values.config | default dict -}}
{{- $map := $config.map | default dict -}}

{{- if (.Values.nfd).enabled -}}
{{- fail (printf "\nnfd.enabled: this chart does not install Node Feature Discovery. Install it by its own chart, and leave nfd.enabled out:\n\n%s" (include "linkwise.installNfd" .)) -}}
{{- end -}}

{{- $repository := (.Values.image).repository | default "" -}}
{{- if and (hasSuffix "/k8s-device-plugin" $repository) (ne $repository "nvcr.io/nvidia/k8s-device-plugin") -}}
{{- fail (printf "\nimage.repository: %s is a copy of NVIDIA's image; set it to an image of linkwise." $repository) -}}
{{- end -}}

{{- if and (eq (include "linkwise.namespace" .) "default") (not .Values.allowDefaultNamespace) -}}
{{- fail "\nThe namespace is `default`: choose another by --namespace (with --create-namespace), or set allowDefaultNamespace=true." -}}
{{- end -}}

{{- if and (.Values.gfd).enabled (.Values.devicePlugin).writeLabelsFile -}}
{{- fail "\ngfd.enabled and devicePlugin.writeLabelsFile are both set, and both write the node's labels; leave one of them out." -}}
{{- end -}}

{{- $surge := ((.Values.updateStrategy).rollingUpdate).maxSurge | default 0 | toString -}}
{{- if and (.Values.devicePlugin).enableHostNetwork (not (has $surge (list "0" "0%"))) -}}
{{- fail "\nupdateStrategy.rollingUpdate.maxSurge: with devicePlugin.enableHostNetwork a second pod cannot bind its port; leave maxSurge out." -}}
{{- end -}}

{{- if and ((.Values.metrics).networkPolicy).enabled (.Values.devicePlugin).enableHostNetwork -}}
{{- fail "\nmetrics.networkPolicy.enabled: a NetworkPolicy does not apply to pods of the host's network; leave it or devicePlugin.enableHostNetwork out." -}}
{{- end -}}

{{- if and (.Values.dra).enabled (not (.Values.devicePlugin).enabled) -}}
{{- fail "\ndra.enabled: the DRA driver runs in the plugin; set devicePlugin.enabled too." -}}
{{- end -}}

{{- if and (.Values.events).enabled (not (.Values.devicePlugin).enabled) -}}
{{- fail "\nevents.enabled: the plugin writes the events; set devicePlugin.enabled too." -}}
{{- end -}}

{{- $condition := .Values.nodeCondition | default dict -}}
{{- if and $condition.enabled (not (.Values.devicePlugin).enabled) -}}
{{- fail "\nnodeCondition.enabled: the plugin writes the condition; set devicePlugin.enabled too." -}}
{{- end -}}
{{- if and $condition.startupTaints (not $condition.enabled) -}}
{{- fail "\nnodeCondition.startupTaints: linkwise removes them when the condition is True; set nodeCondition.enabled too." -}}
{{- end -}}
{{- if and $condition.enabled (not (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version)) -}}
{{- fail "\nnodeCondition.enabled: the policy that restricts each pod to its own node needs Kubernetes 1.30." -}}
{{- end -}}

{{- if and (.Values.dra).enabled (not .Values.dra.gpus) (not $config.name) (not $map) -}}
{{- fail "\ndra.enabled: dra.gpus is empty, and there is no configuration file to set linkwise.dra.gpus; set dra.gpus=all, or give files in config.map or config.name." -}}
{{- end -}}

{{- if not (has ((.Values.dra).gpus | default "" | toString) (list "" "all" "none")) -}}
{{- fail "\ndra.gpus: expected all, none, or nothing. Lists of GPUs were removed, because all GPUs of a node go through one API: leave dra.gpus empty, and give the nodes that are to use DRA a configuration with linkwise.dra.gpus: all (docs/migrating-to-dra.md)." -}}
{{- end -}}

{{- $dra := .Values.dra | default dict -}}
{{- if and (not $dra.enabled) (or ($dra.unchangedPods).enabled ($dra.severalClaims).enabled ($dra.claimTemplates).namespaces) -}}
{{- fail "\ndra.unchangedPods, dra.severalClaims and dra.claimTemplates need DRA; set dra.enabled too." -}}
{{- end -}}

{{- if $dra.groups -}}
{{- fail "\ndra.groups: groups of 2, 4 and 8 GPUs are published, and no others. Leave it out; for another number of GPUs use linkwise claim --gpus N." -}}
{{- end -}}

{{- if and $dra.migRights (not $dra.enabled) -}}
{{- fail "\ndra.migRights: only the DRA driver makes MIG devices; set dra.enabled too." -}}
{{- end -}}

{{- if and $dra.mps (not $dra.enabled) -}}
{{- fail "\ndra.mps: MPS for claims needs DRA; set dra.enabled too." -}}
{{- end -}}

{{- $given := .Values.securityContext | default dict -}}
{{- if and $dra.migRights $given (not $given.privileged) (not (has "SYS_ADMIN" (($given.capabilities).add | default list))) -}}
{{- fail "\ndra.migRights: securityContext replaces the rights to make MIG devices; give it privileged: true, or SYS_ADMIN in capabilities.add." -}}
{{- end -}}
{{- if and $dra.enabled $dra.dynamicMig (not $dra.migRights) (not $given.privileged) -}}
{{- fail "\ndra.dynamicMig: making MIG devices needs SYS_ADMIN and the driver's capability mig/config. Set dra.migRights=true to give them to the plugin (docs/mig.md)." -}}
{{- end -}}

{{- /* Removed values. `helm upgrade --reuse-values` still has their old defaults, so these are accepted. */ -}}
{{- /* Sets of GPUs as devices: */ -}}
{{- if not (has ($dra.sets | toString) (list "<nil>" "off" "false")) -}}
{{- fail "\ndra.sets: sets of GPUs as devices were removed; leave it out. In pods that ask for linkwise.dev/gpu-x4 and the like, ask for nvidia.com/gpu instead, with dra.unchangedPods and dra.claimTemplates (docs/dra-pods.md), or use claims with groups (linkwise claim --gpus 4)." -}}
{{- end -}}

{{- if not (has ((.Values.devicePlugin).standby | toString) (list "<nil>" "false")) -}}
{{- fail "\ndevicePlugin.standby: the standby process for crashes was removed; leave it out. The kubelet restarts the container." -}}
{{- end -}}

{{- if and $config.name $map -}}
{{- fail (printf "\nconfig.name (%s) and config.map are both set: leave out config.map to use the existing ConfigMap, or config.name to use the one that this chart makes." $config.name) -}}
{{- end -}}

{{- range $name, $text := $map -}}
{{- $read := fromYaml $text -}}
{{- with $read.Error -}}
{{- fail (printf "\nconfig.map.%s is not a YAML mapping: %s" $name .) -}}
{{- end -}}
{{- if and (hasKey $read "kind") (hasKey $read "data") -}}
{{- fail (printf "\nconfig.map.%s is a whole ConfigMap; give the text below one of its data keys." $name) -}}
{{- end -}}
{{- range $key := list "flags" "sharing" "linkwise" -}}
{{- with get $read $key -}}
{{- if not (kindIs "map" .) -}}
{{- fail (printf "\nconfig.map.%s: %s is not a mapping." $name $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and ($read.sharing | default dict).mps ($.Values.openshift).enabled -}}
{{- fail (printf "\nconfig.map.%s: sharing.mps: openshift.enabled admits only the least privileges, and the MPS daemon is privileged. Leave openshift.enabled out, and give the service account the SCC privileged (docs/chart.md)." $name) -}}
{{- end -}}
{{- with ($read.flags | default dict).plugin -}}
{{- if not (kindIs "map" .) -}}
{{- fail (printf "\nconfig.map.%s: flags.plugin is not a mapping." $name) -}}
{{- end -}}
{{- end -}}
{{- range $gone := list
  (list "traces" "there is no exporter of spans. Leave it out; the plugin's log has the same facts.")
  (list "dra.groups" "groups of 2, 4 and 8 GPUs are published, and no others. Leave it out; for another number of GPUs use linkwise claim --gpus N.")
  (list "dra.driverName" "the DRA driver is gpu.nvidia.com. Leave it out, and use gpu.nvidia.com in classes and claims.")
  (list "policies" "flags.plugin.sharedDevicesAllocationPolicy holds for all resources. Leave policies out.")
  (list "allowedUids" "root and linkwise's own user may call its sockets. Leave it out.")
  (list "expose.ncclTopology" "linkwise writes no topology file; NCCL reads the node itself. Leave it out.")
  (list "ncclTopologyDir" "linkwise writes no topology file; NCCL reads the node itself. Leave it out.")
-}}
{{- $at := $read.linkwise | default dict -}}
{{- $keys := splitList "." (first $gone) -}}
{{- range initial $keys -}}{{- $at = ternary (get $at .) dict (kindIs "map" (get $at .)) -}}{{- end -}}
{{- if hasKey $at (last $keys) -}}
{{- fail (printf "\nconfig.map.%s: linkwise.%s: %s" $name (first $gone) (last $gone)) -}}
{{- end -}}
{{- end -}}
{{- with ($read.linkwise | default dict).dra -}}
{{- if not (kindIs "map" .) -}}
{{- fail (printf "\nconfig.map.%s: linkwise.dra is not a mapping." $name) -}}
{{- end -}}
{{- if and $dra.enabled .dynamicMig (not $dra.migRights) (not $given.privileged) -}}
{{- fail (printf "\nconfig.map.%s: linkwise.dra.dynamicMig: making MIG devices needs SYS_ADMIN and the driver's capability mig/config. Set dra.migRights=true to give them to the plugin (docs/mig.md)." $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if and $config.default (not $map) (not $config.name) -}}
{{- fail (printf "\nconfig.default: %s names a file of a ConfigMap, but there is no ConfigMap: give the files in config.map, or the ConfigMap's name in config.name." $config.default) -}}
{{- end -}}

{{- $exact := ($dra.claimTemplates).exact | default "" -}}
{{- range $namespace := ($dra.claimTemplates).namespaces -}}
{{- with lookup "resource.k8s.io/v1" "ResourceClaimTemplate" $namespace "linkwise-gpus-2" -}}
{{- $first := .spec.spec.devices.requests | default list | first | default dict -}}
{{- $was := get (.metadata.labels | default dict) "linkwise.dev/exact" | default (ternary "" "other" (hasKey $first "firstAvailable")) -}}
{{- $own := eq (get (.metadata.annotations | default dict) "meta.helm.sh/release-name") $.Release.Name -}}
{{- if and $own (ne $was $exact) (not (and (eq $was "other") $exact)) -}}
{{- fail (printf "\ndra.claimTemplates.exact: the spec of a ResourceClaimTemplate cannot change. Delete the templates of namespace %s, and upgrade again; pods that are created meanwhile wait for them:\n\n  kubectl delete resourceclaimtemplates -n %s -l app.kubernetes.io/instance=%s" $namespace $namespace $.Release.Name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if and $config.default $map (not (hasKey $map $config.default)) -}}
{{- fail (printf "\nconfig.default: config.map has no file %s; it has %s." $config.default (keys $map | sortAlpha | join ", ")) -}}
{{- end -}}

{{- $fallbacks := $config.fallbackStrategies | default list -}}
{{- $named := and (has "named" $fallbacks) (hasKey $map "default") -}}
{{- $single := and (has "single" $fallbacks) (eq (len $map) 1) -}}
{{- if and $map (not (or $config.default $named $single (has "empty" $fallbacks))) -}}
{{- fail (printf "\nconfig.default is not set, and config.fallbackStrategies (%s) select none of the files in config.map: %s." (join ", " $fallbacks) (keys $map | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
