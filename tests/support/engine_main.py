"""The process of `tests.support.engine_process.EngineProcess`.

Usage: python -m tests.support.engine_main SOCKET
"""

import socket
import sys
from multiprocessing.connection import Connection

from tests.support import engine_process

if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(sys.argv[1])
        connection = Connection(connecting.detach())
    engine_process.serve(connection)
