#!/bin/sh
# Resolve pyproject.toml into the two lock files, for all supported Pythons at once and without registry addresses.
set -eu
cd "$(dirname "$0")/.."
.venv/bin/python -m pip install --quiet uv
compile() {
    .venv/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes \
        --no-emit-index-url --no-header --no-annotate --upgrade pyproject.toml "$@"
}
compile --extra cpu --extra samples --extra build -o requirements.lock
compile --extra cpu --extra samples --extra build --group dev -c requirements.lock -o requirements-dev.lock
