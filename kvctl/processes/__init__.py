"""What starts, finds, holds up and ends other processes, for the demo and the benchmarks."""
