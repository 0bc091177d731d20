"""Runs commands at once: python scripts/at_once.py "make torture" "make types".

The output of a command is printed in one piece when it has ended. If one of them fails, the others run to their end,
and the last line names those that failed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main(commands: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    failed = []
    with tempfile.TemporaryDirectory() as logs:
        running = {}
        for number, command in enumerate(commands):
            with Path(logs, str(number)).open("wb") as log:
                running[number] = subprocess.Popen(command, shell=True, stdout=log, stderr=subprocess.STDOUT)
        try:
            while running:
                time.sleep(0.1)
                for number in [number for number, process in running.items() if process.poll() is not None]:
                    status = running.pop(number).returncode
                    print(f"=== {commands[number]}: {f'FAILED, status {status}' if status else 'done'}", flush=True)
                    sys.stdout.buffer.write(Path(logs, str(number)).read_bytes())
                    sys.stdout.flush()
                    if status:
                        failed.append(commands[number])
        finally:
            for process in running.values():
                process.terminate()
                process.wait()
    if failed:
        print("=== FAILED: " + "; ".join(failed), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
