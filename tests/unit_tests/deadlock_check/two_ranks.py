"""Runs a script as two ranks and waits for both: ``python two_ranks.py SCRIPT``."""

import os
import socket
import subprocess
import sys

with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
ranks = [
    subprocess.Popen(
        [sys.executable, sys.argv[1]],
        env=os.environ
        | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        },
    )
    for rank in range(2)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
