{{- define "bf16kit.fullname" -}}
{{- if contains "bf16kit" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-bf16kit" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "bf16kit.selector" -}}
app.kubernetes.io/name: bf16kit
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "bf16kit.labels" -}}
{{ include "bf16kit.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "bf16kit.claim" -}}
{{- .Values.models.existingClaim | default (printf "%s-models" (include "bf16kit.fullname" .)) -}}
{{- end -}}

{{- /* What kubelet asks: the health service by name over gRPC, which has no TLS there; with TLS the HTTP port, over HTTPS. */ -}}
{{- define "bf16kit.probe" -}}
{{- if .root.Values.config.tls_certificate -}}
httpGet: {path: {{ .path }}, port: {{ .root.Values.config.http_port }}, scheme: HTTPS}
{{- else -}}
grpc: {port: {{ .root.Values.config.grpc_port }}, service: {{ .service }}}
{{- end -}}
{{- end -}}
