"""What a model repository folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.errors import InvalidRequest, PreflightFailed
from serve_app.fleet.preflight import check_repository
from serve_app.fleet.repository import can_disable_auto_complete, check_model_name, list_models
from tests.support.triton_server import python_config, write_model


def test_models_are_folders_with_a_config_or_a_version(tmp_path: Path) -> None:
    """Files, hidden folders and folders with neither are no models; versions are numeric folders in numeric order."""
    write_model(tmp_path, "full", files={"10/model.py": "", "2/model.py": "", "0/x": "", "v3/x": "", "labels.txt": ""})
    write_model(tmp_path, "bare", config="", files={"1/model.onnx": b""})
    write_model(tmp_path, "unbuilt", files={})
    write_model(tmp_path, ".hidden")
    write_model(tmp_path, "notes", config="", files={"README.md": ""})
    (tmp_path / "README.md").touch()
    models = {model.name: model for model in list_models(tmp_path)}
    assert list(models) == ["bare", "full", "unbuilt"]
    assert models["full"].versions == (2, 10)
    assert (models["full"].has_config, models["full"].has_full_config) == (True, True)
    assert (models["bare"].has_config, models["bare"].is_servable) == (False, True)
    assert not models["unbuilt"].is_servable


@pytest.mark.parametrize(
    ("config", "is_full"),
    [
        (python_config(), True),
        ('platform: "onnxruntime_onnx"', False),
        (python_config().replace('backend: "python"', ""), False),
        ('backend: "x" input { name: "a" data_type: TYPE_FP32 dims: [1] }', False),
        ('backend: "x" input { name: "a" dims: [1] } output { name: "b" data_type: TYPE_FP32 dims: [1] }', False),
        ('backend: "x" input { name: "a" data_type: TYPE_BOOL } output { name: "b" data_type: TYPE_BOOL }', False),
        (python_config(extra="a_field_of_next_year: 3"), True),
        ("max_batch_size: [", False),
    ],
)
def test_full_configs(tmp_path: Path, config: str, is_full: bool) -> None:
    """Auto-complete may be off only when each config names its backend and every tensor's name, datatype and shape."""
    write_model(tmp_path, "model", config=config)
    (model,) = list_models(tmp_path)
    assert model.has_full_config == is_full
    assert can_disable_auto_complete([model]) == is_full
    assert bool(model.config_error) == (config == "max_batch_size: [")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "-flag", "a b", "a\n", "a\x00", "x" * 129])
def test_names_that_could_escape_are_refused(name: str) -> None:
    """A model's name is one folder name inside the repository and nothing else."""
    with pytest.raises(InvalidRequest):
        check_model_name(name)


def test_what_cannot_be_loaded_is_refused_before_the_start(tmp_path: Path) -> None:
    """Each kind of wrong repository gets a sentence that names it and a way out; unbuilt models do not stop others."""
    with pytest.raises(PreflightFailed, match="does not exist"):
        check_repository(tmp_path / "nowhere")
    with pytest.raises(PreflightFailed, match="no model that can be served"):
        check_repository(tmp_path)
    write_model(tmp_path, "unbuilt", files={})
    with pytest.raises(PreflightFailed, match="no model that can be served"):
        check_repository(tmp_path)
    write_model(tmp_path, "good")
    assert [model.name for model in check_repository(tmp_path)] == ["good"]
    assert [model.name for model in check_repository(tmp_path, ["good", "good"])] == ["good"]
    with pytest.raises(PreflightFailed, match=r"'unbuilt' .* has no version folder.* Fix: build"):
        check_repository(tmp_path, ["good", "unbuilt"])
    with pytest.raises(PreflightFailed, match=r"no model 'bad' .*there are good, unbuilt"):
        check_repository(tmp_path, ["bad"])
    (tmp_path / "file").touch()
    with pytest.raises(PreflightFailed, match="cannot be read"):
        check_repository(tmp_path / "file")
