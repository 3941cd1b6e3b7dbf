{{- define "baton.name" -}}{{ $.Values.fullnameOverride | default $.Release.Name }}{{- end }}
{{- define "baton.image" -}}{{ required "image.repository: name the image with its registry, as registry.example.org/team/baton (docs/deployment.md builds and pushes it)" $.Values.image.repository }}:{{ $.Values.image.tag | default $.Chart.AppVersion }}{{- end }}
{{- define "baton.selector" -}}app.kubernetes.io/name: baton, app.kubernetes.io/instance: {{ $.Release.Name | quote }}{{- end }}
{{- define "baton.labels" -}}{{ include "baton.selector" $ }}, app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}, app.kubernetes.io/managed-by: {{ $.Release.Service | quote }}, helm.sh/chart: baton-{{ $.Chart.Version }}{{- range $key, $value := $.Values.commonLabels }}, {{ $key }}: {{ $value | quote }}{{- end }}{{- end }}
{{- define "baton.account" -}}
{{- if $.Values.serviceAccount.name }}{{ $.Values.serviceAccount.name }}{{- else }}
{{- if $.Values.serviceAccount.create }}{{ include "baton.name" $ }}{{- else }}default{{- end }}{{- end }}
{{- end }}
