{{- /* What values.schema.json cannot say: values that are right each by itself, and together make pods that never serve, or that do
not what they were told. */ -}}
{{- define "bf16kit.checks" -}}
{{- $config := .Values.config -}}
{{- $ending := addf $config.lame_duck_seconds $config.drain_seconds -}}
{{- if le (float64 .Values.terminationGracePeriodSeconds) $ending -}}
{{- fail (printf "terminationGracePeriodSeconds is %v, which is not more than lame_duck_seconds + drain_seconds (%v): requests at work would be killed; raise it" .Values.terminationGracePeriodSeconds $ending) -}}
{{- end -}}
{{- if eq (int $config.grpc_port) (int $config.http_port) -}}
{{- fail (printf "config.grpc_port and config.http_port are both %v; give them different ports" $config.grpc_port) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %v, more than maxReplicas (%v); lower it, or raise the other" .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) -}}
{{- end -}}
{{- range .Values.env -}}
{{- $key := lower .name | trimPrefix "bf16kit_" -}}
{{- if and (ne $key (lower .name)) (or (hasKey $config $key) (has $key (list "config" "tls_certificate" "token_file" "token_free"))) -}}
{{- fail (printf "env has %s, which would beat `config`, by which ports, probes and mounts are made; set it there alone" .name) -}}
{{- end -}}
{{- end -}}
{{- $named := list -}}
{{- range list "tls_certificate" "tls_key" "tls_client_ca" "reference_ca" "token_file" -}}
{{- if hasPrefix "/etc/bf16kit-secret/" (get $config . | toString) -}}
{{- $named = append $named . -}}
{{- end -}}
{{- end -}}
{{- if and $named (not .Values.existingSecret) -}}
{{- fail (printf "config.%s is a file of the Secret that existingSecret names, which is empty; name the Secret" (first $named)) -}}
{{- end -}}
{{- if and .Values.existingSecret (not $named) -}}
{{- fail (printf "existingSecret is %s, and no key of config names a file of it: the server would speak plain text and ask for no token; set tls_certificate and tls_key, or token_file, to files under /etc/bf16kit-secret" .Values.existingSecret) -}}
{{- end -}}
{{- end -}}
