"""Where `kvd.vllm.builds.recovering` was before: command lines with ``--scheduler-cls`` name it."""

from kvd.vllm.builds.recovering import recovering_scheduler

__all__ = ["recovering_scheduler"]
