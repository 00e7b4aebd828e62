"""What Nsight Systems, Nsight Compute and torch.profiler say about a step: collected live, or read from recorded files.

collect (runs a tool on target.py) -> a file -> ncu, nsys, torch_trace (read it) -> metrics, timeline, roofline ->
figures. recorded.py hands the same readers the files that came with the package.
"""
