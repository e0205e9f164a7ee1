"""Why a server ended, read from the end of its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.fleet.server_log import TAIL_BYTES, is_port_taken, last_errors, read_tail

PORT = (
    "I1130 19:09:14.354254 10306 grpc_server.cc:2558] fine\n"
    "E1130 19:09:18.381066 10547 main.cc:245] \"failed to start GRPC service: Unavailable - Socket '127.0.0.1:28001' "
    'already in use "\n'
    "I1130 19:09:19.565578 10574 pb_stub.cc:2145]  Non-graceful termination detected. \n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("I1130 19:09:14.354254 10306 x.cc:1] all is well\n", ""),
        (PORT, "failed to start GRPC service: Unavailable - Socket '127.0.0.1:28001' already in use"),
        (
            'E1130 19:09:14.352577 10306 tritonserver.cc:2607] "Invalid argument: ValueError: boom\\n\\nAt:\\n  /x"\n',
            "Invalid argument: ValueError: boom",
        ),
        ("error: creating server: Internal - failed to stat file /x\n", "error: creating server: Internal - failed to "
         "stat file /x"),
        ("/t/tritonserver: unrecognized option '--no'\nUsage: x\n", "unrecognized option '--no'"),
        (
            "/t/tritonserver: error while loading shared libraries: libx.so: cannot open shared object file\n",
            "error while loading shared libraries: libx.so: cannot open shared object file",
        ),
        ("E0000 guard: cannot start /x: [Errno 2] No such file\n", "guard: cannot start /x: [Errno 2] No such file"),
        ("E1130 1:1:1.1 1 a.cc:1] one\nE1130 1:1:1.1 1 a.cc:1] two\nE1130 1:1:1.1 1 a.cc:1] three\n", "two; three"),
    ],
)  # fmt: skip
def test_last_errors(text: str, expected: str) -> None:
    """The last error lines come out without time, file and stack trace; a log without errors gives nothing."""
    assert last_errors(text) == expected


def test_a_taken_port_is_recognised() -> None:
    """The one end that is worth another port."""
    assert is_port_taken(PORT)
    assert not is_port_taken("E1130 1:1:1.1 1 a.cc:1] something else\n")


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    """A large log costs no memory, and one that is not there is an empty one."""
    path = tmp_path / "log"
    assert read_tail(path) == ""
    path.write_bytes(b"a" * TAIL_BYTES * 2 + b"\xff the end")
    assert len(read_tail(path)) == TAIL_BYTES
    assert read_tail(path).endswith("the end")
