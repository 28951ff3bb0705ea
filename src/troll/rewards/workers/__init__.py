"""Processes apart from this one: asked over pipes, killed when they are too slow, kept busy by a pool."""

from troll.rewards.workers.conversation import Conversation
from troll.rewards.workers.lines import NoReply
from troll.rewards.workers.pool import Pool, PoolError, Worker, WorkerFailed, cores

__all__ = ["Conversation", "NoReply", "Pool", "PoolError", "Worker", "WorkerFailed", "cores"]
