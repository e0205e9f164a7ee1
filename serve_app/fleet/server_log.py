"""What a tritonserver log says about why the server ended. Pure, on text."""

from __future__ import annotations

import re
from pathlib import Path

TAIL_BYTES = 64 * 1024
"""How much of a log's end is read; the reason for an end is in its last lines."""

MAX_REASON = 400
"""Characters of a reason that go into an error."""

_ERROR_LINE = re.compile(r"^[EF]\d{4} (?:[\d:.]+ +\d+ )?(?:[\w.]+:\d+\] *)?(?P<text>.*)$")
_PLAIN_LINE = re.compile(
    r"^(?:.*: )?(?P<text>(?:(?i:error|fatal)\b|unrecognized option |Bad option|invalid argument ).*)$"
)


def last_errors(text: str, *, max_lines: int = 2) -> str:
    """The last error lines of a log, oldest first, without their prefixes; empty when there is none."""
    found: list[str] = []
    for line in reversed(text.splitlines()):
        match = _ERROR_LINE.match(line) or _PLAIN_LINE.match(line)
        message = match["text"].strip().strip('"').strip() if match else ""
        if message and message not in found:
            # A stack trace follows the first line, with its line ends written out.
            found.append(message.partition("\\n")[0])
            if len(found) == max_lines:
                break
    return "; ".join(reversed(found))[:MAX_REASON]


def is_port_taken(text: str) -> bool:
    """Whether a server ended since something else listens on one of its ports."""
    return "already in use" in text.lower()


def read_tail(path: Path) -> str:
    """The end of a log file; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
