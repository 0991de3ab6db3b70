"""How fast one GPU reads scattered pieces of another one's memory, by copies of the driver and by kernels."""
