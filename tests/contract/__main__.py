"""Prints the contract table: `python -m tests.contract [words of a name]`, us without Ray beside a real Triton."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.contract import matrix, servers, table


def main(words: str) -> int:
    """Ask both sides, print what they said; 1 when something is not as the table says."""
    rows = [row for row in table.USABLE if words in row.name]
    with tempfile.TemporaryDirectory(prefix="contract-") as folder:
        servers.write_repository(Path(folder))
        with servers.front_and_triton(Path(folder)) as (ours, theirs):
            results = matrix.run(rows, ours, theirs)
    for line in matrix.lines(results):
        print(line)
    faults = [fault for result in results for fault in result.faults()]
    print(f"\n{len(results)} cases, {sum(len(result.ours) for result in results)} comparisons, {len(faults)} faults")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
