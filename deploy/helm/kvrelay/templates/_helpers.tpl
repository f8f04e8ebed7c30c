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
  {{- if .Values.modelCache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.modelCache.existingClaim }}
  {{- else }}
  emptyDir: {}
  {{- end }}
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
{{- $own := dict "cluster" (dict "address" "auto" "drain_s" .Values.api.drainSeconds) -}}
{{- if gt (int .Values.api.replicas) 1 -}}
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

{{- define "kvrelay.toml" -}}
{{- range $section, $settings := include "kvrelay.settings" . | fromYaml }}
[{{ $section }}]
{{- range $name, $value := $settings }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{ end -}}
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
