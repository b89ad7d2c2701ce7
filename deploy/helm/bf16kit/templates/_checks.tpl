{{- /* Checks that values.schema.json cannot express: values that are each valid, but together make pods that never serve, or that
ignore a setting. */ -}}
{{- define "bf16kit.checks" -}}
{{- $config := .Values.config -}}
{{- /* After the drain the server frees its models and exports its last traces: 5 s at most. */ -}}
{{- $ending := addf $config.lame_duck_seconds $config.drain_seconds 5 -}}
{{- if lt (float64 .Values.terminationGracePeriodSeconds) $ending -}}
{{- fail (printf "terminationGracePeriodSeconds is %v, which is less than lame_duck_seconds + drain_seconds + 5 (%v): requests in flight would be killed; raise it" .Values.terminationGracePeriodSeconds $ending) -}}
{{- end -}}
{{- if eq (int $config.grpc_port) (int $config.http_port) -}}
{{- fail (printf "config.grpc_port and config.http_port are both %v; give them different ports" $config.grpc_port) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %v, more than maxReplicas (%v); lower minReplicas or raise maxReplicas" .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) -}}
{{- end -}}
{{- range .Values.env -}}
{{- $key := lower .name | trimPrefix "bf16kit_" -}}
{{- if and (ne $key (lower .name)) (or (hasKey $config $key) (has $key (list "config" "tls_certificate" "token_file"))) -}}
{{- fail (printf "env has %s, which would override `config`, from which ports, probes and mounts are rendered; set it only in `config`" .name) -}}
{{- end -}}
{{- end -}}
{{- $named := list -}}
{{- range list "tls_certificate" "tls_key" "tls_client_ca" "token_file" -}}
{{- if hasPrefix "/etc/bf16kit-secret/" (get $config . | toString) -}}
{{- $named = append $named . -}}
{{- end -}}
{{- end -}}
{{- if and $named (not .Values.existingSecret) -}}
{{- fail (printf "config.%s is a file of the Secret that existingSecret names, but existingSecret is empty; set it to the Secret's name" (first $named)) -}}
{{- end -}}
{{- if and .Values.existingSecret (not $named) -}}
{{- fail (printf "existingSecret is %s, but no key of config names a file of it: the server would use neither TLS nor tokens; set tls_certificate and tls_key, or token_file, to files under /etc/bf16kit-secret" .Values.existingSecret) -}}
{{- end -}}
{{- end -}}
