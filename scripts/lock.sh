#!/bin/sh
# Resolve pyproject.toml into the lock files, for all supported Pythons at once and without registry addresses.
set -eu
cd "$(dirname "$0")/.."
.venv/bin/python -m pip install --quiet uv
compile() {
    .venv/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes \
        --no-emit-index-url --no-header --no-annotate --upgrade "$@"
}
compile pyproject.toml --extra cpu --extra samples --extra build -o requirements.lock
compile pyproject.toml --extra cpu --extra samples --extra build --group dev -c requirements.lock -o requirements-dev.lock
compile --group clients -o tests/clients/kserve.lock
