"""Everything that is measured of KvdConnector between real engines on GPUs, in one short run: docs/gpu.md."""
