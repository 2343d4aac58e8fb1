"""Inner loops in C++ for CPUs; on GPUs, and where there is no compiler, torch's own operations do the same."""
