"""The patterns of the variable parts of error messages, and the signs that replace them.

Messages with the same cause are equal after the replacement, which makes them a signature. Java and Python both support the
syntax of the patterns.
"""

from __future__ import annotations

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_ENDINGS = "com|net|org|io|dev|app|cloud|internal|local|localdomain|lan|intranet|svc|test|example|invalid|eu|uk|de|fr|nl|ch|us"
_FILES = "py|js|ts|java|go|rb|rs|c|cc|cpp|h|php|sql|sh|json|ya?ml|xml|html|txt|log|csv"
_UNITS = "ns|us|µs|ms|s|sec|m|min|h|hr|d"
_JSON = (r"\{\s*(?:[\"'][^{}]*)?\}", "<json>")

# The patterns are applied in this order.
VARYING = (
    (r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", "<id>"),
    (r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b", "<mail>"),
    (r"\b\w+://[^\s'\"]+", "<url>"),
    (r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?( ?(Z|UTC|GMT)| ?[+-]\d{2}:?\d{2})?)?", "<time>"),
    (r"\b\d{1,2}[/ ][A-Z][a-z]{2}[/ ]\d{4}[: ]\d{2}:\d{2}:\d{2}( ?(Z|UTC|GMT)| ?[+-]\d{4})?", "<time>"),
    (r"\b[A-Z][a-z]{2} +\d{1,2} \d{2}:\d{2}:\d{2}\b", "<time>"),
    # JSON, from the inside out.
    _JSON,
    _JSON,
    _JSON,
    _JSON,
    # Addresses, with their ports: hardware, IPv6, IPv4; then hosts.
    (r"(?<![\w:-])[0-9a-fA-F]{2}([:-][0-9a-fA-F]{2}){5}(?![\w:-])", "<address>"),
    (r"\[(?=[^\]\s]*:[^\]\s]*:)[0-9a-fA-F:.]+(%\w+)?\](:\d{1,5}\b)?", "<address>"),
    (
        r"(?<![\w:.])(?=[^\s\]]*\d)(?=[0-9a-fA-F:]*::|([0-9a-fA-F]{1,4}:){7})[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}(\.\d{1,3}){0,3}"
        r"(%\w+)?(/\d{1,3})?(?![\w:])",
        "<address>",
    ),
    (r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(:\d{1,5}\b|/\d{1,2}\b)?(?![\w]|\.\d)", "<address>"),
    (r"\b\d{1,2}:\d{2}:\d{2}([.,]\d+)?\b", "<time>"),
    (rf"(?<![\w.@/-])({_LABEL}\.)+({_ENDINGS})(:\d{{1,5}}\b)?(?![\w-]|\.\w)", "<host>"),
    (
        rf"(?<![\w.@/-])(?![\w.-]+\.({_FILES}):)(localhost|[a-zA-Z][a-zA-Z0-9-]*(\.{_LABEL})+|[a-zA-Z][a-zA-Z0-9]*-[a-zA-Z0-9-]*\d[a-zA-Z0-9-]*)"
        r":\d{2,5}\b",
        "<host>",
    ),
    (r"(?<![\w<])[A-Za-z]:\\[^\s'\",;:]+", "<path>"),
    (r"(?<![\w<])(/[\w.@+-]+){2,}/?", "<path>"),
    # Quoted text, but not from one apostrophe to the next; and the values that PostgreSQL names of a key.
    (r"(?<!\w)'[^']*'(?!\w)|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|\u201c[^\u201d]*\u201d|\u2018[^\u2019]*\u2019", "<text>"),
    (r"(?<=\)=)\([^)]*\)", "(<text>)"),
    (r"\b0x[0-9a-fA-F]+\b|\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b", "<hex>"),
    # Ids with a prefix (cus_8Kd02kfL), ULIDs, AWS' ids.
    (r"\b[a-z]{2,8}_(?=[a-zA-Z]*\d)(?=\d*[a-zA-Z])[0-9A-Za-z]{8,}\b", "<id>"),
    (r"\b(?=[A-Z]*\d)(?=\d*[A-Z])[0-9A-Z]{16,}\b", "<id>"),
    (rf"(?<![\w.])(\d+(\.\d+)?({_UNITS}))+(?!\w)", "<duration>"),
    # A number, also with a unit, but not the digits of a word such as B6. The digits of a name such as user_17 are variable.
    (r"(?<![\w.])(\d{1,3}(,\d{3})+|\d+)(\.\d+)*([eE][+-]?\d+)?([kKMGT]i?[bB]|[bB]|%)?(?!\w)", "<n>"),
    (r"(?<=[a-zA-Z]_)\d+(?!\w)", "<n>"),
    # Lists of any length.
    (r"(<\w+>)(\s*,\s*\1)+", "$1, ..."),
)
