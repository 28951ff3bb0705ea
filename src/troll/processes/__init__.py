"""Processes apart from this one: asked over pipes, killed when they are too slow, kept busy by a pool."""

from troll.processes.conversation import Conversation
from troll.processes.lines import NoReply
from troll.processes.pool import Pool, PoolError, Worker, WorkerFailed, cores

__all__ = ["Conversation", "NoReply", "Pool", "PoolError", "Worker", "WorkerFailed", "cores"]
