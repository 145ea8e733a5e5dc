"""Formats as patterns. Each allows only what every reader of the format takes: fewer, not more."""

from __future__ import annotations

_YEAR = "[12][0-9]{3}"
_DATE = (
    f"{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-][01][0-9]:[0-5][0-9])"
_DAYS = "(?:[0-9]{1,4}D|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?)"
_HOURS = "(?:[0-9]{1,4}S|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?)"
_LABEL = "[a-z](?:[a-z0-9]{0,30}|[a-z0-9]{0,20}-[a-z0-9]{1,20})"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-f]{1,4}"
_PATH = "(?:/[A-Za-z0-9._~-]*)*"
_TAIL = rf"{_PATH}(?:\?[A-Za-z0-9=&._~-]*)?(?:#[A-Za-z0-9._~-]*)?"
_URI = f"[a-z][a-z0-9+.-]{{0,14}}://{_HOST}(?::[0-9]{{1,4}})?{_TAIL}"
_EMAIL = rf"[A-Za-z0-9_+-]{{1,30}}(?:\.[A-Za-z0-9_+-]{{1,30}})?@{_HOST}"

STRING_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]{{1,4}}W|{_DAYS}(?:T{_HOURS})?|T{_HOURS})",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "host-name": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ip-address": _IPV4,
    "ipv6": f"(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP}:){{1,6}}:{_GROUP}|::{_GROUP}|::",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"(?:{_URI}|/[A-Za-z0-9._~-]+{_TAIL})",
    "iri-reference": f"(?:{_URI}|/[A-Za-z0-9._~-]+{_TAIL})",
    "uri-template": _URI,
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "json-pointer": "(?:/[A-Za-z0-9_-]*)*",
    "relative-json-pointer": "(?:0|[1-9][0-9]{0,3})(?:#|(?:/[A-Za-z0-9_-]*)*)",
    "color": "#[0-9a-f]{6}",
    "regex": "[A-Za-z0-9_ -]*",
}
# Of OpenAPI.
NUMBER_FORMATS: dict[str, dict[str, int]] = {
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "int64": {"minimum": -(2**53), "maximum": 2**53},
}
