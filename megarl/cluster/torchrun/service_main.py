"""Entry point of a `LocalService` process: ``python -m megarl.cluster.torchrun.service_main SOCKET_DESCRIPTOR``."""

from __future__ import annotations

import asyncio
import socket
import sys

from megarl.cluster.process import die_on_quit, ignore_interrupt, redirect_output
from megarl.cluster.service import ServiceServer, ServiceStart
from megarl.cluster.stacks.channel import serve_stacks
from megarl.cluster.wire import Wire

if __name__ == "__main__":
    ignore_interrupt()
    die_on_quit()
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    start: ServiceStart = wire.receive()
    redirect_output(start.log, start.name)
    serve_stacks()
    asyncio.run(ServiceServer(wire).serve(start))
