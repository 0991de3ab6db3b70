"""`direct` in host memory: process_vm_readv, or a mapping of the peer's memfd."""
