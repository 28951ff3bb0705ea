"""Worker processes: asked over pipes, killed at their deadline, and a pool that keeps one busy per core."""

from troll.rewards.workers.pool import Pool, PoolError, Worker, WorkerFailed, cores
from troll.rewards.workers.process import NoReply, WorkerProcess

__all__ = ["NoReply", "Pool", "PoolError", "Worker", "WorkerFailed", "WorkerProcess", "cores"]
