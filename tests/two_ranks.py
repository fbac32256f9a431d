"""Two processes on this machine that run the same function of a test file, as `accelerate launch` starts them."""

import json
import os
import socket
import subprocess
import sys
import time


def run_two_ranks(module, folder, *arguments, **variables):
    """Call `main` of a module of tests in two processes; what they print is in `RANK.log` of the folder.

    A process that fails ends the other.

    Args:
        module: Its name.
        folder: An existing folder.
        arguments: Of `main`; plain values.
        variables: Further environment variables.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import json\nfrom {module} import main\nmain(*json.loads({json.dumps(arguments)!r}))"
    environment = os.environ | variables | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true", "PYTHONPATH": os.pathsep.join(sys.path), "LOCAL_WORLD_SIZE": "2",
        "ACCELERATE_TORCH_DEVICE": "cpu",  # transformers 5.17 cannot resume on Accelerate's own "cpu:0"
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=(folder / f"{rank}.log").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        end = time.monotonic() + 400
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            assert time.monotonic() < end, "the ranks hang"
            time.sleep(0.1)
        for rank, process in enumerate(ranks):
            assert process.poll() in (0, None), (folder / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in ranks:
            process.kill()
