"""`direct` between GPUs: CUDA IPC, and one kernel for all copies of a load."""
