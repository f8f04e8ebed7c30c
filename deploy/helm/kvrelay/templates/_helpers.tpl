{{- define "kvrelay.name" -}}
{{- default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvrelay.selector" -}}
app.kubernetes.io/name: kvrelay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvrelay.labels" -}}
{{ include "kvrelay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvrelay.secret" -}}
{{- default (include "kvrelay.name" .) .Values.secrets.existing -}}
{{- end -}}

{{- define "kvrelay.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "kvrelay.secretEnv" -}}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end -}}

{{- define "kvrelay.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvrelay.security" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "kvrelay.cacheVolume" -}}
- name: cache
  {{- if or .Values.modelCache.existingClaim .Values.modelCache.storage }}
  persistentVolumeClaim:
    claimName: {{ .Values.modelCache.existingClaim | default (printf "%s-models" (include "kvrelay.name" .)) }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end -}}

{{- /* What pods have beside the chart's own, of `root` and of `own`: .field is one of the three. */ -}}
{{- define "kvrelay.further" -}}
{{- $all := concat (get .root.Values .field) (get .own .field | default list) -}}
{{- if $all }}{{ toYaml $all }}{{ end -}}
{{- end -}}

{{- /* Containers that fetch models, then those of the values. */ -}}
{{- define "kvrelay.initContainers" -}}
{{- $root := .root -}}
{{- range $i, $each := $root.Values.modelCache.fetch }}
- name: fetch-{{ $i }}
  image: {{ $each.image | default (include "kvrelay.image" $root) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if $each.model }}
  command: ["kvrelay", "fetch", {{ $each.model | quote }}, "--revision", {{ $each.revision | quote }}]
  {{- else }}
  command: {{ toJson $each.command }}
  {{- end }}
  {{- $env := printf "%s\n%s" (include "kvrelay.modelEnv" $root) ($each.env | default list | toYaml | trimAll "[]") | trim }}
  {{- with $env }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  resources:
    requests: {memory: {{ $root.Values.modelCache.fetchMemory }}}
    limits: {memory: {{ $root.Values.modelCache.fetchMemory }}}
  securityContext:
    {{- include "kvrelay.security" $root | nindent 4 }}
  volumeMounts:
    - {name: cache, mountPath: /home/kvrelay/.cache}
{{- end }}
{{ include "kvrelay.further" (merge (dict "field" "initContainers") .) }}
{{- end -}}

{{- /* Pods of the API: what there is at first. */ -}}
{{- define "kvrelay.replicas" -}}
{{- with .Values.api }}{{ ternary .autoscaling.minReplicas .replicas .autoscaling.enabled | int }}{{ end -}}
{{- end -}}

{{- /* One that has a claim for each pod becomes as many groups of one pod, which KubeRay has no
other form for. As a map, in YAML. */ -}}
{{- define "kvrelay.groups" -}}
{{- $found := list -}}
{{- range $group := .Values.ray.workerGroups -}}
{{- $disk := $group.diskTier | default dict -}}
{{- if gt (len (compact (list $disk.hostPath $disk.existingClaim $disk.storage))) 1 -}}
{{- fail (printf "ray.workerGroups: %s: diskTier: expected one of hostPath, existingClaim and storage" $group.name) -}}
{{- end -}}
{{- if $disk.storage -}}
{{- range $i := until (int $group.maxReplicas) -}}
{{- $own := deepCopy $group -}}
{{- $_ := set $own "name" (printf "%s-%d" $group.name $i) -}}
{{- $_ := set $own "maxReplicas" 1 -}}
{{- $_ := set $own "replicas" (ternary 1 0 (lt $i (int $group.replicas))) -}}
{{- $_ := set $own "minReplicas" (ternary 1 0 (lt $i (int $group.minReplicas))) -}}
{{- $_ := set $own "claim" (printf "%s-%s-%d-kv" (include "kvrelay.name" $) $group.name $i) -}}
{{- $found = append $found $own -}}
{{- end -}}
{{- else -}}
{{- $own := deepCopy $group -}}
{{- $_ := set $own "claim" ($disk.existingClaim | default "") -}}
{{- $found = append $found $own -}}
{{- end -}}
{{- end -}}
{{- dict "groups" $found | toYaml -}}
{{- end -}}

{{- define "kvrelay.hasDisk" -}}
{{- range .Values.ray.workerGroups }}{{ with .diskTier }}{{ if or .hostPath .existingClaim .storage }}yes{{ end }}{{ end }}{{ end -}}
{{- end -}}

{{- define "kvrelay.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvrelay.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Bytes, of 512mb as Redis writes it, 1Gi as Kubernetes does, or a number. */ -}}
{{- define "kvrelay.bytes" -}}
{{- $text := . | toString | lower -}}
{{- $number := regexFind "^[0-9]+" $text | int64 -}}
{{- $unit := regexFind "[a-z]*$" $text -}}
{{- if hasPrefix "k" $unit }}{{ mul $number 1024 }}
{{- else if hasPrefix "m" $unit }}{{ mul $number 1048576 }}
{{- else if hasPrefix "g" $unit }}{{ mul $number 1073741824 }}
{{- else if hasPrefix "t" $unit }}{{ mul $number 1099511627776 }}
{{- else }}{{ $number }}{{ end -}}
{{- end -}}

{{- /* Refuses sizes that do not fit each other: a full Redis ends Ray's GCS. */ -}}
{{- define "kvrelay.fits" -}}
{{- $memory := include "kvrelay.bytes" .Values.redis.maxMemory | int64 -}}
{{- $pod := include "kvrelay.bytes" (dig "limits" "memory" "0" .Values.redis.resources) | int64 -}}
{{- if and $pod (gt (mul 2 $memory) $pod) -}}
{{- fail (printf "redis.maxMemory %s: expected half of redis.resources.limits.memory at most, which its log's rewrite needs as well" .Values.redis.maxMemory) -}}
{{- end -}}
{{- $batches := dig "state" "max_batch_bytes" 0 .Values.config | int64 -}}
{{- if and (gt (mul 4 $batches) $memory) (not (dig "state" "batches_url" "" .Values.config)) -}}
{{- fail (printf "config.state.max_batch_bytes %d: expected a quarter of redis.maxMemory (%s) at most: Ray's GCS, sessions and the leader's lease are in it too" $batches .Values.redis.maxMemory) -}}
{{- end -}}
{{- end -}}

{{- /* Half of the state's disk is for files of batches; stored answers and logs are in the other. */ -}}
{{- define "kvrelay.holds" -}}
{{- $logs := dig "log" "total_mib" 1024 .Values.config | int64 -}}
{{- $least := mul 2 (add 4096 $logs) -}}
{{- if lt (include "kvrelay.bytes" .Values.state.storage | int64) (mul $least 1048576) -}}
{{- fail (printf "state.storage %s: expected %dMi or more, twice what stored answers (4096Mi) and logs (config.log.total_mib %d) may take: files of batches have the other half" .Values.state.storage $least $logs) -}}
{{- end -}}
{{- end -}}

{{- /* The settings, with those that the chart knows itself: as a map, in YAML. */ -}}
{{- define "kvrelay.settings" -}}
{{- if .Values.redis.enabled }}{{ include "kvrelay.fits" . }}{{ end -}}
{{- if not .Values.state.existingClaim }}{{ include "kvrelay.holds" . }}{{ end -}}
{{- $config := deepCopy .Values.config -}}
{{- include "kvrelay.oneSource" . -}}
{{- $own := dict "cluster" (dict "address" "auto" "drain_s" .Values.api.drainSeconds) -}}
{{- if include "kvrelay.hasDisk" . -}}
{{- if not (or (include "kvrelay.hasFile" .) (dig "tiers" "disk_gib" 0 $config)) -}}
{{- fail "diskTier of a worker group without config.tiers.disk_gib: say how much of it KV may take" -}}
{{- end -}}
{{- $_ := set $own "tiers" (dict "disk_path" "/var/lib/kvrelay/kv") -}}
{{- end -}}
{{- if gt (include "kvrelay.replicas" . | int) 1 -}}
{{- if not (or .Values.redis.enabled (dig "state" "url" "" $config)) -}}
{{- fail "api.replicas above 1 needs Redis: set redis.enabled = true, or config.state.url" -}}
{{- end -}}
{{- if .Values.state.existingClaim -}}
{{- fail "api.replicas above 1 with state.existingClaim: a state directory is for one server. Leave state.existingClaim empty, and each pod has its own, or set api.replicas = 1" -}}
{{- end -}}
{{- $_ := set (get $own "cluster") "name" (include "kvrelay.name" .) -}}
{{- end -}}
{{- $_ := set $own "api" (dict "host" "0.0.0.0" "port" .Values.api.port) -}}
{{- if .Values.tenants.existingSecret -}}
{{- $_ := set $own "tenants" (dict "file" "/etc/kvrelay-tenants/tenants.toml") -}}
{{- end -}}
{{- if .Values.events.port -}}
{{- $events := dict "endpoint" (printf "tcp://*:%d" (int .Values.events.port)) -}}
{{- if .Values.events.replayPort -}}
{{- $_ := set $events "replay_endpoint" (printf "tcp://*:%d" (int .Values.events.replayPort)) -}}
{{- end -}}
{{- $_ := set $own "events" $events -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $own "tls" (dict "api" true "cert" "/etc/kvrelay-tls/tls.crt" "key" "/etc/kvrelay-tls/tls.key") -}}
{{- end -}}
{{- /* The next pod finds the workers, also where its image has to be pulled first. */ -}}
{{- $kept := dict "cluster" (dict "on_stop" "keep-workers" "orphan_s" 900) -}}
{{- mergeOverwrite $kept $config $own | toYaml -}}
{{- end -}}

{{- define "kvrelay.oneSource" -}}
{{- $given := compact (list .Values.configFile .Values.configFrom.configMap .Values.configFrom.secret) -}}
{{- if gt (len $given) 1 -}}
{{- fail "configFile, configFrom.configMap and configFrom.secret: expected one of the three" -}}
{{- end -}}
{{- range $name, $value := .Values.config -}}
{{- if and $given (not (kindIs "map" $value)) -}}
{{- fail (printf "config.%s: a list of tables belongs into the file that configFile or configFrom names" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Whether the settings file is the user's own, and the chart's settings go over it. */ -}}
{{- define "kvrelay.hasFile" -}}
{{- if or .Values.configFile .Values.configFrom.configMap .Values.configFrom.secret }}yes{{ end -}}
{{- end -}}

{{- define "kvrelay.tomlValue" -}}
{{- $value := . -}}
{{- if kindIs "map" $value -}}
{{ "{" }}{{ range $i, $key := keys $value | sortAlpha }}{{ if $i }}, {{ end }}{{ toJson $key }} = {{ include "kvrelay.tomlValue" (get $value $key) }}{{ end }}{{ "}" }}
{{- else if kindIs "slice" $value -}}
[{{ range $i, $each := $value }}{{ if $i }}, {{ end }}{{ include "kvrelay.tomlValue" $each }}{{ end }}]
{{- else -}}
{{ toJson $value }}
{{- end -}}
{{- end -}}

{{- /* Lists of tables come first: in a table they would belong to it. */ -}}
{{- define "kvrelay.toml" -}}
{{- $settings := include "kvrelay.settings" . | fromYaml -}}
{{- range $name, $value := $settings }}
{{- if not (kindIs "map" $value) }}
{{ $name }} = {{ include "kvrelay.tomlValue" $value }}
{{- end }}
{{- end }}
{{ range $section, $table := $settings }}
{{- if kindIs "map" $table }}
[{{ $section }}]
{{- range $name, $value := $table }}
{{ $name }} = {{ include "kvrelay.tomlValue" $value }}
{{- end }}
{{ end -}}
{{- end -}}
{{- end -}}

{{- /* The same for the command line, over a file. */ -}}
{{- define "kvrelay.overrides" -}}
{{- range $section, $table := include "kvrelay.settings" . | fromYaml }}
{{- range $name, $value := $table }}
- --set
- {{ printf "%s.%s=%s" $section $name (include "kvrelay.tomlValue" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* What the API's pod is made anew for. */ -}}
{{- define "kvrelay.configText" -}}
{{- $from := .Values.configFrom -}}
{{- include "kvrelay.toml" . -}}
{{- .Values.configFile -}}
{{- with $from.configMap }}{{ (lookup "v1" "ConfigMap" $.Release.Namespace .).data | toJson }}{{ end -}}
{{- with $from.secret }}{{ (lookup "v1" "Secret" $.Release.Namespace .).data | toJson }}{{ end -}}
{{- end -}}

{{- define "kvrelay.routers" -}}
{{- dig "cluster" "routers" 1 .Values.config | int -}}
{{- end -}}

{{- define "kvrelay.scheme" -}}
{{- $settings := include "kvrelay.settings" . | fromYaml -}}
{{- dig "tls" "api" false $settings | ternary "HTTPS" "HTTP" -}}
{{- end -}}

{{- /* Names of the routers' ports: "http", "http-1" and so on. */ -}}
{{- define "kvrelay.portName" -}}
http{{ if . }}-{{ . }}{{ end }}
{{- end -}}

{{- /* Ports of KV events, of each router: "events", "replay", "events-1" and so on, as a map. */ -}}
{{- define "kvrelay.eventPorts" -}}
{{- $ports := dict -}}
{{- range $i := until (include "kvrelay.routers" . | int) -}}
{{- $behind := ternary (printf "-%d" $i) "" (gt $i 0) -}}
{{- if $.Values.events.port -}}
{{- $_ := set $ports (printf "events%s" $behind) (add $.Values.events.port $i) -}}
{{- if $.Values.events.replayPort -}}
{{- $_ := set $ports (printf "replay%s" $behind) (add $.Values.events.replayPort $i) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}

{{- /* Environment of all processes that load models. */ -}}
{{- define "kvrelay.modelEnv" -}}
{{- with .Values.huggingFace }}
{{- if .existingSecret }}
{{ include "kvrelay.secretEnv" (dict "variable" "HF_TOKEN" "secret" .existingSecret "key" .key) }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* In bytes: nothing of KVRelay goes through it. Ray's default is 30 % of the pod's memory. */ -}}
{{- define "kvrelay.objectStore" -}}
83886080
{{- end -}}

{{- /* The label `cluster` of what is scraped. */ -}}
{{- define "kvrelay.cluster" -}}
{{- .Values.monitoring.cluster | default (include "kvrelay.name" .) -}}
{{- end -}}
