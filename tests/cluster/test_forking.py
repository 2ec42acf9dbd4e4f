"""Children that are forked give up their copies of connections, and nothing else.

In a program of its own: a process with the threads of a test run is not to be forked.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import gc, os, socket, struct, sys, tempfile, time

def in_child(function):
    process = os.fork()
    if process == 0:
        try:
            function()
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

def open_files(count):
    return [tempfile.TemporaryFile() for _ in range(count)]

def write(files):
    for file in files:
        file.write(b"mine")
        file.flush()
"""
COPIES = """
from replicax.cluster import _forking

ours, theirs = socket.socketpair()
_forking.keep_from_children(ours)

def child():
    global ours
    files = open_files(4)
    in_child(lambda: write(files))
    ours = None
    gc.collect()  # its number was not given to a file, which it would close now
    write(files)

in_child(child)
ours.sendall(b"still there")
assert theirs.recv(11) == b"still there"

done = os.pipe()
process = os.fork()
if process == 0:  # one that outlives what its parent does with the connection
    os.read(done[0], 1)
    os._exit(0)
ours.close()
theirs.settimeout(10)
assert theirs.recv(1) == b"", "the child keeps it open"
os.write(done[1], b"x")
os.waitpid(process, 0)
_forking.keep_from_children(theirs)
assert _forking._connections == [theirs], "closed ones are forgotten"
"""
HUB = """
from replicax.cluster._hub import Hub
from replicax.cluster._hub_service import HubService
from replicax.cluster._members import Address, Members

listener = socket.create_server(("127.0.0.1", 0))
addresses = tuple(Address("127.0.0.1", port) for port in (1, 2))
service = HubService(Hub(Members(("worker 0", "worker 1"), addresses, 0), "127.0.0.1:3"), listener)

def connect():
    client = socket.create_connection(listener.getsockname())
    client.settimeout(10)
    return client

for _ in range(10):
    client = connect()
    time.sleep(0.02)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # a reset
time.sleep(0.2)
files = open_files(12)  # which have the numbers of the connections that were reset
in_child(lambda: write(files))

def child():
    files = open_files(12)
    in_child(lambda: write(files))  # the hub's handler has nothing more to do here

in_child(child)
client = connect()
client.sendall(b"[]\\n")
assert b"Refused" in client.recv(1000), "the hub is as it was"
client.close()
service.close()
"""
PREEMPTION = """
import signal
import replicax as rx

assert not rx.preemption.requested()  # installs the handler
process = os.fork()
if process == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
assert rx.preemption.requested()
"""


@pytest.mark.parametrize("program", [COPIES, HUB, PREEMPTION], ids=["copies", "hub", "preemption"])
def test_children_give_up_connections_and_nothing_else(program):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
