"""Set a checkout up: check the machine, make `.venv`, install the lock, the Triton runtime and the sample models.

Needs nothing but a Python; run by `make install`. Every check comes before anything is written, and a step whose
inputs have not changed is skipped. Written for any Python 3, so that a wrong one is told so instead of a traceback.
"""

from __future__ import print_function

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
# Clients of others that tests talk through have an environment of their own: their pins are not ours.
CLIENTS = os.path.join(VENV, "clients")
CLIENTS_PYTHON = os.path.join(CLIENTS, "bin", "python")

MIN_GLIBC = (2, 35)  # the Triton wheel is tagged manylinux_2_35
MIN_DISK_BYTES = 3 * 1024**3  # the environment, the runtime, the samples and pip's downloads of them


class Problem(Exception):
    """What is wrong with this machine, and the fix."""


def check_machine():
    """Everything that would make a later step fail half-way."""
    version = sys.version_info[:2]
    if not (3, 10) <= version <= (3, 13):
        raise Problem(
            "Python {}.{} is not supported (3.10 to 3.13 are). "
            "Fix: install one of them and run `make PYTHON=python3.11 ...`.".format(*version)
        )
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Problem(
            "The packaged Triton runs on Linux x86_64, this is {} {}. Fix: use a Linux x86_64 machine or container, "
            "or point `endpoints:` at Triton servers elsewhere.".format(sys.platform, platform.machine())
        )
    glibc = _glibc_version()
    if glibc is None or glibc < MIN_GLIBC:
        raise Problem(
            "The C library is {}, Triton needs glibc 2.35 or newer. Fix: use Debian 12, Ubuntu 22.04 or newer.".format(
                ".".join(map(str, glibc)) if glibc else "not glibc"
            )
        )
    missing = list(_missing_parts(version))
    if missing:
        raise Problem(
            "This Python lacks {}. Fix: `apt-get install {}`, or use a complete Python of your own with "
            "`make PYTHON=... serve` (built with --enable-shared).".format(
                " and ".join(what for what, _ in missing), " ".join(package for _, package in missing)
            )
        )
    if not os.path.exists(VENV_PYTHON):
        free = shutil.disk_usage(ROOT).free
        if free < MIN_DISK_BYTES:
            raise Problem(
                "{:.1f} GiB are free in {}, the installation needs {:.0f} GiB. Fix: free some space.".format(
                    free / 1024**3, ROOT, MIN_DISK_BYTES / 1024**3
                )
            )


def _missing_parts(version):
    """Parts of the running Python that Debian packages apart from it, each with the package's name."""
    library = "libpython{}.{}.so.1.0".format(*version)
    if version != (3, 13) and not _has_library(library):  # for 3.13 the Triton wheel brings it
        yield "{} (Triton's python backend loads it)".format(library), "libpython{}.{}".format(*version)
    if not os.path.exists(VENV_PYTHON):
        try:
            import ensurepip  # noqa: F401
            import venv  # noqa: F401
        except ImportError:
            yield "what makes virtual environments", "python{}.{}-venv".format(*version)


def _glibc_version():
    name, text = platform.libc_ver()
    if name != "glibc":
        return None
    return tuple(int(part) for part in text.split(".")[:2])


def _has_library(library):
    directory = sysconfig.get_config_var("LIBDIR") or ""
    if os.path.exists(os.path.join(directory, library)):
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def step(title, stamp_name, inputs, commands):
    """Run commands unless the stamp says that they ran with the same inputs.

    Args:
        title: Shown while it runs.
        stamp_name: File name of the stamp in `.venv`.
        inputs: Files whose content decides whether to run, and texts.
        commands: Argument lists, run one after another in the checkout.
    """
    digest = hashlib.sha256()
    for item in inputs:
        path = os.path.join(ROOT, item)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                digest.update(file.read())
        digest.update(item.encode())
    stamp = os.path.join(VENV, stamp_name)
    if os.path.exists(stamp):
        with open(stamp) as file:
            if file.read() == digest.hexdigest():
                return
    started = time.time()
    print("==> {}".format(title), flush=True)
    for command in commands:
        subprocess.check_call(command, cwd=ROOT)
    with open(stamp, "w") as file:
        file.write(digest.hexdigest())
    print("    done in {:.0f} s".format(time.time() - started), flush=True)


def install(with_dev):
    """All steps, in the order in which they need each other."""
    if not os.path.exists(VENV_PYTHON):
        print("==> Making .venv with Python {}".format(platform.python_version()), flush=True)
        subprocess.check_call([sys.executable, "-m", "venv", VENV])
    pip = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
    quiet = [] if sys.stdout.isatty() else ["--progress-bar", "off", "--quiet"]
    lock = "requirements-dev.lock" if with_dev else "requirements.lock"
    is_dev_in = os.path.exists(os.path.join(VENV, ".stamp-requirements-dev.lock"))
    if with_dev or not is_dev_in:  # the dev lock holds all of the other
        step(
            "Installing the locked dependencies ({}; a minute or two the first time)".format(lock),
            ".stamp-" + lock,
            [lock],
            [pip + quiet + ["--require-hashes", "-r", lock]],
        )
    step(
        "Installing serve_app itself (editable)",
        ".stamp-package",
        ["pyproject.toml", ROOT],
        [pip + ["--quiet", "--no-deps", "--no-build-isolation", "-e", "."]],
    )
    step(
        "Installing the Triton runtime (a 55 MB wheel)",
        ".stamp-runtime",
        ["serve_app/fleet/triton-runtime.txt", ROOT],
        [[VENV_PYTHON, "-m", "serve_app.fleet.install"]],
    )
    subprocess.check_call([VENV_PYTHON, "-m", "serve_app.samples"], cwd=ROOT)
    if with_dev:
        install_clients(quiet)


def install_clients(quiet):
    """The KServe client and perf_analyzer, for the tests alone."""
    pip = [CLIENTS_PYTHON, "-m", "pip", "--disable-pip-version-check", "install"]
    pip += quiet + ["--only-binary=:all:", "--no-compile", "--require-hashes"]
    locks = ["tests/clients/kserve.lock", "tests/clients/perf-analyzer.txt"]
    step(
        "Installing the KServe client and perf_analyzer for the tests (half a minute)",
        ".stamp-clients",
        locks + [ROOT],
        [
            [VENV_PYTHON, "-m", "venv", "--clear", CLIENTS],
            pip + ["-r", locks[0]],
            pip + ["--no-deps", "-r", locks[1]],
        ],
    )


def main():
    """Returns the exit status: 0, 1 when a step failed, 2 when the machine is not fit."""
    try:
        check_machine()
        install(with_dev="--dev" in sys.argv[1:])
    except Problem as problem:
        print("error: {}".format(problem), file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print("error: {} failed; what it said is above.".format(" ".join(map(str, error.cmd))), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
