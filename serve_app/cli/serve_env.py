"""Reads `cluster/serve.env`, the one file of Ray's switches, the way `sh` would when it sources it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from serve_app.errors import InvalidRequest, PreflightFailed

PACKAGED = Path(__file__).with_name("serve.env")

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_EXPANSION = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")


def find_serve_env(home: Path) -> Path:
    """The file in force: `cluster/serve.env` of the user's project, else the one that came with this package.

    Args:
        home: The folder of `deployments.yaml`.

    Raises:
        PreflightFailed: There is none, which a broken installation alone can be.
    """
    for candidate in (home / "cluster" / "serve.env", PACKAGED):
        if candidate.is_file():
            return candidate
    raise PreflightFailed("serve.env, the file of Ray's switches, is missing.", "install serve_app again.")


def parse_serve_env(text: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The assignments of a file of `KEY=VALUE` lines, in order, each expanded with those before it.

    Understood are blank lines, comments (a line, or ` #` after a value), `export`, single and double quotes around
    a whole value, and in all but single quotes `$NAME`, `${NAME}` and `${NAME:-default}`. As in the shell a name
    that is unset expands to nothing and `:-` also replaces an empty value.

    Args:
        text: Content of the file.
        environ: Variables that are set beforehand.

    Returns:
        What the file assigns, and nothing else.

    Raises:
        InvalidRequest: A line is no assignment, or uses more of the shell than this reads.
    """
    assigned: dict[str, str] = {}
    known = dict(environ)
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        match = _ASSIGNMENT.fullmatch(stripped)
        if match is None:
            raise InvalidRequest(f"serve.env line {number}", repr(stripped), "KEY=VALUE")
        assigned[match[1]] = known[match[1]] = _value(match[2], known, number)
    return assigned


def load_serve_env(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What the file assigns and `environ` lacks (or has empty); see `parse_serve_env`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise PreflightFailed(f"{path} cannot be read ({problem.strerror}).", "make it readable.") from None
    return {name: value for name, value in parse_serve_env(text, environ).items() if not environ.get(name)}


def _value(raw: str, known: Mapping[str, str], number: int) -> str:
    if len(raw) >= 2 and raw[0] == raw[-1] == "'":
        return raw[1:-1]
    if len(raw) >= 2 and raw[0] == raw[-1] == '"':
        raw = raw[1:-1]
    else:
        raw = re.split(r"\s+#", raw, maxsplit=1)[0].rstrip()
        if re.search(r"[\s;&|<>()'\"]", _EXPANSION.sub("", raw)):
            raise InvalidRequest(f"serve.env line {number}", repr(raw), "a value with blanks or quotes in quotes")
    if re.search(r"[`\\]|\$\(", raw):
        raise InvalidRequest(f"serve.env line {number}", repr(raw), "no backslash and no command substitution")
    return _expand(raw, known)


def _expand(raw: str, known: Mapping[str, str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        value = known.get(name, "")
        return value if value or default is None else _expand(default, known)

    return _EXPANSION.sub(replacement, raw)
