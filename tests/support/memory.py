"""Anonymous memory of a program in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_WATCH = """
import json, sys, threading, time

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
result = None
"""


def peak_anonymous(program: str, *arguments: str) -> tuple[int, object]:
    """Peak bytes of anonymous memory while `program` runs with `sys.argv[1:]`, and what it left in `result`.

    Programs are compiled anew, and not written to a cache.
    """
    source = _WATCH + program + "\nprint(json.dumps([peak, result]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # writing programs to it takes some 45 MB of its own
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    peak, result = json.loads(done.stdout)
    return peak, result
