"""What a model repository folder holds, read the way `tritonserver` will read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from serve_app.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One folder of a model repository.

    Attributes:
        name: The model's name, which is the folder's.
        versions: Numeric version folders, ascending.
        has_config: Whether there is a `config.pbtxt`.
        has_full_config: Whether that config can be used with `--disable-auto-complete-config`.
        config_error: Why `config.pbtxt` cannot be read; empty when it can, or is not there.
    """

    name: str
    versions: tuple[int, ...]
    has_config: bool
    has_full_config: bool
    config_error: str = ""

    @property
    def is_servable(self) -> bool:
        """Whether Triton can find something to load: every model needs a version folder, ensembles too."""
        return bool(self.versions)


def check_model_name(name: str) -> str:
    """Return `name` if it can be a model's folder name.

    Raises:
        InvalidRequest: It is empty, too long, or could lead out of the repository.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest("model name", repr(name[:64]), "letters, digits, '.', '_', '-', not starting with a sign")
    return name


def list_models(repository: Path) -> list[RepositoryModel]:
    """Every model folder of a repository, by name: one that has a `config.pbtxt` or a numeric version folder.

    Raises:
        OSError: The folder cannot be read.
    """
    found = []
    for folder in sorted(repository.iterdir()):
        if not _NAME.fullmatch(folder.name) or not folder.is_dir():
            continue
        model = _read_model(folder)
        if model.has_config or model.versions:
            found.append(model)
    return found


def _read_model(folder: Path) -> RepositoryModel:
    versions = sorted(
        int(child.name)
        for child in folder.iterdir()
        if child.name.isascii() and child.name.isdigit() and child.name != "0" and child.is_dir()
    )
    config_path = folder / "config.pbtxt"
    if not config_path.is_file():
        return RepositoryModel(folder.name, tuple(versions), has_config=False, has_full_config=False)
    config, error = None, ""
    try:
        config = text_format.Parse(
            config_path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig(), allow_unknown_field=True
        )
    except (OSError, UnicodeDecodeError, text_format.ParseError) as problem:
        error = str(problem).splitlines()[0][:200]
    return RepositoryModel(
        folder.name,
        tuple(versions),
        has_config=True,
        has_full_config=config is not None and is_full_config(config),
        config_error=error,
    )


def is_full_config(config: model_config_pb2.ModelConfig) -> bool:
    """Whether nothing is left for Triton to complete: backend, and name, datatype and shape of every tensor."""
    has_backend = bool(config.backend or config.platform or config.HasField("ensemble_scheduling"))
    tensors = [*config.input, *config.output]
    return (
        has_backend
        and bool(config.input)
        and bool(config.output)
        and all(
            t.name and t.data_type != model_config_pb2.TYPE_INVALID and (len(t.dims) > 0 or t.HasField("reshape"))
            for t in tensors
        )
    )


def can_disable_auto_complete(models: list[RepositoryModel]) -> bool:
    """Whether every model brings a full config, which saves an extra start of each python stub (about 1 s each)."""
    return all(model.has_full_config for model in models)
