"""Writers of collections in processes that are killed: a process imports the package once, and forks for each."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

FORKING = """
import json, os, signal, sys, time, traceback
sys.path.insert(0, {tests!r})
import torch, conjoin.retrieval, tiny_encoder
torch.set_num_threads(1)
import killed
print("ready", flush=True)
for line in sys.stdin:
    name, arguments, kill_after = json.loads(line)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            getattr(killed, name)(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # it may have ended, but nobody has waited for it
    print(json.dumps([os.waitpid(child, 0)[1], time.monotonic() - start]), flush=True)
"""


class Writers:
    """Runs functions of this module in processes of their own."""

    def __init__(self):
        command = [sys.executable, "-W", "ignore", "-c", FORKING.format(tests=str(Path(__file__).parent))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process.stdout.readline()

    def run(self, function, *arguments, kill_after=None):
        """Run to the end, or kill after some seconds; returns the seconds, or None if it was killed."""
        self._process.stdin.write(json.dumps([function.__name__, [*map(str, arguments)], kill_after]) + "\n")
        self._process.stdin.flush()
        status, seconds = json.loads(self._process.stdout.readline())
        assert status in (0, signal.SIGKILL), f"{function.__name__} failed"
        return seconds if status == 0 else None

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def _small():
    from conjoin.retrieval import encode

    encode._BATCHES_AT_ONCE, encode._ROWS_PER_COMMIT = 1, 1


def first(folder):
    from conjoin.retrieval import encode_collection
    from tiny_encoder import tiny_encoder

    _small()
    encode_collection(rows(), tiny_encoder(), folder)


def update(folder):
    from conjoin.retrieval import encode_collection
    from tiny_encoder import tiny_encoder

    _small()
    encode_collection(changed_rows(), tiny_encoder(), folder, sync=True)


def index(folder):
    from conjoin.retrieval import Collection

    Collection.open(folder).index("ivf_flat", probes=100)


def rows():
    from tiny_encoder import tiny_rows

    return [row | {"kept": {"price": number}} for number, row in enumerate(tiny_rows(45))]


def changed_rows():
    """Some removed, new, encoded again, and with other kept columns: a fraction and a new one."""
    changed = rows()
    for number in range(5, 40, 6):
        changed[number] |= {"text": f"another text {number}"}
        changed[number + 1] |= {"kept": {"price": number + 0.5, "label": "x"}}
    return changed[3:] + [row | {"id": f"new {row['id']}"} for row in rows()[:7]]


def moments(count, whole, seed=0):
    """Seconds after which to kill, spread over a run that takes `whole` seconds."""
    generator = random.Random(seed)
    return [(number + generator.random()) / count * whole for number in range(count)]
