{{/*
Labels and annotations of an object: its own, then those of all objects. Takes a list: the labels
that it always has, the values' own maps from the nearest to the farthest.
*/}}
{{- define "weft.merged" -}}
{{- $merged := dict -}}
{{- range . -}}
{{- $merged = merge $merged (default dict .) -}}
{{- end -}}
{{- with $merged }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/*
The image. A values file for flannel's chart may name flannel's own, in which there is no weft: then
it is the chart's.
*/}}
{{- define "weft.image" -}}
{{- $image := default dict .Values.flannel.image -}}
{{- if or (not $image.repository) (regexMatch "(^|/)flannel(-io)?/flannel$" $image.repository) -}}
weft:{{ .Chart.AppVersion }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* flannel's image with its CNI plugin, if one is named. */}}
{{- define "weft.cniImage" -}}
{{- $image := default dict (default dict .Values.flannel.flannel_cni).image -}}
{{- if not $image.repository }}{{ $image = default dict .Values.flannel.image_cni }}{{ end -}}
{{- with $image.repository }}{{ . }}:{{ required "the image of flannel's CNI plugin needs a tag" $image.tag }}{{ end -}}
{{- end -}}

{{/* Values of flannel's chart that name what is not built. */}}
{{- define "weft.refused" -}}
{{- range $key, $why := dict
    "macPrefix" "it is for nodes with Windows, which is not built" -}}
{{- if not (kindIs "invalid" (index $.Values.flannel $key)) -}}
{{- fail (printf "flannel.%s: %s; remove it" $key $why) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Keys of flannel's chart that are for one backend alone. */}}
{{- define "weft.ofWireguard" -}}
{{- range $key := list "psk" "tunnelMode" "keepaliveInterval" "backendPortv6" -}}
{{- if and (index $.Values.flannel $key) (ne $.Values.flannel.backend "wireguard") -}}
{{- fail (printf "flannel.%s is for the backend wireguard; remove it" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Options of weftd beside flannel.args. */}}
{{- define "weft.args" -}}
{{- $fast := .Values.flannel.fast -}}
{{- $args := list -}}
{{- with .Values.flannel.healthz.port }}{{ $args = append $args (printf "--healthz-port=%d" (int .)) }}{{ end -}}
{{- $args = append $args "--take-over" -}}
{{- with $fast.engine }}{{ $args = append $args (printf "--engine=%s" .) }}{{ end -}}
{{- with $fast.offload }}{{ $args = append $args (printf "--offload=%s" .) }}{{ end -}}
{{- with $fast.workers }}{{ $args = append $args (printf "--workers=%v" .) }}{{ end -}}
{{- with $fast.logFormat }}{{ $args = append $args (printf "--log-format=%s" .) }}{{ end -}}
{{- with $fast.fastPath }}{{ $args = append $args (printf "--fast-path=%s" .) }}{{ end -}}
{{- with $fast.peerCheck }}{{ $args = append $args (printf "--peer-check=%s" .) }}{{ end -}}
{{- if $fast.guard }}{{ $args = append $args "--guard" }}{{ end -}}
{{- with $fast.metrics.port }}{{ $args = append $args (printf "--metrics-address=0.0.0.0:%d" (int .)) }}{{ end -}}
{{- range concat .Values.flannel.args $args }}
- {{ . | quote }}
{{- end -}}
{{- end -}}

{{/* net-conf.json, in the order of the manifest. */}}
{{- define "weft.netConf" -}}
{{- $f := .Values.flannel -}}
{{- $clouds := list "aws-vpc" "gce" "ali-vpc" "tencent-vpc" -}}
{{- $known := concat (list "vxlan" "host-gw" "ipip" "udp" "wireguard" "alloc") $clouds -}}
{{- if not (has $f.backend $known) -}}
{{- fail (printf "flannel.backend is %s; weft has %s" $f.backend (join ", " $known)) -}}
{{- end -}}
{{- include "weft.ofWireguard" . -}}
{{- if not (or .Values.podCidr .Values.podCidrv6) -}}
{{- fail "podCidr and podCidrv6 are empty: give one of them, or both" -}}
{{- end -}}
{{- if and .Values.podCidrv6 (has $f.backend $clouds) -}}
{{- fail (printf "podCidrv6 is given, and the backend %s carries IPv4 alone: leave it out, or choose vxlan" $f.backend) -}}
{{- end -}}
{{- if and (not .Values.podCidr) (has $f.backend (list "udp" "ipip")) -}}
{{- fail (printf "podCidr is empty, and the backend %s needs IPv4: give podCidr, or choose vxlan or host-gw" $f.backend) -}}
{{- end -}}
{
{{- if .Values.podCidr }}
  "Network": {{ .Values.podCidr | quote }},
{{- else }}
  "EnableIPv4": false,
{{- end }}
{{- if .Values.podCidrv6 }}
  "IPv6Network": {{ .Values.podCidrv6 | quote }},
  "EnableIPv6": true,
{{- end }}
  "EnableNFTables": {{ $f.enableNFTables }},
  "Backend": {
{{- if and $f.backendPort (has $f.backend (list "vxlan" "udp")) }}
    "Port": {{ int $f.backendPort }},
{{- end }}
{{- if and $f.mtu (has $f.backend (list "vxlan" "udp" "wireguard")) }}
    "MTU": {{ int $f.mtu }},
{{- end }}
{{- if eq $f.backend "vxlan" }}
{{- with $f.vni }}
    "VNI": {{ int . }},
{{- end }}
{{- with $f.GBP }}
    "GBP": {{ . }},
{{- end }}
{{- end }}
{{- if and $f.directRouting (has $f.backend (list "vxlan" "ipip")) }}
    "DirectRouting": {{ $f.directRouting }},
{{- end }}
{{- if eq $f.backend "wireguard" }}
{{- with $f.backendPort }}
    "ListenPort": {{ int . }},
{{- end }}
{{- with $f.backendPortv6 }}
    "ListenPortV6": {{ int . }},
{{- end }}
{{- with $f.psk }}
    "PSK": {{ . | quote }},
{{- end }}
{{- with $f.tunnelMode }}
    "Mode": {{ . | quote }},
{{- end }}
{{- with $f.keepaliveInterval }}
    "PersistentKeepaliveInterval": {{ int . }},
{{- end }}
{{- end }}
    "Type": {{ $f.backend | quote }}
  }
}
{{- end -}}
