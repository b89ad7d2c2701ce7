{{- /* The name of every object. A Service's name is a DNS label: no dots, no leading digit, at most 63 characters with the suffix. */ -}}
{{- define "bf16kit.fullname" -}}
{{- $name := .Release.Name | replace "." "-" -}}
{{- if not (contains "bf16kit" $name) -}}
{{- $name = printf "%s-bf16kit" $name -}}
{{- end -}}
{{- if regexMatch "^[0-9]" $name -}}
{{- $name = printf "bf16kit-%s" $name -}}
{{- end -}}
{{- regexReplaceAll "-+$" (trunc 50 $name) "" -}}
{{- end -}}

{{- /* A Deployment's selector is immutable, so nothing in it may depend on a version or on values. */ -}}
{{- define "bf16kit.selector" -}}
app.kubernetes.io/name: bf16kit
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "bf16kit.labels" -}}
{{ include "bf16kit.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{- define "bf16kit.claim" -}}
{{- .Values.models.existingClaim | default (printf "%s-models" (include "bf16kit.fullname" .)) -}}
{{- end -}}

{{- define "bf16kit.image" -}}
{{- with .Values.image -}}
{{- ternary (printf "%s@%s" .repository .digest) (printf "%s:%s" .repository .tag) (ne .digest "") -}}
{{- end -}}
{{- end -}}

{{- /* A probe: a health check over gRPC. The kubelet cannot use TLS there; if the gRPC port has it, the probe goes to the
HTTP port. */ -}}
{{- define "bf16kit.probe" -}}
{{- $config := .root.Values.config -}}
{{- if $config.tls_certificate -}}
httpGet: {path: {{ .path }}, port: {{ int $config.http_port }}, scheme: HTTPS}
{{- else -}}
grpc: {port: {{ int $config.grpc_port }}, service: {{ .service }}}
{{- end -}}
{{- end -}}
