"""Processes of parameter servers and workers, on Ray; the strategy and the coordinator use them.

Nothing else imports Ray, and it is imported only when it is needed.
"""

from replicax.parameter_server._actors import Actor, ActorLost, Reply
from replicax.parameter_server._engine import Engine, RayEngine
from replicax.parameter_server._operations import Change, UpdateOf, WriteTo
from replicax.parameter_server._server import Server
from replicax.parameter_server._servers import Servers
from replicax.parameter_server._variable_server import VariableServer

__all__ = [
    "Actor",
    "ActorLost",
    "Change",
    "Engine",
    "RayEngine",
    "Reply",
    "Server",
    "Servers",
    "UpdateOf",
    "VariableServer",
    "WriteTo",
]
